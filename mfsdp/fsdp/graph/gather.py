"""A unit's parameters, full: one differentiable operation, the gather; its backward is the rooted reduction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.traceback import annotate

from mfsdp.fsdp.collectives import failure
from mfsdp.fsdp.graph import ops
from mfsdp.fsdp.graph.saved import SavedParameters
from mfsdp.fsdp.graph.spec import UnitSpec

__all__ = ["GatherParameters", "gathered", "parameters_in"]


def gathered(spec: UnitSpec, locals_: Sequence[Tensor], what: str) -> Tensor:
    """The full tensor of a unit.

    Args:
        spec: the unit's.
        locals_: what this rank holds of each parameter.
        what: what to call this in errors.

    Raises:
        RuntimeError: another rank has failed (outside of compiled graphs, whose waits raise what c10d raises).
    """
    flat = torch.ops.mfsdp.gather_unit(
        locals_,
        spec.offsets,
        spec.numel,
        spec.gather_roots,
        spec.gather_sizes,
        spec.here,
        spec.compute,
        spec.group_name,
    )
    return _complete(flat, what)


def _complete(tensor: Tensor, what: str) -> Tensor:
    if torch.compiler.is_compiling():
        return ops.wait(tensor)
    try:
        return ops.wait(tensor)
    except RuntimeError as error:
        raise failure(what, error) from error


def parameters_in(flat: Tensor, spec: UnitSpec, locals_: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The parameters: views of the full tensor, and of what this rank holds where that is all of one."""
    found = []
    for start, shape, local in zip(spec.starts, spec.shapes, locals_, strict=True):
        if start >= 0:
            found.append(flat[start : start + _numel(shape)].view(shape))
        elif torch.compiler.is_compiling():
            found.append(torch.ops.mfsdp.own(local, flat))
        else:
            found.append(local.detach())
    return tuple(found)


def reduced(spec: UnitSpec, grads: Sequence[Tensor | None], what: str) -> list[Tensor | None]:
    """The average over all ranks of full gradients, as gradients of what this rank holds.

    Args:
        spec: the unit's.
        grads: one for each parameter; None counts as zeros.
        what: what to call this in errors.

    Returns:
        One for each parameter, None for those that are frozen.
    """
    flat = torch.ops.mfsdp.reduce_unit(
        [grads[index] for index in spec.reduced],
        [_numel(spec.shapes[index]) for index in spec.reduced],
        spec.reduce_roots,
        spec.reduce_sizes,
        spec.here,
        spec.world_size,
        spec.reduce,
        spec.divide_before,
        spec.group_name,
    )
    flat = _complete(flat, what)
    if spec.replicas_name and flat.numel():  # replicas own the same: they agree on whether there is something to sum
        flat = torch.ops._c10d_functional.all_reduce(flat, "sum", spec.replicas_name)
        flat = _complete(flat, f"all-reduce over replicas of the {what}")
    if spec.divide_after != 1:
        flat = flat / spec.divide_after
    flat = flat.to(spec.stored)
    found: list[Tensor | None] = [None] * len(spec.shapes)
    start = 0
    for index in spec.reduced:
        shape = spec.local_shapes[index]
        size = _numel(shape)
        # Empty ones are made from the result as well: in a compiled graph nothing may look unused on some ranks only.
        found[index] = flat[start : start + size].view(shape)
        start += size
    return found


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


class GatherParameters(torch.autograd.Function):
    """(spec, unit's name, what regathers in backward, what this rank holds of each parameter) -> full parameters."""

    @staticmethod
    def forward(
        ctx: Any, spec: UnitSpec, unit: str, saved: SavedParameters | None, *locals_: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.spec = spec
        ctx.unit = unit
        ctx.saved = saved
        ctx.set_materialize_grads(False)
        flat = gathered(spec, locals_, f"gather of unit {unit}")
        if saved is not None:
            saved.watch(flat, [local for local, start in zip(locals_, spec.starts, strict=True) if start < 0])
        return parameters_in(flat, spec, locals_)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.saved is not None:
            ctx.saved.release()
        what = f"reduction of unit {ctx.unit}"
        if not torch.compiler.is_compiling():
            _refuse_graph_of_gradients(ctx.unit)
            return (None, None, None, *reduced(ctx.spec, grads, what))
        with annotate({"phase": "backward"}):  # where a graph has forward and backward, see mfsdp.backward
            return (None, None, None, *reduced(ctx.spec, grads, what))


def _refuse_graph_of_gradients(unit: str) -> None:
    """Raise where gradients are to be differentiated: those of a reduction would be those of a constant."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            f"unit {unit}: create_graph=True for gradients of its parameters. With style='graph' they are reduced by "
            "an operator that cannot be differentiated again. Gradients of activations can be: "
            "torch.autograd.grad(outputs, inputs, create_graph=True) with inputs that are no parameters."
        )
