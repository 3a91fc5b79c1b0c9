"""How even an assignment can possibly be."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from mfsdp.planning.packing import packing_bound

__all__ = ["LowerBound", "lower_bound", "tight_lower_bound"]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What the largest load cannot be below, for three reasons.

    Args:
        mean: all loads are equal at best.
        largest: the largest item lies on some rank, beside what every rank has.
        crowded: the largest items are in each other's way: of the ``k W + 1`` largest on ``W`` ranks,
            ``k + 1`` lie on one rank; and of the ``j`` largest, either one lies on a rank that has as much
            beforehand as the one with the ``j``-th least, or two lie on one rank.
    """

    mean: float
    largest: int
    crowded: int

    @property
    def simple(self) -> float:
        """``max(mean, largest)``, the bound that plans are judged by."""
        return max(self.mean, self.largest)

    @property
    def value(self) -> float:
        """The strongest of the three."""
        return max(self.mean, self.largest, self.crowded)

    @property
    def reason(self) -> str:
        """Which of the three it is, in words."""
        if self.crowded > self.simple:
            return "large items in each other's way"
        return "the largest item" if self.largest >= self.mean else "the mean"


def lower_bound(items: Sequence[int], base: Sequence[int]) -> LowerBound:
    """The bound for placing ``items`` on ranks that have ``base`` already, one entry per rank."""
    ranks, least = len(base), min(base)
    ordered = sorted(items, reverse=True)
    sums = list(accumulate(ordered, initial=0))
    crowded = least
    for index in range(ranks, len(ordered), ranks):
        number = index // ranks + 1
        crowded = max(crowded, least + sums[index + 1] - sums[index + 1 - number])
    for item, before in zip(ordered, sorted(base), strict=False):
        crowded = max(crowded, min(before + item, least + 2 * item))
    return LowerBound(
        mean=(sums[-1] + sum(base)) / ranks,
        largest=least + (ordered[0] if ordered else 0),
        crowded=crowded,
    )


def tight_lower_bound(items: Sequence[int], base: Sequence[int], reached: int) -> LowerBound:
    """As :func:`lower_bound`, with more work for ``crowded``: see :mod:`mfsdp.planning.packing`.

    Args:
        items: what is placed.
        base: what ranks have already.
        reached: the largest load of some assignment.
    """
    bound = lower_bound(items, base)
    least = min(base)
    packed = least + packing_bound(items, len(base), reached - least)
    return LowerBound(bound.mean, bound.largest, max(bound.crowded, packed))
