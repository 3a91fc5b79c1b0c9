"""Facts that only the owner knows, made known to every rank: Python values, and shapes that depend on values."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.dtensor import transfer
from mfsdp.dtensor.metadata import OutputMeta, Outputs
from mfsdp.dtensor.schema import traits
from mfsdp.dtensor.specs import Owners

_MAX_DIMS = 25  # torch's own limit for TensorIterator
_RECORD = 2 + 2 * _MAX_DIMS  # dtype, number of dimensions, shape, strides
_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
# by the type in an op's schema; a number (`item`) has the dtype of the tensor it comes from
_VALUE_DTYPES = {
    "bool": torch.uint8,
    "int": torch.int64,
    "float": torch.float64,
    "number": None,
    "Scalar": None,
}


def share(value: Tensor | None, into: Tensor, mesh: DeviceMesh, owners: Owners) -> Tensor:
    """A small contiguous 1-D tensor of the owner, on every rank.

    Args:
        value: the tensor at the owner's coordinate, None elsewhere.
        into: a tensor of the same length and dtype that may be overwritten elsewhere.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    pending = {dim: owner.owner for dim, owner in enumerate(owners) if owner is not None}  # type: ignore[attr-defined]
    for mesh_dim, owner in list(pending.items()):
        del pending[mesh_dim]
        if any(coordinate[dim] != other for dim, other in pending.items()):
            continue  # this rank's turn comes with a later dimension
        is_root = coordinate[mesh_dim] == owner
        value = transfer.broadcast(value if is_root else None, None if is_root else into, mesh, mesh_dim, owner)
    assert value is not None
    return value


def share_value(op: OpOverload, value: Any, operand: Tensor, mesh: DeviceMesh, owners: Owners) -> Any:
    """The Python value that the owner's run of ``op`` returned, on every rank, by one small collective.

    Args:
        value: what the op returned; None on other ranks.
        operand: the op's first tensor; ``item`` returns a value of its dtype.

    Raises:
        NotImplementedError: the op returns something else than one bool, int or float; on every rank.
    """
    kind = str(op._schema.returns[0].type)
    if len(op._schema.returns) != 1 or kind not in _VALUE_DTYPES:
        raise NotImplementedError(
            f"{op} returns {kind}, which cannot be shared from an owner. Call it on full_tensor() instead."
        )
    dtype = _VALUE_DTYPES[kind] or operand.dtype
    packed = None if value is None else torch.tensor([value], dtype=dtype, device=operand.device)
    shared = share(packed, torch.empty(1, dtype=dtype, device=operand.device), mesh, owners).item()
    return bool(shared) if kind == "bool" else shared


def share_metadata(op: OpOverload, result: Any, device: torch.device, mesh: DeviceMesh, owners: Owners) -> Outputs:
    """Metadata of what the owner's run of ``op`` returned, on every rank, by one small collective.

    Raises:
        NotImplementedError: the op returns a list, whose length only the owner knows; on every rank.
    """
    if traits(op).returns_list:
        raise NotImplementedError(f"{op}: a list of tensors whose shapes depend on values. Use full_tensor() instead.")
    count = len(op._schema.returns)
    packed = None
    if result is not None:
        items = result if isinstance(result, tuple) else (result,)
        packed = torch.tensor([number for item in items for number in _pack(item)], device=device)
    into = torch.empty(count * _RECORD, dtype=torch.int64, device=device)
    numbers = share(packed, into, mesh, owners).tolist()
    metas = tuple(_unpack(numbers[i * _RECORD : (i + 1) * _RECORD], device) for i in range(count))
    return metas if count > 1 else metas[0]


def _pack(item: Tensor | None) -> list[int]:
    if item is None:
        return [-1] * _RECORD
    if item.ndim > _MAX_DIMS:
        raise NotImplementedError(f"a result with {item.ndim} dimensions, more than {_MAX_DIMS}.")
    padding = [0] * (_MAX_DIMS - item.ndim)
    return [_DTYPES.index(item.dtype), item.ndim, *item.shape, *padding, *item.stride(), *padding]


def _unpack(record: list[int], device: torch.device) -> OutputMeta | None:
    dtype, ndim = record[:2]
    if dtype < 0:
        return None
    shape, stride = record[2 : 2 + ndim], record[2 + _MAX_DIMS : 2 + _MAX_DIMS + ndim]
    return OutputMeta(tuple(shape), tuple(stride), _DTYPES[dtype], device)
