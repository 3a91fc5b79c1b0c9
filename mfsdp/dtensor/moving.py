"""Redistribution below autograd, for operands that an op needs elsewhere."""

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.dtensor.specs import has_owner, holds, owners_of, replace_placements
from mfsdp.placements import is_owner


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` at other placements; itself if it is there already."""
    if tensor.placements == tuple(placements):
        return tensor
    target = replace_placements(tensor._spec, placements)
    local = redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)
    return DTensor(local, target, requires_grad=False)


def replicated_together(tensors: Sequence[DTensor]) -> list[DTensor]:
    """The tensors with every owner replaced by ``Replicate``, by one collective per mesh dimension for each combination
    of dtype and other placements, however many tensors there are.

    Tensors that another mesh dimension shards, and tensors without an owner, are returned as they are.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, tensor in enumerate(tensors):
        if has_owner(tensor._spec) and not any(p.is_shard() for p in tensor.placements):
            others = tuple(None if is_owner(placement) else placement for placement in tensor.placements)
            groups.setdefault((tensor.dtype, others), []).append(i)
    results = list(tensors)
    for indices in groups.values():
        for i, tensor in zip(indices, _replicate_flat([tensors[i] for i in indices]), strict=True):
            results[i] = tensor
    return results


def _replicate_flat(tensors: Sequence[DTensor]) -> list[DTensor]:
    """The same, of tensors that differ in their owners only: owners hold their values, the others zeros, and a sum
    over the owner dimensions brings them together. What another dimension holds (a partial maximum, say) it keeps."""
    mesh = tensors[0].device_mesh
    owner_dims = [dim for dim, placement in enumerate(tensors[0].placements) if is_owner(placement)]
    flat = torch.cat([_own_or_zeros(tensor) for tensor in tensors])
    for mesh_dim in owner_dims:
        flat = funcol.all_reduce(flat, "sum", (mesh, mesh_dim))
    placements = [Replicate() if is_owner(placement) else placement for placement in tensors[0].placements]
    results = []
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        meta = TensorMeta(tensor.shape, _contiguous(tensor), tensor.dtype)
        spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
        results.append(DTensor(values.view(tensor.shape), spec, requires_grad=False))
    return results


def _own_or_zeros(tensor: DTensor) -> Tensor:
    if holds(tensor.device_mesh, owners_of(tensor.placements)):
        return tensor._local_tensor.reshape(-1)
    return tensor._local_tensor.new_zeros(tensor.numel())


def _contiguous(tensor: DTensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()
