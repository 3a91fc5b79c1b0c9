"""The best assignment of a few items, by going through all that can be better than a known one."""

from collections import Counter
from collections.abc import Sequence

from mfsdp.planning.improve import Content

__all__ = ["Enumeration"]


class Enumeration:
    """Depth-first search over owners, item by item, cutting off what is no better than the best so far.

    Args:
        known: an assignment to beat.
        flops: operations that each rank has before any item is placed.
        nbytes: bytes likewise.
        cap: bytes that a rank should have at most.
    """

    def __init__(self, known: Content, flops: Sequence[int], nbytes: Sequence[int], cap: int) -> None:
        items: Counter[int] = sum(known.counts, Counter())
        self._items = sorted(items.elements(), key=lambda size: known.sizes[size], reverse=True)
        self._best, self._cap = known, cap
        self._score = known.score(cap)
        self._start = list(flops), list(nbytes)

    def best(self) -> Content:
        """The best assignment; ``known`` itself if none is better."""
        flops, nbytes = self._start
        counts: list[Counter[int]] = [Counter() for _ in flops]
        self._place(0, Content(self._best.sizes, counts, flops, nbytes))
        return self._best

    def _place(self, depth: int, content: Content) -> None:
        score = content.score(self._cap)  # no later item makes it smaller
        if score >= self._score:
            return
        if depth == len(self._items):
            counts = [Counter({size: count for size, count in each.items() if count}) for each in content.counts]
            self._best = Content(content.sizes, counts, list(content.flops), list(content.nbytes))
            self._score = score
            return
        size = self._items[depth]
        flops, nbytes = content.sizes[size]
        tried = set()
        for rank in range(len(content.flops)):
            load = content.flops[rank], content.nbytes[rank]
            if load in tried:
                continue  # ranks with equal loads are interchangeable
            tried.add(load)
            content.flops[rank] += flops
            content.nbytes[rank] += nbytes
            content.counts[rank][size] += 1
            self._place(depth + 1, content)
            content.flops[rank] -= flops
            content.nbytes[rank] -= nbytes
            content.counts[rank][size] -= 1
