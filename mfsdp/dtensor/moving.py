"""Redistribution below autograd, for operands that an op needs elsewhere."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.dtensor.specs import has_owner, replace_placements
from mfsdp.placements import is_owner


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` at other placements; itself if it is there already."""
    if tensor.placements == tuple(placements):
        return tensor
    target = replace_placements(tensor._spec, placements)
    local = redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)
    return DTensor(local, target, requires_grad=False)


def replicated_together(tensors: Sequence[DTensor]) -> list[DTensor]:
    """The tensors with every owned one replicated, by one collective per mesh dimension however many there are.

    Owned tensors that another mesh dimension shards, and tensors without an owner, are returned as they are.
    """
    chosen = [i for i, tensor in enumerate(tensors) if _is_simply_owned(tensor)]
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in chosen:
        kind = (tensors[i].dtype, tuple(is_owner(placement) for placement in tensors[i].placements))
        groups.setdefault(kind, []).append(i)
    results = list(tensors)
    for indices in groups.values():
        for i, tensor in zip(indices, _replicate_flat([tensors[i] for i in indices]), strict=True):
            results[i] = tensor
    return results


def _is_simply_owned(tensor: DTensor) -> bool:
    simple = all(is_owner(placement) or isinstance(placement, Replicate) for placement in tensor.placements)
    return simple and has_owner(tensor._spec)


def _replicate_flat(tensors: Sequence[DTensor]) -> list[DTensor]:
    """The same, of tensors that share dtype and owner dimensions: owners hold their values, the others zeros."""
    mesh = tensors[0].device_mesh
    partial = [Partial("sum") if is_owner(p) else p for p in tensors[0].placements]
    flat = torch.cat([moved(tensor, partial)._local_tensor.reshape(-1) for tensor in tensors])
    meta = TensorMeta(flat.shape, flat.stride(), flat.dtype)
    source = DTensorSpec(mesh, tuple(partial), tensor_meta=meta)
    target = replace_placements(source, [Replicate()] * mesh.ndim)
    whole = redistribute_local_tensor(flat, source, target)
    results = []
    for tensor, values in zip(tensors, whole.split([tensor.numel() for tensor in tensors]), strict=True):
        spec = DTensorSpec(
            mesh, target.placements, tensor_meta=TensorMeta(tensor.shape, _contiguous(tensor), tensor.dtype)
        )
        results.append(DTensor(values.view(tensor.shape), spec, requires_grad=False))
    return results


def _contiguous(tensor: DTensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, device="meta").stride()
