"""From parameters to records: every parameter gets an owner, and a stack of matrices perhaps several."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mfsdp.planning.assign import Items, Ranks, assign
from mfsdp.planning.bounds import lower_bound
from mfsdp.planning.cost import CostModel
from mfsdp.planning.records import MatrixShard, ParameterSpec, Part, Role

__all__ = ["BytesOnly", "Costs", "place", "shard"]

_GRAINS = (1, 2, 4, 8, 16)
"""Stacks are cut into pieces of at most a rank's mean operations over one of these."""

_EVEN = 1.02
"""A plan this close to the bound is not improved by cutting stacks more finely."""


class Costs:
    """A cost model, asked once for each kind of parameter."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, spec: ParameterSpec) -> tuple[int, int]:
        """(step_flops, resident_bytes) of ``spec``."""
        kind = (spec.role, spec.shape, spec.dtype, spec.trainable, spec.split)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = (self.model.step_flops(spec), self.model.resident_bytes(spec))
        return found


class BytesOnly(Costs):
    """Costs without operations, so that bytes alone are balanced."""

    def of(self, spec: ParameterSpec) -> tuple[int, int]:
        return 0, super().of(spec)[1]


def _is_stack(spec: ParameterSpec) -> bool:
    return spec.split is not None and spec.split.stack > 1 and spec.split.stack == spec.shape[0]


@dataclass(frozen=True)
class _Placement:
    """One way to cut and assign.

    Args:
        pieces: for each parameter, the numbers of stacked matrices in its pieces.
        owners: of each piece, parameter by parameter.
        ranks: what ranks have then.
    """

    pieces: Sequence[tuple[int, ...]]
    owners: Sequence[int]
    ranks: Ranks

    def score(self) -> tuple[int, int]:
        return max(self.ranks.flops), max(self.ranks.nbytes)


_WHOLE = (1,)


def _pieces(spec: ParameterSpec, flops: int, limit: int | None) -> tuple[int, ...]:
    """Numbers of stacked matrices in pieces of about ``limit`` operations."""
    if limit is None or not _is_stack(spec):
        return _WHOLE
    stack = spec.shape[0]
    number = min(stack, max(1, -(-flops // max(1, limit))))
    return tuple(stack * (i + 1) // number - stack * i // number for i in range(number))


def _try(
    specs: Sequence[ParameterSpec],
    costs: Sequence[tuple[int, int]],
    base: tuple[list[int], list[int]],
    cap: int | None,
    limit: int | None,
) -> _Placement:
    pieces = [_pieces(spec, flops, limit) for spec, (flops, _) in zip(specs, costs, strict=True)]
    items = Items()
    for spec, (flops, nbytes), counts in zip(specs, costs, pieces, strict=True):
        if len(counts) == 1:
            items.add(flops, nbytes, spec.unit, spec.role is Role.TAIL)
            continue
        stack = spec.shape[0]
        for count in counts:
            items.add(flops * count // stack, nbytes * count // stack, spec.unit)
    ranks = Ranks(list(base[0]), list(base[1]))
    return _Placement(pieces, assign(items, ranks, cap), ranks)


def _best(
    specs: Sequence[ParameterSpec],
    costs: Sequence[tuple[int, int]],
    base: tuple[list[int], list[int]],
    cap: int | None,
    spread_stacks: bool,
) -> _Placement:
    best = _try(specs, costs, base, cap, None)
    if not spread_stacks or not any(map(_is_stack, specs)):
        return best
    mean = sum(best.ranks.flops) // len(best.ranks)
    numbers = [spec.shape[0] if _is_stack(spec) else 1 for spec in specs]
    floors = [
        lower_bound([cost[measure] // number for cost, number in zip(costs, numbers, strict=True)], base[measure])
        for measure in (0, 1)
    ]
    for grain in _GRAINS:
        if all(most <= _EVEN * floor.simple for most, floor in zip(best.score(), floors, strict=True)):
            break
        finer = _try(specs, costs, base, cap, mean // grain)
        best = min(best, finer, key=_Placement.score)
    return best


def _parts(owners: Sequence[int], counts: Sequence[int]) -> tuple[Part, ...]:
    """Parts in the order of their owners; pieces of one owner become one part."""
    held: defaultdict[int, int] = defaultdict(int)
    for owner, count in zip(owners, counts, strict=True):
        held[owner] += count
    parts: list[Part] = []
    for owner, count in sorted(held.items()):
        start = parts[-1].stop if parts else 0
        parts.append(Part(owner, start, start + count))
    return tuple(parts)


def _shards(
    specs: Sequence[ParameterSpec], costs: Sequence[tuple[int, int]], placement: _Placement
) -> Iterator[MatrixShard]:
    position = 0
    for spec, cost, counts in zip(specs, costs, placement.pieces, strict=True):
        owner, owners = placement.owners[position], placement.owners[position : position + len(counts)]
        position += len(counts)
        if len(counts) == 1 or len(set(owners)) == 1:
            yield shard(spec, owner, cost)
        else:
            yield shard(spec, None, cost, _parts(owners, counts))


def shard(spec: ParameterSpec, owner: int | None, cost: tuple[int, int], parts: tuple[Part, ...] = ()) -> MatrixShard:
    """The record of ``spec`` with its owner and its cost: operations, bytes."""
    flops, nbytes = cost
    return MatrixShard(
        spec.name,
        spec.role,
        owner,
        spec.shape,
        spec.dtype,
        nbytes,
        flops,
        spec.unit,
        spec.aliases,
        spec.trainable,
        spec.split,
        parts,
    )


def place(
    specs: Sequence[ParameterSpec],
    costs: Costs,
    base: tuple[list[int], list[int]],
    cap: int | None,
    spread_stacks: bool,
) -> dict[str, MatrixShard]:
    """Name -> record for ``specs``, none of which has the role ``ROWS``.

    Args:
        specs: what to place.
        costs: what it costs.
        base: what ranks have already: operations, bytes.
        cap: as for :func:`mfsdp.planning.assign.assign`.
        spread_stacks: whether a stack of matrices may be cut between matrices.
    """
    each = [costs.of(spec) for spec in specs]
    placement = _best(specs, each, base, cap, spread_stacks)
    return {record.name: record for record in _shards(specs, each, placement)}
