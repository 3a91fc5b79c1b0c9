"""The placements of whole tensors on one rank: :class:`OwnerShard` and :class:`Tail`.

On the mesh dimension that carries it, an owner placement puts the whole (remaining) tensor on the rank
with coordinate ``owner`` and an empty local tensor on every other rank. A weight of shape ``(6, 4)`` on
four ranks::

    Shard(0)          rank 0: (2, 4)   rank 1: (2, 4)   rank 2: (2, 4)   rank 3: (0, 4)
    OwnerShard(2)     rank 0: (0, 4)   rank 1: (0, 4)   rank 2: (6, 4)   rank 3: (0, 4)
    Replicate()       rank 0: (6, 4)   rank 1: (6, 4)   rank 2: (6, 4)   rank 3: (6, 4)

The empty local tensor has the shape ``(0, *shape[1:])``; of a 0-d tensor it is ``(0,)``. An owner is a
*mesh coordinate*, not a global rank: on a mesh over the ranks ``[4, 6]``, ``OwnerShard(1)`` lives on
global rank 6. On a mesh of several dimensions the other dimensions shard or replicate what the owner
holds: ``(Replicate(), OwnerShard(1))`` is HSDP, ``(OwnerShard(1), Shard(0))`` is FSDP with TP inside.

``OwnerShard`` and ``Tail`` have the same geometry and differ in what they say to an optimizer. An
``OwnerShard`` parameter is a matrix, updated as one; a ``Tail`` parameter is not a matrix (a bias, a
norm), is packed with its neighbours into one flat segment, and is updated elementwise.

Transitions by ``DTensor.redistribute``, for one mesh dimension (O is either placement, i and j owners)::

    from \\ to      Replicate      Shard(d)          Partial("sum")      O(j)
    O(i)           broadcast      scatter, uneven   zeros elsewhere,    send i -> j; i == j: a
                   from i         sizes allowed     no communication    new label, nothing moves
    Replicate      -              -                 -                   owner keeps, others drop
    Shard(d)       -              -                 -                   gather to j, uneven allowed
    Partial(op)    -              -                 -                   reduce to j with op

``-`` is torch's own. Bytes on the wire are those of the tensor, never padded. A transition that is not
in the table (``O`` to ``Partial`` of another kind than ``"sum"``, for instance) raises
``NotImplementedError`` on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard, final

import torch
from torch.distributed.tensor.placement_types import Placement

__all__ = ["OwnerPlacement", "OwnerShard", "Tail", "is_owner", "owner_dims"]


@dataclass(frozen=True, repr=False)
class OwnerPlacement(Placement):
    """What :class:`OwnerShard` and :class:`Tail` share: one mesh coordinate holds everything.

    Args:
        owner: coordinate, on the mesh dimension that carries this placement, of the rank that holds the
            tensor. Whether it lies inside the mesh is checked where a mesh is known.

    Raises:
        TypeError: ``owner`` is not an ``int``.
        ValueError: ``owner`` is negative.
    """

    owner: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # the C++ half of a placement
        name = type(self).__name__
        if isinstance(self.owner, bool) or not isinstance(self.owner, int):
            raise TypeError(
                f"{name}(owner={self.owner!r}): owner must be an int, the coordinate of the owning rank on its "
                f"mesh dimension, not {type(self.owner).__name__}."
            )
        if self.owner < 0:
            raise ValueError(
                f"{name}(owner={self.owner}): owner must be 0 or more; it is a coordinate on a mesh dimension and "
                f"does not count from the end."
            )

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.owner))

    # Guards of torch.compile deep-copy specs, and a default reduce cannot rebuild the C++ half.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.owner,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(owner={self.owner})"

    def __fx_repr__(self) -> tuple[str, dict[str, Any]]:
        """An expression that FX-generated code evaluates to this placement, and the names it needs."""
        return repr(self), {type(self).__name__: type(self)}


@final
class OwnerShard(OwnerPlacement):
    """A matrix that lives whole on the rank with coordinate ``owner``; every other rank holds ``(0, ...)``.

    Args:
        owner: coordinate of the owning rank on the mesh dimension that carries the placement.
    """

    def __str__(self) -> str:
        return f"O({self.owner})"


@final
class Tail(OwnerPlacement):
    """Not a matrix: packed with its neighbours into a flat segment on ``owner``, stepped elementwise.

    Args:
        owner: coordinate of the owning rank on the mesh dimension that carries the placement.
    """

    def __str__(self) -> str:
        return f"T({self.owner})"


# what a checkpoint of owned tensors holds besides torch's own types, for torch.load's default weights_only=True
torch.serialization.add_safe_globals([OwnerShard, Tail])


def is_owner(placement: Placement) -> TypeGuard[OwnerPlacement]:
    """Whether ``placement`` is an :class:`OwnerShard` or a :class:`Tail`."""
    # by identity: isinstance of a placement runs Python code of torch's, and this is asked in every skipped op
    kind = type(placement)
    return kind is OwnerShard or kind is Tail


def owner_dims(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh dimensions on which ``placements`` has an owner."""
    return tuple(dim for dim, placement in enumerate(placements) if is_owner(placement))
