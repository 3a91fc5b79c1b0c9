"""Local search: move items between two ranks, swap them, or divide them anew, as long as that helps.

Items of equal cost are one *class*; a rank's content is how many it has of each class. Three objectives, in
this order: no rank above the cap on bytes; then the largest number of step operations as small as possible;
then the largest number of bytes, without giving up either.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import product
from math import prod

__all__ = ["Content", "Search"]

_CLOSE_FLOPS, _CLOSE_BYTES = 1.001, 1.01
"""A maximum this close to its lower bound is good enough; large models would be polished for ever."""

_DIVISIONS = 1024
"""Where two ranks' items can be divided in at most so many ways, all of them are compared."""

_BUDGET = 50_000
"""Changes that are tried at most, for models whose loads cannot be brought near the bound."""

_NEIGHBOURS = 4
"""How many classes are tried in return for an item, on either side of the one that fits best."""


class Goal(IntEnum):
    """What a step of the search is for; its value is how many parts of the objective must get better."""

    CAP = 1
    FLOPS = 2
    BYTES = 3


@dataclass(slots=True)
class Content:
    """What ranks hold of the items that are to be placed, and what they then have in all.

    Args:
        sizes: (flops, bytes) of each class.
        counts: for each rank, class -> number of items.
        flops: for each rank, everything it has to do.
        nbytes: for each rank, everything it has to keep.
    """

    sizes: Sequence[tuple[int, int]]
    counts: list[Counter[int]]
    flops: list[int]
    nbytes: list[int]

    def score(self, cap: int) -> tuple[int, int, int]:
        """(bytes above ``cap`` in all, most operations, most bytes): smaller is better."""
        over = sum(held - cap for held in self.nbytes if held > cap)
        return over, max(self.flops), max(self.nbytes)

    def move(self, size: int, source: int, target: int) -> None:
        """Move one item of class ``size``."""
        flops, nbytes = self.sizes[size]
        for rank, sign in ((source, -1), (target, 1)):
            self.flops[rank] += sign * flops
            self.nbytes[rank] += sign * nbytes
            self.counts[rank][size] += sign
        if not self.counts[source][size]:
            del self.counts[source][size]


@dataclass(slots=True)
class Search:
    """Improve ``content`` in place.

    Args:
        content: a first assignment.
        cap: bytes that a rank should have at most.
        floors: lower bounds of the largest operations and the largest bytes, where the search may stop.
    """

    content: Content
    cap: int
    floors: tuple[float, float]
    tried: int = field(default=0, init=False)

    def run(self) -> None:
        """Search until nothing helps any more, or the budget is used up."""
        score = self.content.score(self.cap)
        while True:
            for goal in Goal:
                while self.tried < _BUDGET and self._step(goal):
                    pass
            previous, score = score, self.content.score(self.cap)
            if score >= previous or self.tried >= _BUDGET:
                return

    def _critical(self, goal: Goal) -> int | None:
        """The rank that has to give something away for ``goal``, or None if the goal is reached."""
        values = self.content.flops if goal is Goal.FLOPS else self.content.nbytes
        enough = {
            Goal.CAP: self.cap,
            Goal.FLOPS: _CLOSE_FLOPS * self.floors[0],
            Goal.BYTES: _CLOSE_BYTES * self.floors[1],
        }
        floor = enough[goal]
        top = max(values)
        return values.index(top) if top > floor else None

    def _partners(self, critical: int, goal: Goal) -> Iterator[int]:
        """Other ranks, the one with most room first; of ranks with equal loads only one."""
        flops, nbytes = self.content.flops, self.content.nbytes
        first, second = (flops, nbytes) if goal is Goal.FLOPS else (nbytes, flops)
        order = sorted(range(len(flops)), key=lambda rank: (first[rank], second[rank], rank))
        last = None
        for rank in order:
            load = flops[rank], nbytes[rank]
            if first[rank] < first[critical] and load != last:
                yield rank
            last = load

    def _step(self, goal: Goal) -> bool:
        critical = self._critical(goal)
        if critical is None:
            return False
        for find in (self._best_exchange, self._best_division):
            for partner in self._partners(critical, goal):
                gives = find(critical, partner, goal)
                if gives is not None:
                    self._give(gives, critical, partner)
                    return True
                if self.tried >= _BUDGET:
                    return False
        return False

    def _give(self, gives: Counter[int], source: int, target: int) -> None:
        """Move ``gives[size]`` items of each class from ``source``, or to it where that is negative."""
        for size, count in gives.items():
            for _ in range(abs(count)):
                self.content.move(size, *((source, target) if count > 0 else (target, source)))

    def _best_exchange(self, critical: int, partner: int, goal: Goal) -> Counter[int] | None:
        """The move of one item, or swap of two, that helps most: class -> number to give. None if none helps.

        Of a partner with many classes, only those are tried whose swap would leave the two ranks most even.
        """
        content, sizes = self.content, self.content.sizes
        measure, loads = (0, content.flops) if goal is Goal.FLOPS else (1, content.nbytes)
        ordered = sorted(content.counts[partner], key=lambda size: sizes[size][measure])
        values = [sizes[size][measure] for size in ordered]
        wanted = (loads[critical] - loads[partner]) // 2
        choice = _Choice(self, critical, partner, goal)
        for given in content.counts[critical]:
            flops, nbytes = sizes[given]
            if choice.offer(flops, nbytes):
                found = Counter({given: 1})
            middle = bisect(values, sizes[given][measure] - wanted)
            for taken in ordered[max(0, middle - _NEIGHBOURS) : middle + _NEIGHBOURS]:
                back_flops, back_bytes = sizes[taken]
                if choice.offer(flops - back_flops, nbytes - back_bytes):
                    found = Counter({given: 1, taken: -1})
        self.tried += (1 + min(len(ordered), 2 * _NEIGHBOURS)) * len(content.counts[critical])
        return found if choice.helps else None

    def _best_division(self, critical: int, partner: int, goal: Goal) -> Counter[int] | None:
        """The best way of all to divide what the two ranks have, if there are few enough ways; as above."""
        content, sizes = self.content, self.content.sizes
        both = content.counts[critical] + content.counts[partner]
        if not both or prod(count + 1 for count in both.values()) > _DIVISIONS:
            return None
        here = content.counts[critical]
        ways = [
            [
                (count, count * sizes[size][0], count * sizes[size][1])
                for count in range(here[size] - all_, here[size] + 1)
            ]
            for size, all_ in both.items()
        ]
        choice = _Choice(self, critical, partner, goal)
        for way in product(*ways):
            _, flops, nbytes = map(sum, zip(*way, strict=True))
            if choice.offer(flops, nbytes):
                found = way
            self.tried += 1
        if not choice.helps:
            return None
        return Counter({size: count for size, (count, _, _) in zip(both, found, strict=True) if count})


class _Choice:
    """Keeps the best change between two ranks that has been offered."""

    def __init__(self, search: Search, critical: int, partner: int, goal: Goal) -> None:
        content = search.content
        self._cap = search.cap
        self._top = max(content.flops) if goal is Goal.BYTES else 0
        self._here = content.flops[critical], content.nbytes[critical]
        self._there = content.flops[partner], content.nbytes[partner]
        self._goal = int(goal)
        self.helps = False
        self._limit = self._best = self._value(0, 0)

    def offer(self, flops: int, nbytes: int) -> bool:
        """Whether giving so much is the best so far; it must make the objective better up to the goal."""
        value = self._value(flops, nbytes)
        if value >= self._best and (self.helps or self._goal == Goal.BYTES):
            return False  # the usual case, decided without making more tuples
        better = value[: self._goal] < self._limit[: self._goal] and (not self.helps or value < self._best)
        if better:
            self._best, self.helps = value, True
        return better

    def _value(self, flops: int, nbytes: int) -> tuple[int, int, int]:
        cap, top = self._cap, self._top
        here, there = self._here[1] - nbytes, self._there[1] + nbytes
        over = (here - cap if here > cap else 0) + (there - cap if there > cap else 0)
        less, more = self._here[0] - flops, self._there[0] + flops
        most = less if less > more else more
        return over, most if most > top else top, here if here > there else there
