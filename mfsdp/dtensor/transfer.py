"""Rooted movement of plain tensors along one mesh dimension, addressed by mesh coordinate.

Three primitives carry every transition of the owner placements: :func:`broadcast` (one to all),
:func:`exchange` (any unequal pieces between any two ranks, for scatter, gather and send) and
:func:`reduce` (all to one). Each moves the bytes of the tensor and no more, works on gloo and NCCL, and can be
traced by ``torch.compile(fullgraph=True)``.

Coordinates are not group ranks: a process group sorts its ranks, a mesh need not. Every function here takes
coordinates and translates.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,  # gloo has no AVG; the root divides
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}

# What every backend moves as it is. Anything else travels as bytes, which is the same traffic.
_NATIVE = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
# Reductions cannot travel as bytes: gloo has no kernels for these.
_WIDENED = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}


@lru_cache(maxsize=4096)
def group_ranks(mesh: DeviceMesh, mesh_dim: int) -> tuple[int, ...]:
    """Group rank, in this rank's group along ``mesh_dim``, of every coordinate of that dimension."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise RuntimeError(f"rank {dist.get_rank()} is not part of {mesh}, so it has no group along its dimensions.")
    index: list[int | slice] = [*coordinate]
    index[mesh_dim] = slice(None)
    group = mesh.get_group(mesh_dim)
    # torch.compile traces through here under fake mode; the ranks are data of the mesh, not of the graph
    with torch.utils._python_dispatch._disable_current_modes():
        along = mesh.mesh[tuple(index)].tolist()
    return tuple(dist.get_group_rank(group, rank) for rank in along)


def broadcast(source: Tensor | None, into: Tensor | None, mesh: DeviceMesh, mesh_dim: int, owner: int) -> Tensor:
    """A new contiguous 1-D tensor with the owner's values on every rank of the mesh dimension.

    Args:
        source: on the owner, the contiguous 1-D values; ``None`` elsewhere.
        into: elsewhere, a 1-D tensor of the same length and dtype that may be overwritten; ``None`` on the owner.
        owner: coordinate of the root on ``mesh_dim``.
    """
    tensor = into if source is None else source
    assert tensor is not None
    root = group_ranks(mesh, mesh_dim)[owner]
    if source is None and not funcol._are_we_tracing():
        # receivers need no copy of what they are about to overwrite
        name = mesh.get_group(mesh_dim).group_name
        received = funcol._maybe_wrap_tensor(torch.ops._c10d_functional.broadcast_(_to_wire(tensor), root, name))
    else:
        received = funcol.broadcast(_to_wire(tensor), root, (mesh, mesh_dim))
    return _from_wire(received, tensor.dtype)


def exchange(
    send: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], mesh: DeviceMesh, mesh_dim: int
) -> Tensor:
    """Send consecutive pieces of a contiguous 1-D tensor to the ranks of a mesh dimension's group.

    By group rank and not by coordinate, because that is how torch orders the shards of a mesh whose ranks are not
    sorted. :func:`group_ranks` translates.

    Args:
        send: the pieces for group rank 0, 1, ... one after the other.
        send_sizes: elements that go to each rank; the sum is ``send.numel()``.
        receive_sizes: elements that come from each rank.

    Returns:
        A new 1-D tensor of what was received, in the order of group ranks.
    """
    wire = _to_wire(send)
    scale = send.element_size() // wire.element_size()
    received = funcol.all_to_all_single(
        wire, [size * scale for size in receive_sizes], [size * scale for size in send_sizes], (mesh, mesh_dim)
    )
    if sum(receive_sizes) == 0 and isinstance(received, funcol.AsyncCollectiveTensor):
        received = received.wait()  # nobody will use it, but what was sent must have left
    return _from_wire(received, send.dtype)


def reduce(value: Tensor, op: str, mesh: DeviceMesh, mesh_dim: int, owner: int) -> Tensor:
    """Reduce a contiguous 1-D tensor to the coordinate ``owner``; what others get back has no meaning.

    Args:
        op: a key of :data:`REDUCE_OPS`; ``"avg"`` divides by the size of the mesh dimension.
    """
    root = group_ranks(mesh, mesh_dim)[owner]
    group = mesh.get_group(mesh_dim)
    wide = value.to(_WIDENED[value.dtype]) if value.dtype in _WIDENED else value
    if funcol._are_we_tracing():
        reduced = torch.ops.mfsdp.reduce(wide, op, root, group.group_name)
    else:
        reduced = wide.clone() if wide is value else wide
        dist.reduce(reduced, op=REDUCE_OPS[op], group=group, group_dst=root)
    if op == "avg":
        reduced = reduced / mesh.size(mesh_dim)
    return reduced.to(value.dtype)


@torch.library.custom_op("mfsdp::reduce", mutates_args=())
def _reduce(value: Tensor, op: str, root: int, group_name: str) -> Tensor:
    """c10d's rooted reduce as a functional op: torch has no functional collective for it."""
    reduced = value.clone()
    dist.reduce(reduced, op=REDUCE_OPS[op], group=_resolve_process_group(GroupName(group_name)), group_dst=root)
    return reduced


@_reduce.register_fake
def _(value: Tensor, op: str, root: int, group_name: str) -> Tensor:
    return torch.empty_like(value)


def _to_wire(flat: Tensor) -> Tensor:
    return flat if flat.dtype in _NATIVE else flat.view(torch.uint8)


def _from_wire(flat: Tensor, dtype: torch.dtype) -> Tensor:
    return flat if flat.dtype == dtype else flat.view(dtype)
