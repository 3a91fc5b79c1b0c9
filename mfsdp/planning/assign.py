"""Who owns what: a deterministic assignment of matrices and tails to ranks.

Matrices are placed first, the one with most operations first, each on the rank with the least to do (longest
processing time, LPT). That decides how many matrices of each size a rank gets. Matrices of equal cost are
interchangeable, so which one goes where is then chosen so that the bytes of a unit lie with many owners,
because a unit whose owners are even is gathered fastest.

Tails follow, balancing bytes. The tails of a unit stay together on an owner that the unit has anyway, since
every further owner costs one more message in each gather, unless this would make the heaviest rank heavier.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["Item", "Ranks", "assign_matrices", "assign_tails"]

_LOOKAHEAD = 16
"""How many candidates are compared for a matrix when a unit is spread; bounds the work for large models."""

_TAIL_SHARE = 16
"""A unit's tails are split where they exceed 1/16 of a rank's mean bytes."""


@dataclass(frozen=True, slots=True)
class Item:
    """Something to place: its cost, and the unit it is gathered with."""

    flops: int
    nbytes: int
    unit: str


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

    def place(self, item: Item, rank: int) -> None:
        """Account for ``item`` on ``rank``."""
        self.flops[rank] += item.flops
        self.nbytes[rank] += item.nbytes
        self.join_unit(item, rank)

    def join_unit(self, item: Item, rank: int) -> None:
        """Note the bytes of ``item`` on ``rank`` as part of its unit."""
        held = self.units[item.unit]
        held[rank] = held.get(rank, 0) + item.nbytes


def _counts_per_rank(
    sizes: Iterable[tuple[tuple[int, int], int]], ranks: Ranks
) -> dict[tuple[int, int], Counter[int]]:
    """LPT over (flops, bytes) -> number of items: how many each rank gets. Updates the loads of ``ranks``."""
    heap = [
        (flops, nbytes, rank)
        for rank, (flops, nbytes) in enumerate(zip(ranks.flops, ranks.nbytes, strict=True))
    ]
    heapq.heapify(heap)
    counts: dict[tuple[int, int], Counter[int]] = {}
    for (flops, nbytes), number in sizes:
        counter = counts[flops, nbytes] = Counter()
        for _ in range(number):
            load, held, rank = heap[0]
            counter[rank] += 1
            heapq.heapreplace(heap, (load + flops, held + nbytes, rank))
    for flops, nbytes, rank in heap:
        ranks.flops[rank], ranks.nbytes[rank] = flops, nbytes
    return counts


def _spread(
    items: Sequence[Item], numbers: Sequence[int], counter: Counter[int], ranks: Ranks
) -> dict[int, int]:
    """Give the equal ``items[number]`` to ranks, ``counter[rank]`` each, so that units are spread."""
    slots: list[int] = []
    left = dict(sorted(counter.items()))
    while left:
        slots.extend(left)
        left = {rank: count - 1 for rank, count in left.items() if count > 1}
    owners: dict[int, int] = {}
    slots.reverse()  # taken from the end
    for number in numbers:
        held = ranks.units[items[number].unit]
        best, least = 0, -1
        for position in range(len(slots) - 1, max(-1, len(slots) - 1 - _LOOKAHEAD), -1):
            here = held.get(slots[position], 0)
            if least < 0 or here < least:
                best, least = position, here
                if not here:
                    break
        owners[number] = slots.pop(best)
        ranks.join_unit(items[number], owners[number])
    return owners


def assign_matrices(items: Sequence[Item], ranks: Ranks) -> list[int]:
    """The owner of each of ``items``; ``ranks`` is updated.

    Operations are balanced first and bytes second. Equal input gives equal output, on every machine.
    """
    classes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        classes[item.flops, item.nbytes].append(number)
    sizes = sorted(((size, len(numbers)) for size, numbers in classes.items()), reverse=True)
    owners: dict[int, int] = {}
    for size, counter in _counts_per_rank(sizes, ranks).items():
        owners |= _spread(items, classes[size], counter, ranks)
    return [owners[number] for number in range(len(items))]


def _bundles(items: Sequence[Item], limit: int) -> list[list[int]]:
    """The tails of each unit together, in order, cut where they exceed ``limit`` bytes; largest first."""
    of_unit: defaultdict[str, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        of_unit[item.unit].append(number)
    bundles: list[list[int]] = []
    sizes: list[int] = []
    for numbers in of_unit.values():
        for number in numbers:
            nbytes = items[number].nbytes
            if number == numbers[0] or sizes[-1] + nbytes > limit:
                bundles.append([])
                sizes.append(0)
            bundles[-1].append(number)
            sizes[-1] += nbytes
    return [bundle for _, bundle in sorted(zip(sizes, bundles, strict=True), key=lambda pair: -pair[0])]


def assign_tails(items: Sequence[Item], ranks: Ranks) -> list[int]:
    """The owner of each of ``items``; ``ranks`` is updated. Bytes are balanced, units stay on few owners."""
    total = sum(ranks.nbytes) + sum(item.nbytes for item in items)
    heaviest = max(ranks.nbytes)
    heap = [(nbytes, rank) for rank, nbytes in enumerate(ranks.nbytes)]
    heapq.heapify(heap)
    owners = [0] * len(items)
    for bundle in _bundles(items, total // (_TAIL_SHARE * len(ranks))):
        size = sum(items[number].nbytes for number in bundle)
        while heap[0][0] != ranks.nbytes[heap[0][1]]:
            heapq.heappop(heap)  # an entry from before that rank got more
        present = ranks.units[items[bundle[0]].unit]
        owner = min(present, key=lambda rank: (ranks.nbytes[rank], rank), default=heap[0][1])
        if ranks.nbytes[owner] + size > heaviest:
            owner = heap[0][1]
        for number in bundle:
            owners[number] = owner
            ranks.place(items[number], owner)
        heapq.heappush(heap, (ranks.nbytes[owner], owner))
        heaviest = max(heaviest, ranks.nbytes[owner])
    return owners
