"""What is kept between forward and backward where ``reshard_after_forward`` is an int.

The shard dimension is cut into groups of that many ranks. In each group every segment is kept by one rank, so
that backward gathers within the group only. Four ranks in groups of two; segments s0, s1, s3 of their owners::

              forward            between            backward
    rank 0    s0 s1 s3    ->     s0 .  s3    --+    s0 s1 s3
    rank 1    s0 s1 s3    ->     .  s1 .     --+    s0 s1 s3

    rank 2    s0 s1 s3    ->     s0 s1 .     --+    s0 s1 s3
    rank 3    s0 s1 s3    ->     .  .  s3    --+    s0 s1 s3

Its owner keeps a segment where it is in the group; that costs nothing if the owner's buffer is pinned. Of the
other segments, the largest first, each goes to the rank that keeps least so far.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_post_forward_mesh_info

from mfsdp.fsdp.collectives import ShardGroup
from mfsdp.fsdp.segments import UnitLayout

__all__ = ["PostForward", "post_forward_mesh_info"]

_made: WeakKeyDictionary[DeviceMesh, dict[int, FSDPMeshInfo]] = WeakKeyDictionary()


def post_forward_mesh_info(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """FSDP2's record of what is kept after forward; process groups for an int are made once for each mesh.

    Raises:
        ValueError: an int that does not divide the shard dimension.
    """
    if isinstance(reshard_after_forward, bool):
        return _get_post_forward_mesh_info(reshard_after_forward, mesh_info)
    made = _made.setdefault(mesh_info.mesh, {})
    if reshard_after_forward not in made:
        info = _get_post_forward_mesh_info(reshard_after_forward, mesh_info)
        if info is None or info is mesh_info:  # 1 and the whole dimension stand for False and True
            return info
        made[reshard_after_forward] = info
    return made[reshard_after_forward]


@dataclass(frozen=True)
class PostForward:
    """Who keeps which segments of a unit in this rank's group.

    Args:
        ranks: the group.
        keepers: for each segment of the unit, the coordinate in the group of the rank that keeps it.
    """

    ranks: ShardGroup
    keepers: tuple[int, ...]

    @classmethod
    def of(cls, layout: UnitLayout, unit_ranks: ShardGroup, mesh_info: FSDPMeshInfo) -> "PostForward":
        """For the unit of ``layout``, spread over ``unit_ranks``, in the groups of ``mesh_info``."""
        ranks = ShardGroup.of(mesh_info.mesh, mesh_info.shard_mesh_dim or 0)
        kept = [0] * ranks.size
        keepers: dict[int, int] = {}
        for position, segment in enumerate(layout.segments):
            owner = unit_ranks.ranks[segment.owner]
            if owner in ranks.ranks:
                keepers[position] = ranks.ranks.index(owner)
                kept[keepers[position]] += segment.numel
        others = [position for position in range(len(layout.segments)) if position not in keepers]
        for position in sorted(others, key=lambda position: -layout.segments[position].numel):
            keepers[position] = kept.index(min(kept))
            kept[keepers[position]] += layout.segments[position].numel
        return cls(ranks, tuple(keepers[position] for position in range(len(layout.segments))))

    @property
    def kept_here(self) -> frozenset[int]:
        """Positions of the segments that this rank keeps."""
        return frozenset(position for position, keeper in enumerate(self.keepers) if keeper == self.ranks.coordinate)
