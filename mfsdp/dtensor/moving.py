"""Redistribution below autograd, for operands that an op needs elsewhere."""

from collections.abc import Sequence

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.dtensor.specs import replace_placements


def moved(tensor: DTensor, placements: Sequence[Placement]) -> DTensor:
    """``tensor`` at other placements; itself if it is there already."""
    if tensor.placements == tuple(placements):
        return tensor
    target = replace_placements(tensor._spec, placements)
    local = redistribute_local_tensor(tensor._local_tensor, tensor._spec, target)
    return DTensor(local, target, requires_grad=False)
