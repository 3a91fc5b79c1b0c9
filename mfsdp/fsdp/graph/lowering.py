"""How Inductor generates code for the operators of graph style: as it does for torch's own collectives.

As collectives they keep their order, which must be the same on all ranks, and their buffers are not used for anything
else until they are waited for.
"""

from typing import Any

import torch
from torch._inductor.ir import TensorBox, _CollectiveKernel
from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings, register_lowering

__all__ = ["register_lowerings"]


def register_lowerings() -> None:
    """Tell Inductor, once."""
    for op in (torch.ops.mfsdp.gather_unit.default, torch.ops.mfsdp.reduce_unit.default):
        if op not in lowerings:
            _register(op)


def _register(op: torch._ops.OpOverload) -> None:
    add_layout_constraint(op, constrain_to_fx_strides)

    @register_lowering(op, type_promotion_kind=None)
    def lower(tensors: list[Any], *numbers: Any) -> Any:
        result = _CollectiveKernel.create_out_of_place(op, tensors, *numbers)
        assert isinstance(result, _CollectiveKernel)  # one output
        return TensorBox.create(result)
