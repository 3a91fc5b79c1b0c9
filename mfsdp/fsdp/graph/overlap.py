"""When a compiled graph starts its gathers and waits for its reductions: a pass over Inductor's graph.

Forward, and likewise backward::

    before   gather 0, wait 0, compute 0, gather 1, wait 1, compute 1, gather 2, ...
    after    gather 0, gather 1, wait 0, compute 0, gather 2, wait 1, compute 1, ...

    before   reduce 0, wait 0, compute 1, reduce 1, wait 1, ...
    after    reduce 0, compute 1, reduce 1, wait 0, compute 2, reduce 2, wait 1, ...

so that a unit is gathered while the one before it computes, and reduced while the one after it does, and at most two of
each are under way. The order depends on the graph alone, which is the same on all ranks, and not on estimated times.
Dependencies pin it, as Inductor's scheduler would otherwise undo it to save memory.

The order is made while ``mfsdp::own`` still makes this rank's graph like all others. Then what the rank owns is used in
place; as that no longer waits for the unit's gather, it is held back until the next one has been started, which other
ranks may be waiting for.
"""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes, get_hash_for_files
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.utils._ordered_set import OrderedSet

__all__ = ["Overlap", "install", "is_installed"]

_VIEWS = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.t.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.expand.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
}

_OWN = torch.ops.mfsdp.own.default


def install() -> None:
    """Let Inductor run the pass on every graph; it does nothing to those without a unit."""
    if not is_installed():
        config.post_grad_custom_post_pass = [
            *get_custom_graph_passes(config.post_grad_custom_post_pass),
            Overlap(),
        ]


def is_installed() -> bool:
    """Whether Inductor, as it is configured here and now, runs the pass."""
    return any(isinstance(each, Overlap) for each in get_custom_graph_passes(config.post_grad_custom_post_pass))


class Overlap(CustomGraphPass):
    """See the module's docstring."""

    def uuid(self) -> bytes:
        # it stands for the lowerings, too, on which generated code depends as much
        return get_hash_for_files((__file__, str(Path(__file__).with_name("lowering.py"))))

    def __call__(self, graph: fx.Graph) -> None:
        gathers = list(_started(graph, torch.ops.mfsdp.gather_unit.default))
        reductions = list(_started(graph, torch.ops.mfsdp.reduce_unit.default))
        after: dict[fx.Node, OrderedSet[fx.Node]] = {}
        _start_gathers_early(graph, gathers, after)
        _wait_for_reductions_late(graph, reductions, after)
        _use_what_is_owned(graph)
        if after:
            order = {node: index for index, node in enumerate(graph.nodes)}
            preserve_node_ordering(graph, dict(sorted(after.items(), key=lambda item: order[item[0]])))


def _use_what_is_owned(graph: fx.Graph) -> None:
    """Replace each ``own`` by its first argument.

    Not where it is an output: the graph that it is an output of calls it new, and another graph may write into it.
    """
    for node in graph.find_nodes(op="call_function", target=_OWN):
        local = node.args[0]
        if node.meta["val"].stride() != local.meta["val"].stride() or any(_is_output(user) for user in node.users):
            continue
        node.replace_all_uses_with(local)
        graph.erase_node(node)


def _is_output(node: fx.Node) -> bool:
    """Whether ``node`` is the output, or a view that is one."""
    return node.op == "output" or (node.target in _VIEWS and any(_is_output(user) for user in node.users))


_Started = tuple[fx.Node, fx.Node]
"""A node that starts a collective, and the one that waits for it."""


def _started(graph: fx.Graph, target: torch._ops.OpOverload) -> Iterator[_Started]:
    for node in graph.find_nodes(op="call_function", target=target):
        waits = [user for user in node.users if user.target is torch.ops._c10d_functional.wait_tensor.default]
        if len(waits) == 1:
            yield node, waits[0]


def _start_gathers_early(graph: fx.Graph, gathers: list[_Started], after: dict[fx.Node, OrderedSet[fx.Node]]) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    for index in range(1, len(gathers)):
        gather, _ = gathers[index]
        _, wait = gathers[index - 1]
        if not _move_before(gather, wait):
            continue
        after.setdefault(wait, OrderedSet()).add(gather)
        for user in _users_of_owned(wait):
            after.setdefault(user, OrderedSet()).add(gather)
        if index > 1:
            used_before = [
                user for user in _consumers(gathers[index - 2][1]) if order[user] < order[wait] and user.op != "output"
            ]
            if used_before:
                last = max(used_before, key=order.__getitem__)
                after.setdefault(gather, OrderedSet()).add(last)


def _wait_for_reductions_late(
    graph: fx.Graph, reductions: list[_Started], after: dict[fx.Node, OrderedSet[fx.Node]]
) -> None:
    order = {node: index for index, node in enumerate(graph.nodes)}
    for index, ((_, wait), (following, _)) in enumerate(pairwise(reductions)):
        depending = _descendants(wait)
        if following in depending or order[following] < order[wait]:
            continue
        # what follows from the wait up to there goes behind it, in its order
        moved = sorted((node for node in depending if order[node] < order[following]), key=order.__getitem__)
        behind = following
        for node in [wait, *moved]:
            behind.append(node)
            behind = node
        order = {node: index for index, node in enumerate(graph.nodes)}
        after.setdefault(wait, OrderedSet()).add(following)
        if index + 2 < len(reductions):
            after.setdefault(reductions[index + 2][0], OrderedSet()).add(wait)


def _move_before(node: fx.Node, place: fx.Node) -> bool:
    """Move ``node`` before ``place``, with those views of inputs of the graph that it is made from.

    Returns:
        Whether that was possible: it is not if it depends on something that is computed.
    """
    needed: list[fx.Node] = []
    pending = list(node.all_input_nodes)
    while pending:
        each = pending.pop()
        if each.op == "placeholder" or each in needed:
            continue
        if each.target not in _VIEWS:
            return False
        needed.append(each)
        pending.extend(each.all_input_nodes)
    for each in reversed(needed):
        place.prepend(each)
    place.prepend(node)
    return True


def _users_of_owned(wait: fx.Node) -> list[fx.Node]:
    """The operators that compute with parameters of a unit that this rank owns."""
    owned = [user for user in wait.users if user.target is _OWN]
    return [user for each in owned for user in _consumers(each) if isinstance(user.target, torch._ops.OpOverload)]


def _consumers(full: fx.Node) -> list[fx.Node]:
    """What computes with a full tensor, with views of it, or with what this rank owns of it."""
    found: list[fx.Node] = []
    pending = list(full.users)
    while pending:
        each = pending.pop()
        if each.target in _VIEWS or each.target is _OWN:
            pending.extend(each.users)
        else:
            found.append(each)
    return found


def _descendants(node: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user not in found:
                found.add(user)
                pending.append(user)
    return found
