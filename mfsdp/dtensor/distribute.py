"""``distribute_tensor`` for owner placements, alone or beside torch's own on other mesh dimensions."""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.dtensor.specs import check_owners, empty_shape, replace_placements
from mfsdp.placements import OwnerShard, owner_dims


def _copy_of(function: Any) -> FunctionType:
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_torch_distribute = _copy_of(_api.distribute_tensor)


def redirect_torch() -> None:
    """Make torch's ``distribute_tensor`` be the one below.

    The function object itself is redirected: people import it by name, and before mfsdp as often as after.
    """

    def distribute_tensor(tensor, device_mesh=None, placements=None, *, src_data_rank=0):  # type: ignore[no-untyped-def]
        from mfsdp.dtensor import distribute

        return distribute.distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)

    _api.distribute_tensor.__code__ = distribute_tensor.__code__


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a leaf tensor, as :func:`torch.distributed.tensor.distribute_tensor` does, to any placements.

    With an owner placement, the values travel once, from ``src_data_rank`` to the owner, and every other rank keeps
    an empty local tensor. The result never shares memory with ``tensor``.

    Args:
        tensor: the whole tensor, of the same shape on every rank.
        device_mesh: the mesh; the current one if None.
        placements: one per mesh dimension; replicated if None.
        src_data_rank: coordinate, along each mesh dimension, of the rank whose values count. None: every rank uses
            its own values, and nothing is communicated (the ranks are trusted to agree).

    Raises:
        ValueError: an owner outside the mesh, a wrong number of placements, or ``tensor`` is a DTensor that is
            placed differently.
        RuntimeError: ``tensor`` is not a leaf.
    """
    mesh_dims = owner_dims(placements or ())
    if not mesh_dims:
        return _torch_distribute(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    assert placements is not None
    mesh = device_mesh if device_mesh is not None else _api._mesh_resources.get_current_mesh()
    if len(placements) != mesh.ndim:
        raise ValueError(f"distribute_tensor: {len(placements)} placements for a mesh of {mesh.ndim} dimensions.")
    check_owners(placements, mesh, "distribute_tensor")
    if isinstance(tensor, DTensor):
        return _already_distributed(tensor, mesh, placements)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor takes leaf tensors; inside autograd use DTensor.from_local(...).redistribute(...)."
        )
    source = tensor.detach()
    if mesh.device_type != tensor.device.type and not tensor.is_meta:
        source = source.to(mesh.device_type)
    placements = [Shard(p.dim + tensor.ndim) if isinstance(p, Shard) and p.dim < 0 else p for p in placements]
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    target = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    local = _place(source, target, src_data_rank)
    return DTensor(local.detach(), target, requires_grad=tensor.requires_grad)


def _place(source: Tensor, target: DTensorSpec, src_data_rank: int | None) -> Tensor:
    """This rank's local tensor, never an alias of ``source``."""
    mesh = target.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return source.new_empty(0)
    if source.is_meta:
        shape, _ = compute_local_shape_and_global_offset(source.shape, mesh, target.placements, skip_offset=True)
        return source.new_empty(shape)
    # "the values of rank r count" is an owner placement, so distributing is a redistribution
    start: Placement = Replicate() if src_data_rank is None else OwnerShard(src_data_rank)
    here = source
    if src_data_rank is not None and any(index != src_data_rank for index in coordinate):
        here = source.new_empty(empty_shape(source.shape))
    local = redistribute_local_tensor(here, replace_placements(target, [start] * mesh.ndim), target)
    shares_memory = local.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return local.clone() if shares_memory else local


def _already_distributed(tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    if tensor.device_mesh != mesh or tensor.placements != tuple(placements):
        raise ValueError(
            f"distribute_tensor: the tensor is distributed already, as {tensor.placements} on {tensor.device_mesh}. "
            f"Call its redistribute() to place it as {tuple(placements)}."
        )
    return tensor
