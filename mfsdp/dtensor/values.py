"""Facts that only the owner knows, made known to every rank: Python values, and shapes that depend on values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.dtensor import transfer
from mfsdp.dtensor.metadata import OutputMeta, Outputs
from mfsdp.dtensor.schema import traits
from mfsdp.dtensor.specs import Owners, holds

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


def run_for_value(
    op: OpOverload, run: Callable[[], Any] | None, operand: Tensor, mesh: DeviceMesh, owners: Owners
) -> Any:
    """The Python value that ``op`` returns on the owner, on every rank, by one small collective.

    Args:
        run: calls the op, on the owner; None on other ranks.
        operand: the op's first tensor; ``item`` returns a value of its dtype.

    Raises:
        NotImplementedError: the op returns something else than one bool, int or float; on every rank.
        RuntimeError: the op raised on the owner; on every other rank (the owner raises what the op raised).
    """
    kind = str(op._schema.returns[0].type)
    if len(op._schema.returns) != 1 or kind not in _VALUE_DTYPES:
        raise NotImplementedError(
            f"{op} returns {kind}, which cannot be shared from an owner. Call it on full_tensor() instead."
        )
    dtype = _VALUE_DTYPES[kind] or operand.dtype
    size = torch.empty(1, dtype=dtype).element_size()

    def pack(value: Any) -> Tensor:
        return torch.tensor([value], dtype=dtype, device=operand.device).view(torch.uint8)

    _, packed = _run_and_share(op, run, pack, size, operand.device, mesh, owners)
    value = packed.view(dtype).item()
    return bool(value) if kind == "bool" else value


def run_for_metadata(
    op: OpOverload, run: Callable[[], Any] | None, device: torch.device, mesh: DeviceMesh, owners: Owners
) -> tuple[Any, Outputs]:
    """What ``op`` returns on the owner (None elsewhere) and its metadata on every rank, by one small collective.

    Raises:
        NotImplementedError: the op returns a list, whose length only the owner knows; on every rank.
        RuntimeError: the op raised on the owner; on every other rank (the owner raises what the op raised).
    """
    if traits(op).returns_list:
        raise NotImplementedError(f"{op}: a list of tensors whose shapes depend on values. Use full_tensor() instead.")
    count = len(op._schema.returns)

    def pack(result: Any) -> Tensor:
        items = result if isinstance(result, tuple) else (result,)
        return torch.tensor([number for item in items for number in _pack(item)], device=device).view(torch.uint8)

    result, packed = _run_and_share(op, run, pack, count * _RECORD * 8, device, mesh, owners)
    numbers = packed.view(torch.int64).tolist()
    metas = tuple(_unpack(numbers[i * _RECORD : (i + 1) * _RECORD], device) for i in range(count))
    return result, metas if count > 1 else metas[0]


def share_generator(generator: torch.Generator, mesh: DeviceMesh, owners: Owners) -> None:
    """Give every rank the state that ``generator`` has on the owner, for draws that depend on values."""
    state = generator.get_state()
    here = holds(mesh, owners)
    device = torch.device(mesh.device_type)
    moved = state.to(device)
    shared = share(moved if here else None, torch.empty_like(moved), mesh, owners)
    generator.set_state(shared.to(state.device))


_STATUS_BYTES = 8  # so that what follows stays aligned


def _run_and_share(
    op: OpOverload,
    run: Callable[[], Any] | None,
    pack: Callable[[Any], Tensor],
    size: int,
    device: torch.device,
    mesh: DeviceMesh,
    owners: Owners,
) -> tuple[Any, Tensor]:
    """The result on the owner, and ``size`` bytes made from it on every rank; or an error on every rank."""
    message = torch.zeros(_STATUS_BYTES + size, dtype=torch.uint8, device=device)
    result, failure = None, None
    if run is not None:
        try:
            result = run()
            message[_STATUS_BYTES:] = pack(result)
        except Exception as error:  # whatever it is: the others must not wait for a value that never comes
            failure = error
            message[0] = 1
    shared = share(message if run is not None else None, message, mesh, owners)
    if failure is not None:
        raise failure
    if shared[0]:
        places = [str(owner) for owner in owners if owner is not None]
        raise RuntimeError(f"{op} failed on the owner of its operands, {', '.join(places)}; that rank says why.")
    return result, shared[_STATUS_BYTES:].clone()


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
