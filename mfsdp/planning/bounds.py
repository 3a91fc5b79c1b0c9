"""How even an assignment can possibly be."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

__all__ = ["LowerBound", "lower_bound"]


@dataclass(frozen=True, slots=True)
class LowerBound:
    """What the largest load cannot be below, for three reasons.

    Args:
        mean: all loads are equal at best.
        largest: the largest item lies on some rank, beside what every rank has.
        crowded: of the ``k W + 1`` largest items on ``W`` ranks, ``k + 1`` lie on one rank; the largest such
            sum of the smallest of them, over all ``k``, beside what every rank has.
        together: the ``k + 1`` of that.
    """

    mean: float
    largest: int
    crowded: int
    together: int

    @property
    def simple(self) -> float:
        """``max(mean, largest)``, the bound that plans are judged by."""
        return max(self.mean, self.largest)

    @property
    def value(self) -> float:
        """The strongest of the three."""
        return max(self.mean, self.largest, self.crowded)


def lower_bound(items: Sequence[int], base: Sequence[int]) -> LowerBound:
    """The bound for placing ``items`` on ranks that have ``base`` already, one entry per rank."""
    ranks, least = len(base), min(base)
    ordered = sorted(items, reverse=True)
    crowded, together = least, 0
    sums = list(accumulate(ordered, initial=0))
    for index in range(ranks, len(ordered), ranks):
        number = index // ranks + 1
        total = least + sums[index + 1] - sums[index + 1 - number]
        if total > crowded:
            crowded, together = total, number
    return LowerBound(
        mean=(sum(ordered) + sum(base)) / ranks,
        largest=least + (ordered[0] if ordered else 0),
        crowded=crowded,
        together=together,
    )
