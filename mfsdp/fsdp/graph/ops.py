"""The operators of graph style: a unit's gather and its reduction, as torch.compile sees them.

::

    mfsdp::gather_unit(locals, ...)  -> flat     started, not complete
    _c10d_functional::wait_tensor(flat) -> flat  complete
    mfsdp::own(local, flat) -> parameter         a parameter that this rank has itself

Both operators start collectives and return a tensor that may be read after ``wait_tensor`` of it, as torch's own
functional collectives do; the compiler may put other work between the two. They are described by numbers alone (where
what lies, and the name of the process group), so that a compiled graph can be cached and run in another process.

A unit is laid out as the segments of its owners one after the other, then each ``ROWS`` parameter by itself, its rows
in order. It travels in *pieces*, each from one rank (gather) or to one (reduction)::

    | segment of rank 0 | segment of rank 2  | embedding: rows of rank 0 | rows of rank 1 | rows of rank 2 |
      root 0              root 2               root 0                      root 1           root 2
                                               (one all-gather where the rows of all ranks are equally many)

The *full tensor* of a unit is one flat tensor of all that. Where parameters are computed with in the dtype in which
they are stored, it is without the segment of this rank: the sharded parameters that it owns are its full parameters,
and are sent from where they are.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _register_work
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

from mfsdp.dtensor.comm_counter import see_through

__all__ = ["ALL_RANKS", "gather_unit", "own", "own_ranges", "pack", "reduce_packed_", "reduce_unit", "wait"]

ALL_RANKS = -1
"""The root of a piece that lies evenly on all ranks, in the order of the group."""

_library = torch.library.Library("mfsdp", "FRAGMENT")
_library.define(
    "gather_unit(Tensor[] locals, int[] offsets, int numel, int[] roots, int[] sizes, int here, ScalarType dtype, "
    "str group_name) -> Tensor"
)
_library.define("own(Tensor local, Tensor flat) -> Tensor")
_library.define(
    "reduce_unit(Tensor?[] grads, int[] grad_sizes, int[] roots, int[] sizes, int here, int world_size, "
    "ScalarType dtype, float divide_by, str group_name) -> Tensor"
)
_library.define("pack(Tensor?[] grads, int[] grad_sizes, ScalarType dtype, float divide_by) -> Tensor")
_library.define("reduce_packed_(Tensor(a!) flat, int[] roots, int[] sizes, str group_name) -> ()")


def gather_unit(
    locals_: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    roots: Sequence[int],
    sizes: Sequence[int],
    here: int,
    dtype: torch.dtype,
    group_name: str,
) -> Tensor:
    """Start to bring a unit's full tensor together.

    Args:
        locals_: what this rank holds of each parameter; empty ones are passed over.
        offsets: where each of them starts in the full tensor; -1 for those that are sent from where they are.
        numel: elements of the full tensor.
        roots: for each piece, the group rank that it comes from, or :data:`ALL_RANKS`.
        sizes: elements of each piece.
        here: rank of this process in the group.
        dtype: of the full tensor; what is held in another one is cast before it travels.
        group_name: the process group.

    Returns:
        The full tensor, 1-D, complete after :func:`wait`.
    """
    group = _resolve_process_group(GroupName(group_name))
    flat = locals_[0].new_empty(numel, dtype=dtype)
    own: list[Tensor] = []
    for local, offset in zip(locals_, offsets, strict=True):
        if not local.numel():
            continue
        if offset < 0:
            own.append(local)
        else:
            flat[offset : offset + local.numel()].view(local.shape).copy_(local)
    start = 0
    for root, size in zip(roots, sizes, strict=True):
        if root == here and own:
            piece = _sent(own, size)
        else:
            piece = flat[start : start + size]
            start += size
        if root == ALL_RANKS:
            share = size // group.size()
            mine = piece[group.rank() * share : (group.rank() + 1) * share]
            work = dist.all_gather_single(piece, mine, group=group, async_op=True)
        else:
            work = dist.broadcast(piece, group_src=root, group=group, async_op=True)
        _register_work(flat, work)
    return flat


def _sent(own: list[Tensor], size: int) -> Tensor:
    """Take the first tensors, ``size`` elements of them, and return them as one: one alone is not copied."""
    parts: list[Tensor] = []
    while size:
        part = own.pop(0).reshape(-1)
        parts.append(part)
        size -= part.numel()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _fake_gather(
    locals_: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    roots: Sequence[int],
    sizes: Sequence[int],
    here: int,
    dtype: torch.dtype,
    group_name: str,
) -> Tensor:
    return locals_[0].new_empty(numel, dtype=dtype)


def own(local: Tensor, flat: Tensor) -> Tensor:
    """A full parameter that this rank owns, for a compiler: ``local``, but only after ``flat`` is complete.

    It makes the graph of an owner like that of every other rank, so that both put collectives into the same order. By
    itself it copies; Inductor's graphs have ``local`` in its place (:mod:`mfsdp.fsdp.graph.overlap`).
    """
    return local.clone(memory_format=torch.contiguous_format)


def _fake_own(local: Tensor, flat: Tensor) -> Tensor:
    return torch.empty_like(local, memory_format=torch.contiguous_format)


def reduce_unit(
    grads: Sequence[Tensor | None],
    grad_sizes: Sequence[int],
    roots: Sequence[int],
    sizes: Sequence[int],
    here: int,
    world_size: int,
    dtype: torch.dtype,
    divide_by: float,
    group_name: str,
) -> Tensor:
    """Start to sum a unit's full gradients over all ranks, each piece to its root.

    Args:
        grads: the gradient of each parameter on this rank, in the order of the full tensor; None counts as zeros.
        grad_sizes: their numbers of elements.
        roots: for each piece, the group rank that receives its sum, or :data:`ALL_RANKS` if all receive their share.
        sizes: elements of each piece.
        here: rank of this process in the group.
        world_size: number of ranks.
        dtype: of the sum.
        divide_by: what gradients are divided by before they are summed.
        group_name: the process group.

    Returns:
        The pieces of this rank one after the other, 1-D, complete after :func:`wait`.
    """
    group = _resolve_process_group(GroupName(group_name))
    like = _first(grads)
    mine = like.new_empty(_own_numel(roots, sizes, here, world_size), dtype=dtype)
    parts = _Parts(grads, grad_sizes)
    filled = 0
    for root, size in zip(roots, sizes, strict=True):
        own = _own_numel([root], [size], here, world_size)
        target = mine[filled : filled + own]
        filled += own
        piece = target if own == size else like.new_empty(size, dtype=dtype)
        parts.take_into(piece)
        if divide_by != 1:
            piece /= divide_by
        if root == ALL_RANKS:
            work = dist.reduce_scatter_single(target, piece, group=group, async_op=True)
        else:
            work = dist.reduce(piece, group_dst=root, group=group, async_op=True)
        _register_work(mine, work)
    return mine


def _fake_reduce(
    grads: Sequence[Tensor | None],
    grad_sizes: Sequence[int],
    roots: Sequence[int],
    sizes: Sequence[int],
    here: int,
    world_size: int,
    dtype: torch.dtype,
    divide_by: float,
    group_name: str,
) -> Tensor:
    return _first(grads).new_empty(_own_numel(roots, sizes, here, world_size), dtype=dtype)


def pack(grads: Sequence[Tensor | None], grad_sizes: Sequence[int], dtype: torch.dtype, divide_by: float) -> Tensor:
    """A unit's gradients one after the other, for :func:`reduce_packed_`.

    Arguments are those of :func:`reduce_unit`.
    """
    flat = _first(grads).new_empty(sum(grad_sizes), dtype=dtype)
    _Parts(grads, grad_sizes).take_into(flat)
    if divide_by != 1:
        flat /= divide_by
    return flat


def _fake_pack(
    grads: Sequence[Tensor | None], grad_sizes: Sequence[int], dtype: torch.dtype, divide_by: float
) -> Tensor:
    return _first(grads).new_empty(sum(grad_sizes), dtype=dtype)


def reduce_packed_(flat: Tensor, roots: Sequence[int], sizes: Sequence[int], group_name: str) -> None:
    """Start to sum over all ranks what :func:`pack` has made: the two are :func:`reduce_unit` in Inductor's graphs.

    Args:
        flat: on each rank its own pieces hold sums after :func:`wait`, and the others nothing of use.
        roots: for each piece, the group rank that receives its sum.
        sizes: elements of each piece.
        group_name: the process group.
    """
    group = _resolve_process_group(GroupName(group_name))
    start = 0
    for root, size in zip(roots, sizes, strict=True):
        work = dist.reduce(flat[start : start + size], group_dst=root, group=group, async_op=True)
        _register_work(flat, work)
        start += size


def _fake_reduce_packed(flat: Tensor, roots: Sequence[int], sizes: Sequence[int], group_name: str) -> None:
    return None


def own_ranges(roots: Sequence[int], sizes: Sequence[int], here: int) -> list[tuple[int, int]]:
    """From where to where the pieces lie whose root is ``here``, adjacent ones as one."""
    found: list[tuple[int, int]] = []
    start = 0
    for root, size in zip(roots, sizes, strict=True):
        if root == here:
            begun = found.pop()[0] if found and found[-1][1] == start else start
            found.append((begun, start + size))
        start += size
    return found


def _first(grads: Sequence[Tensor | None]) -> Tensor:
    return next(grad for grad in grads if grad is not None)


def _own_numel(roots: Sequence[int], sizes: Sequence[int], here: int, world_size: int) -> int:
    shares = {here: 1, ALL_RANKS: world_size}
    return sum(size // shares[root] for root, size in zip(roots, sizes, strict=True) if root in shares)


class _Parts:
    """Gradients as one long row of elements, taken from its start."""

    def __init__(self, grads: Sequence[Tensor | None], sizes: Sequence[int]) -> None:
        self._left = [(grad, 0, size) for grad, size in zip(reversed(grads), reversed(sizes), strict=True)]

    def take_into(self, piece: Tensor) -> None:
        """Copy the next elements, as many as ``piece`` has, into it."""
        start = 0
        while start < len(piece):
            grad, first, size = self._left.pop()
            taken = min(size - first, len(piece) - start)
            target = piece[start : start + taken]
            if grad is None:
                target.zero_()
            elif taken == size:
                target.view(grad.shape).copy_(grad)
            else:
                target.copy_(grad.reshape(-1)[first : first + taken])
            if first + taken < size:
                self._left.append((grad, first + taken, size))
            start += taken


def wait(tensor: Tensor) -> Tensor:
    """Wait for what was started with ``tensor`` as its result; the same tensor."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


def _register(name: str, implementation: Callable[..., object], fake: Callable[..., object]) -> None:
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mfsdp::{name}", fake, lib=_library)
    see_through(getattr(torch.ops.mfsdp, name).default, implementation)


_register("gather_unit", gather_unit, _fake_gather)
_register("own", own, _fake_own)
_register("reduce_unit", reduce_unit, _fake_reduce)
_register("pack", pack, _fake_pack)
_register("reduce_packed_", reduce_packed_, _fake_reduce_packed)
