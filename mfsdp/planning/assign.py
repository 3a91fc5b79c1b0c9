"""Who owns what: a deterministic assignment of matrices and tails to ranks.

Matrices first. They are placed one by one, the one with most operations first, on the rank with the least to
do (longest processing time, LPT); then a local search moves and swaps until nothing improves
(:mod:`mfsdp.planning.improve`). That decides how many matrices of each size a rank gets. Matrices of equal
cost are interchangeable, so which one goes where is then chosen so that the bytes of a unit lie with many
owners, because a unit whose owners are even is gathered fastest.

Tails follow, balancing bytes. The tails of a unit stay together on an owner that the unit has anyway, since
every further owner costs one more message in each gather, unless this would make the heaviest rank heavier.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mfsdp.planning.bounds import lower_bound
from mfsdp.planning.enumeration import Enumeration
from mfsdp.planning.improve import Content, Search

__all__ = ["Items", "Ranks", "assign"]

_LOOKAHEAD = 16
"""How many candidates are compared for a matrix when a unit is spread; bounds the work for large models."""

_TAIL_SHARE = 16
"""A unit's tails are split where they exceed 1/16 of a rank's mean bytes."""

_SLACK = 1.05
"""Without a cap of the user's, a rank may have 5% more bytes than the bound."""


_FEW_WAYS = 10_000
"""Up to so many assignments in all, the best of them is found by going through them."""


@dataclass(slots=True)
class Items:
    """What is to be placed, one entry of each list per item: with 100,000 of them, objects would cost too much.

    Args:
        flops: step operations.
        nbytes: resident bytes.
        units: the unit that each is gathered with.
        tails: whether it is a tail, and not a matrix.
    """

    flops: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    tails: list[bool] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.flops)

    def add(self, flops: int, nbytes: int, unit: str, tail: bool = False) -> None:
        """One more item."""
        self.flops.append(flops)
        self.nbytes.append(nbytes)
        self.units.append(unit)
        self.tails.append(tail)


@dataclass(slots=True)
class Ranks:
    """What every rank has so far, updated as items are placed.

    Args:
        flops: step operations, per rank.
        nbytes: resident bytes, per rank.
    """

    flops: list[int]
    nbytes: list[int]
    units: defaultdict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    """unit -> rank -> bytes of that unit on that rank"""

    def __len__(self) -> int:
        return len(self.flops)

    def join_unit(self, unit: str, nbytes: int, rank: int) -> None:
        """Note ``nbytes`` of ``unit`` on ``rank``."""
        held = self.units[unit]
        held[rank] = held.get(rank, 0) + nbytes


def assign(items: Items, ranks: Ranks, cap: int | None = None) -> list[int]:
    """The owner of each of ``items``; ``ranks`` is updated.

    Operations are balanced first, under the cap on bytes, and bytes second. Equal input gives equal output,
    on every machine.

    Args:
        items: what to place.
        ranks: what every rank has already.
        cap: bytes that a rank should have at most; by default 5% above the larger of the mean and the largest
            item. Where no assignment within the cap is found, the result exceeds it as little as was possible.
    """
    total = sum(ranks.nbytes) + sum(items.nbytes)
    if cap is None:
        largest = min(ranks.nbytes) + max(items.nbytes, default=0)
        cap = int(_SLACK * max(total / len(ranks), largest))
    owners = [0] * len(items)
    _assign_matrices(items, ranks, cap, owners)
    _assign_tails(items, ranks, total // (_TAIL_SHARE * len(ranks)), owners)
    return owners


def _longest_first(
    sizes: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    ranks: Ranks,
    key: Callable[[int, int], tuple[int, int]],
) -> Content:
    """LPT by ``key(flops, bytes)`` over ``numbers[i]`` items of cost ``sizes[i]``, the largest first."""
    heap = [
        (*key(flops, nbytes), rank) for rank, (flops, nbytes) in enumerate(zip(ranks.flops, ranks.nbytes, strict=True))
    ]
    heapq.heapify(heap)
    counts: list[Counter[int]] = [Counter() for _ in heap]
    order = sorted(range(len(sizes)), key=lambda size: key(*sizes[size]), reverse=True)
    for size in order:
        first, second = key(*sizes[size])
        for _ in range(numbers[size]):
            load, other, rank = heap[0]
            counts[rank][size] += 1
            heapq.heapreplace(heap, (load + first, other + second, rank))
    flops, nbytes = [0] * len(heap), [0] * len(heap)
    for load, other, rank in heap:
        flops[rank], nbytes[rank] = key(load, other)  # ``key`` swaps or does not, so it is its own inverse
    return Content(sizes, counts, flops, nbytes)


def _flops_first(flops: int, nbytes: int) -> tuple[int, int]:
    return flops, nbytes


def _bytes_first(flops: int, nbytes: int) -> tuple[int, int]:
    return nbytes, flops


def _assign_matrices(items: Items, ranks: Ranks, cap: int, owners: list[int]) -> None:
    """Fill in the owners of matrices; ``ranks`` is updated."""
    classes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (flops, nbytes, tail) in enumerate(zip(items.flops, items.nbytes, items.tails, strict=True)):
        if not tail:
            classes[flops, nbytes].append(number)
    sizes = sorted(classes, reverse=True)
    content = _best_content(sizes, [len(classes[size]) for size in sizes], ranks, cap)
    ranks.flops, ranks.nbytes = content.flops, content.nbytes
    wanted: defaultdict[int, dict[int, int]] = defaultdict(dict)
    by_size = [classes[size] for size in sizes]
    for rank, counter in enumerate(content.counts):
        for size, count in counter.items():
            numbers = by_size[size]
            if len(numbers) > 1:
                wanted[size][rank] = count
                continue
            number = numbers[0]  # one of its kind: nothing to choose
            owners[number] = rank
            held = ranks.units[items.units[number]]
            held[rank] = held.get(rank, 0) + items.nbytes[number]
    for size in sorted(wanted):
        _spread(items, classes[sizes[size]], wanted[size], ranks, owners)


def _best_content(sizes: Sequence[tuple[int, int]], numbers: Sequence[int], ranks: Ranks, cap: int) -> Content:
    """The best assignment found; one within a higher cap, if none is found within ``cap``."""
    each = [size for size, number in zip(sizes, numbers, strict=True) for _ in range(number)]
    floors = (
        lower_bound([flops for flops, _ in each], ranks.flops).value,
        lower_bound([nbytes for _, nbytes in each], ranks.nbytes).value,
    )
    few = len(ranks) ** min(len(each), 64) <= _FEW_WAYS

    def best_of(found: Content, limit: int) -> Content:
        return Enumeration(found, ranks.flops, ranks.nbytes, limit).best() if few else found

    found = best_of(_searched(sizes, numbers, ranks, cap, floors), cap)
    if not found.score(cap)[0]:
        return found
    least = min(max(found.nbytes), _least_bytes(sizes, numbers, ranks, floors[1], few))
    again = _searched(sizes, numbers, ranks, least, floors)
    return best_of(min(found, again, key=lambda content: content.score(least)), least)


def _least_bytes(
    sizes: Sequence[tuple[int, int]], numbers: Sequence[int], ranks: Ranks, floor: float, few: bool
) -> int:
    """The most bytes that a rank has, if nothing but bytes is balanced."""
    nothing = [0] * len(ranks)
    bytes_only = [(0, nbytes) for _, nbytes in sizes]
    content = _longest_first(bytes_only, numbers, Ranks(nothing, ranks.nbytes), _bytes_first)
    cap = max(content.nbytes)
    Search(content, cap, (0.0, floor)).run()
    if few:
        content = Enumeration(content, nothing, ranks.nbytes, cap).best()
    return max(content.nbytes)


def _searched(
    sizes: Sequence[tuple[int, int]],
    numbers: Sequence[int],
    ranks: Ranks,
    cap: int,
    floors: tuple[float, float],
) -> Content:
    """The better of two searches: from the start that balances operations, and if need be from bytes."""
    found: list[Content] = []
    for start in (_flops_first, _bytes_first):
        content = _longest_first(sizes, numbers, ranks, start)
        Search(content, cap, floors).run()
        found.append(content)
        over, flops, _ = content.score(cap)
        if not over and flops <= 1.01 * floors[0]:
            break
    return min(found, key=lambda content: content.score(cap))


def _spread(items: Items, numbers: Sequence[int], counts: dict[int, int], ranks: Ranks, owners: list[int]) -> None:
    """Give the equal items ``numbers`` to ranks, ``counts[rank]`` each, so that units are spread."""
    slots: list[int] = []
    left = counts
    while left:
        slots.extend(left)
        left = {rank: count - 1 for rank, count in left.items() if count > 1}
    slots.reverse()  # taken from the end
    for number in numbers:
        unit = items.units[number]
        held = ranks.units[unit]
        best, least = 0, -1
        for position in range(len(slots) - 1, max(-1, len(slots) - 1 - _LOOKAHEAD), -1):
            here = held.get(slots[position], 0)
            if least < 0 or here < least:
                best, least = position, here
                if not here:
                    break
        owners[number] = slots.pop(best)
        ranks.join_unit(unit, items.nbytes[number], owners[number])


def _bundles(items: Items, limit: int) -> list[tuple[int, list[int]]]:
    """(bytes, tails) of each unit together, in order, cut where they exceed ``limit`` bytes; largest first."""
    of_unit: defaultdict[str, list[int]] = defaultdict(list)
    for number, tail in enumerate(items.tails):
        if tail:
            of_unit[items.units[number]].append(number)
    bundles: list[list[int]] = []
    sizes: list[int] = []
    for numbers in of_unit.values():
        for number in numbers:
            nbytes = items.nbytes[number]
            if number == numbers[0] or sizes[-1] + nbytes > limit:
                bundles.append([])
                sizes.append(0)
            bundles[-1].append(number)
            sizes[-1] += nbytes
    return sorted(zip(sizes, bundles, strict=True), key=lambda bundle: -bundle[0])


def _assign_tails(items: Items, ranks: Ranks, limit: int, owners: list[int]) -> None:
    """Fill in the owners of tails, in bundles of up to ``limit`` bytes; ``ranks`` is updated."""
    heaviest = max(ranks.nbytes)
    heap = [(nbytes, rank) for rank, nbytes in enumerate(ranks.nbytes)]
    heapq.heapify(heap)
    for size, bundle in _bundles(items, limit):
        while heap[0][0] != ranks.nbytes[heap[0][1]]:
            heapq.heappop(heap)  # an entry from before that rank got more
        unit = items.units[bundle[0]]
        present = ranks.units[unit]
        owner = min(present, key=lambda rank: (ranks.nbytes[rank], rank), default=heap[0][1])
        if ranks.nbytes[owner] + size > heaviest:
            owner = heap[0][1]
        for number in bundle:
            owners[number] = owner
            ranks.flops[owner] += items.flops[number]
        ranks.join_unit(unit, size, owner)
        ranks.nbytes[owner] += size
        heapq.heappush(heap, (ranks.nbytes[owner], owner))
        heaviest = max(heaviest, ranks.nbytes[owner])
