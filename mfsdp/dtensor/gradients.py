"""The gradient of ``to_local()`` for owned DTensors."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from mfsdp.dtensor.layout import WireLayout
from mfsdp.dtensor.specs import has_owner, replace_placements

_torch_backward = _api._ToTorchTensor.backward


def to_local_backward(ctx: Any, grad_output: Tensor | None) -> Any:
    """torch's backward of ``to_local``; for owned tensors the gradient has shape and strides of the tensor.

    torch infers them from the local gradient, which on ranks that own nothing is empty.
    """
    spec: DTensorSpec = ctx.dtensor_spec
    if grad_output is None or not has_owner(spec):
        return _torch_backward(ctx, grad_output)
    placements = ctx.grad_placements or _api._normalize_placements_for_grad(spec.placements)
    target = replace_placements(spec, placements)
    meta = spec.tensor_meta
    assert meta is not None
    local = grad_output
    if local.shape == meta.shape and local.stride() != meta.stride:
        layout = WireLayout.of(local.shape, meta.shape, meta.stride)
        local = layout.empty(local).copy_(local)
    return DTensor(local, target, requires_grad=local.requires_grad), None
