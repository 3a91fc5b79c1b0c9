"""How Inductor generates code for the operators of graph style: as it does for torch's own collectives.

As collectives they keep their order, which must be the same on all ranks, and their buffers are not used for anything
else until they are waited for. Of what is sent Inductor protects the first tensor alone, as torch's collectives have
one; a gather has many. A reduction's buffer is one of the graph's, so that Inductor knows what it takes.

When they are called the passes over the graph have been run: it is here that one notices if ours was not among them.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._inductor.ir import FallbackKernel, IRNode, TensorBox, _CollectiveKernel, _WaitKernel
from torch._inductor.lowering import (
    add_layout_constraint,
    constrain_to_fx_strides,
    lowerings,
    register_lowering,
    user_lowerings,
)
from torch._inductor.virtualized import V

from mfsdp.fsdp.graph import ops, overlap

__all__ = ["register_lowerings"]

mfsdp = torch.ops.mfsdp
_WAIT = torch.ops._c10d_functional.wait_tensor.default


def register_lowerings() -> None:
    """Tell Inductor, once."""
    if mfsdp.gather_unit.default in lowerings:
        return
    for op, lower in ((mfsdp.gather_unit.default, _gather), (mfsdp.reduce_unit.default, _reduce)):
        add_layout_constraint(op, constrain_to_fx_strides)
        register_lowering(op, type_promotion_kind=None)(lower)
    user_lowerings[_WAIT] = _wait


@cache
def _warn_of_no_overlap() -> None:
    warnings.warn(
        "style='graph': torch._inductor.config.post_grad_custom_post_pass lacks mfsdp's pass, which fully_shard put "
        "there: it was replaced, for good or for this compilation. Results are the same, but gathers and "
        "reductions do not run beside computation, and owners copy their parameters. Set it to "
        "[mfsdp.fsdp.graph.overlap.Overlap(), *your passes].",
        stacklevel=2,
    )


def _gather(locals_: list[Any], *numbers: Any) -> Any:
    if not overlap.is_installed():
        _warn_of_no_overlap()
    return _out_of_place(mfsdp.gather_unit.default, locals_, *numbers)


def _wait(tensor: TensorBox) -> Any:
    """torch's own, but nothing that a gather sends is freed or written to before the gather is complete."""
    before = len(V.graph.operations)
    result = lowerings[_WAIT](tensor)
    for wait in V.graph.operations[before:]:
        source = wait.inputs[0] if isinstance(wait, _WaitKernel) else None
        if isinstance(source, _CollectiveKernel) and source.op_overload is mfsdp.gather_unit.default:
            sent = [each.get_name() for each in source.inputs if isinstance(each, IRNode)]
            V.graph.additional_star_deps[wait.get_operation_name()].update(sent)
    return result


def _out_of_place(op: torch._ops.OpOverload, tensors: list[Any], *numbers: Any) -> Any:
    result = _CollectiveKernel.create_out_of_place(op, tensors, *numbers)
    assert isinstance(result, _CollectiveKernel)  # one output
    return TensorBox.create(result)


def _reduce(
    grads: list[Any],
    grad_sizes: Sequence[int],
    roots: Sequence[int],
    sizes: Sequence[int],
    here: int,
    world_size: int,
    dtype: torch.dtype,
    divide_by: float,
    group_name: str,
) -> Any:
    mine = ops.own_ranges(roots, sizes, here)
    if len(mine) > 1 or ops.ALL_RANKS in roots:
        numbers = (grad_sizes, roots, sizes, here, world_size, dtype, divide_by, group_name)
        return _out_of_place(mfsdp.reduce_unit.default, grads, *numbers)
    packed = FallbackKernel.create(mfsdp.pack.default, grads, grad_sizes, dtype, divide_by)
    flat = TensorBox.create(packed)
    _CollectiveKernel.create_inplace(mfsdp.reduce_packed_.default, flat, roots, sizes, group_name)
    start, end = mine[0] if mine else (0, 0)
    return lowerings[torch.ops.aten.slice.Tensor](flat, 0, start, end)
