"""Reading and rewriting the specs of owned DTensors: geometry, participation, and what torch can understand.

torch's own code ignores a placement that it does not know, which for *shapes* is right: on the owner's
coordinate an owner dimension looks replicated. So wherever torch must compute something for the ranks that hold
data, the owner dimensions are shown to it as ``Replicate()`` (:func:`without_owners`).
"""

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from mfsdp.placements import is_owner

Owners = tuple[Placement | None, ...]
"""Per mesh dimension, the owner placement that it carries, or None."""


def has_owner(spec: DTensorSpec) -> bool:
    """Whether some mesh dimension of the spec is owner-placed."""
    return any(is_owner(placement) for placement in spec.placements)


def owners_of(placements: Sequence[Placement]) -> Owners:
    return tuple(placement if is_owner(placement) else None for placement in placements)


def holds(mesh: DeviceMesh, owners: Owners) -> bool:
    """Whether this rank has the owner's coordinate on every owner dimension."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(owner is None or owner.owner == here for owner, here in zip(owners, coordinate, strict=True))  # type: ignore[attr-defined]


def is_whole(spec: DTensorSpec, owners: Owners) -> bool:
    """Whether the local tensor at the owners' coordinate is the whole tensor."""
    return all(
        owner is not None or isinstance(placement, Replicate)
        for placement, owner in zip(spec.placements, owners, strict=True)
    )


def replace_placements(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec with other placements; its tensor metadata stays."""
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta)


def without_owners(spec: DTensorSpec) -> DTensorSpec:
    """The spec as the owner's coordinate sees it: ``Replicate()`` on every owner dimension."""
    return replace_placements(spec, [Replicate() if is_owner(p) else p for p in spec.placements])


def with_owners(spec: DTensorSpec, owners: Owners) -> DTensorSpec:
    """The inverse of :func:`without_owners` on the given mesh dimensions."""
    return replace_placements(
        spec, [p if owner is None else owner for p, owner in zip(spec.placements, owners, strict=True)]
    )


def output_spec(meta: TensorMeta, mesh: DeviceMesh, owners: Owners) -> DTensorSpec:
    """Spec of a tensor that is owner-placed on the given dimensions and replicated on the others."""
    return DTensorSpec(mesh, tuple(owner or Replicate() for owner in owners), tensor_meta=meta)


def empty_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the local tensor on a rank that owns nothing: ``(0, *shape[1:])``, ``(0,)`` for 0-d."""
    return (0, *shape[1:])


def dim_name(mesh: DeviceMesh, mesh_dim: int) -> str:
    """How messages name a mesh dimension: its index, its name if it has one, its size."""
    names = mesh.mesh_dim_names
    label = f" ({names[mesh_dim]!r})" if names else ""
    return f"mesh dimension {mesh_dim}{label} of size {mesh.size(mesh_dim)}"


def check_owners(placements: Sequence[Placement], mesh: DeviceMesh, what: str) -> None:
    """Raise ValueError if an owner lies outside the mesh.

    Args:
        what: the subject of the message, such as ``"distribute_tensor"`` or a parameter's name.
    """
    for mesh_dim, placement in enumerate(placements):
        if is_owner(placement) and placement.owner >= mesh.size(mesh_dim):
            size = mesh.size(mesh_dim)
            raise ValueError(
                f"{what}: {placement!r} lies outside {dim_name(mesh, mesh_dim)}. Owners are coordinates on that "
                f"dimension: choose one from 0 to {size - 1}."
            )
