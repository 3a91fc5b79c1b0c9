"""Local shapes and offsets under owner placements, for torch's code that asks for them."""

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _utils
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.specs import empty_shape
from mfsdp.placements import is_owner, owner_dims

torch_local_shape = _utils._compute_local_shape_and_global_offset
_torch_global_info = _utils.compute_global_tensor_info


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int],
    mesh_shape: Sequence[int],
    my_coordinate: Sequence[int] | Callable[[int], int] | None,
    placements: Sequence[Placement],
    skip_offset: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """torch's function of the same purpose; ranks that own nothing have an empty shape at the end of dimension 0."""
    look_up = my_coordinate if callable(my_coordinate) else (my_coordinate or ()).__getitem__
    for mesh_dim in owner_dims(placements):
        placement = placements[mesh_dim]
        assert is_owner(placement)
        if look_up(mesh_dim) != placement.owner:
            shape = empty_shape(global_shape)
            offset = (*global_shape[:1], *(0 for _ in global_shape[1:]))
            return shape, () if skip_offset else offset
    # torch ignores a placement that it does not know, which is right on the owner's coordinate
    return torch_local_shape(global_shape, mesh_shape, my_coordinate, placements, skip_offset)  # type: ignore[arg-type]


def compute_global_tensor_info(
    tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """torch's function of this name: global shape and strides from a local tensor.

    Raises:
        ValueError: a placement is owned; only the owner could know, so the caller must say.
    """
    if owner_dims(placements):
        raise ValueError(
            f"DTensor.from_local with placements {list(placements)}: ranks that own nothing cannot tell the global "
            f"shape from an empty local tensor. Pass shape= and stride= of the global tensor on every rank."
        )
    return _torch_global_info(tensor, mesh, placements)
