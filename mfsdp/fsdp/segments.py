"""The layout of a unit: which parameter lies where, owner by owner.

A unit is what one ``fully_shard`` call manages. Its owned parameters are laid out so that what a rank owns
is one contiguous piece, its *segment*: first its matrices, then its tails, packed one after the other with
nothing in between. A unit of two matrices and three tails on four ranks, of which rank 1 owns nothing::

            segment of rank 0          segment of rank 2      segment of rank 3
          +------------------+------+------------------------+------+------+
    unit  |   attn.weight    | bias |       mlp.weight       | bias | norm |
          +------------------+------+------------------------+------+------+
            MATRIX             TAIL   MATRIX                   TAIL   TAIL

    resident on rank 0:  [ attn.weight | bias ]        sharded parameters are views of it
    resident on rank 1:  [ ]
    full on every rank:  the whole row; full parameters are views of it

What travels in a gather or a reduction is therefore whole segments: no copies into or out of a message, no
padding, no message for a rank that owns nothing. All parameters of a layout have one dtype; offsets and
sizes count elements.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["Segment", "Slot", "UnitLayout"]


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in its segment.

    Args:
        index: which parameter of the unit, counted in the unit's own order.
        shape: its global shape.
        offset: where it starts in the segment, in elements.
    """

    index: int
    shape: torch.Size
    offset: int

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """The parameter as a view of ``flat``, the 1-D tensor that holds its segment."""
        return flat.narrow(0, self.offset, self.numel).view(self.shape)


@dataclass(frozen=True)
class Segment:
    """What one rank owns of a unit.

    Args:
        owner: coordinate of that rank on the shard dimension of the mesh.
        slots: the parameters in it, in the order in which they lie.

    Raises:
        ValueError: the slots are not packed.
    """

    owner: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        end = 0
        for slot in self.slots:
            if slot.offset != end:
                raise ValueError(f"segment of rank {self.owner}: slot at {slot.offset}, expected at {end}.")
            end += slot.numel

    @property
    def numel(self) -> int:
        """Its number of elements; 0 if all its parameters are empty."""
        return self.slots[-1].offset + self.slots[-1].numel if self.slots else 0


@dataclass(frozen=True)
class UnitLayout:
    """The segments of a unit, by ascending owner; ranks that own nothing have none."""

    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, shapes: Sequence[torch.Size], owners: Sequence[int]) -> "UnitLayout":
        """Lay parameters out in their given order, each in the segment of its owner.

        Args:
            shapes: global shape of each parameter of the unit; matrices come before tails.
            owners: for each, the coordinate of its owner on the shard dimension.
        """
        return cls._packed(zip(owners, range(len(shapes)), shapes, strict=True))

    @classmethod
    def _packed(cls, parameters: Iterable[tuple[int, int, torch.Size]]) -> "UnitLayout":
        """From (owner, index, shape) of each parameter."""
        slots: dict[int, list[Slot]] = {}
        for owner, index, shape in parameters:
            before = slots.setdefault(owner, [])
            offset = before[-1].offset + before[-1].numel if before else 0
            before.append(Slot(index, shape, offset))
        return cls(tuple(Segment(owner, tuple(slots[owner])) for owner in sorted(slots)))

    def only(self, indices: Collection[int]) -> "UnitLayout":
        """The layout of some of the unit's parameters alone, those that train for instance."""
        return self._packed(
            (segment.owner, slot.index, slot.shape)
            for segment in self.segments
            for slot in segment.slots
            if slot.index in indices
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment starts, if they lie one after the other."""
        return tuple(accumulate((segment.numel for segment in self.segments[:-1]), initial=0))

    @property
    def numel(self) -> int:
        """Elements of all segments together: what a gather moves to a rank that owns nothing."""
        return sum(segment.numel for segment in self.segments)

    def owned_by(self, coordinate: int) -> Segment:
        """The segment of the rank at ``coordinate``; one without slots if it owns nothing."""
        for segment in self.segments:
            if segment.owner == coordinate:
                return segment
        return Segment(coordinate, ())
