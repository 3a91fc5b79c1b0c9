"""A lower bound of the largest load, for items too large to be combined freely.

If the largest load were at most ``T``, items larger than ``T / 2`` would each need a rank of their own, and
items of a size of at least ``a`` would go next to them, or ``floor(T / a)`` to a rank of their own. Where that
takes more ranks than there are, for some ``a``, the largest load must be above ``T``. Source: Martello and
Toth, "Lower bounds and reduction procedures for the bin packing problem", 1990; Dell'Amico and Martello,
"Optimal scheduling of tasks on identical parallel processors", 1995.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

__all__ = ["packing_bound"]

_SIZES = 48
"""So many sizes ``a`` are tried at most; any choice of them gives a valid bound."""

_HALVINGS = 30


class _Packing:
    """Items sorted by size, ready to count the ranks that a load of ``T`` needs."""

    def __init__(self, items: Sequence[int]) -> None:
        self._items = sorted(item for item in items if item > 0)
        self._sums = list(accumulate(self._items, initial=0))
        sizes = sorted(set(self._items))
        self._sizes = sizes[:: -(-len(sizes) // _SIZES)] if sizes else []

    def ranks(self, load: int) -> int:
        """Ranks that are certainly needed, if none may have more than ``load``."""
        if self._items and self._items[-1] > load:
            return 1 << 62
        large = bisect_left(self._items, load // 2 + 1)
        most = -(-self._sums[-1] // load) if load else 0
        for size in self._sizes:
            if 2 * size > load:
                break
            most = max(most, self._with(size, load, large))
        return most

    def _with(self, size: int, load: int, large: int) -> int:
        small = bisect_left(self._items, size)
        alone = bisect_left(self._items, load - size + 1)  # nothing of ``size`` fits beside these
        beside = sum((load - item) // size for item in self._items[large:alone])
        left = large - small - beside
        room = (alone - large) * load - (self._sums[alone] - self._sums[large])
        volume = self._sums[large] - self._sums[small] - room
        more = max(0, -(-left // (load // size)), -(-volume // load))
        return len(self._items) - large + more


def packing_bound(items: Sequence[int], ranks: int, upper: int) -> int:
    """What the largest load on ``ranks`` cannot be below; at most ``upper``.

    Args:
        items: sizes.
        ranks: number of ranks.
        upper: a largest load that some assignment reaches.
    """
    packing = _Packing(items)
    low, high = 0, upper  # more than ``low`` is needed; ``high`` is not ruled out
    for _ in range(_HALVINGS):
        if low + 1 >= high:
            break
        middle = (low + high) // 2
        if packing.ranks(middle) > ranks:
            low = middle
        else:
            high = middle
    return low + 1 if low else 0
