"""Where everything of a unit lies, as numbers: what the operators of graph style are called with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from mfsdp.fsdp.collectives import ShardGroup
from mfsdp.fsdp.graph.ops import ALL_RANKS
from mfsdp.planning.records import rows_of_rank

__all__ = ["Precision", "UnitSpec", "Wires"]


@dataclass(frozen=True)
class Wires:
    """Who exchanges what of a unit with whom.

    Args:
        ranks: the shard dimension.
        replicas: the group that sums an owner's gradients over replicas (HSDP), or None.
    """

    ranks: ShardGroup
    replicas: dist.ProcessGroup | None

    @property
    def roots(self) -> tuple[int, ...]:
        """Rank in the group of each coordinate."""
        return tuple(dist.get_group_rank(self.ranks.group, rank) for rank in self.ranks.ranks)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a unit's parameters: as stored, as gathered and computed with, and of the sum of gradients."""

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class UnitSpec:
    """The numbers that gather and reduce one unit, on one rank.

    Parameters come in the order of the full tensor: owned ones by owner, then ``ROWS``.

    Attributes:
        shapes: global shape of each parameter.
        local_shapes: of what this rank holds of it.
        offsets: where that lies in the full tensor, in elements.
        gather_roots, gather_sizes: the pieces of a gather, see :mod:`mfsdp.fsdp.graph.ops`.
        reduced: positions of the parameters whose gradients are reduced, the trainable ones.
        reduce_roots, reduce_sizes: the pieces of their reduction.
        divide_before, divide_after: what gradients are divided by before and after they are summed.
        here: rank of this process in the group.
        group_name: of the shard dimension.
        replicas_name: of the replicas' group, or "".
    """

    shapes: tuple[tuple[int, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    gather_roots: tuple[int, ...]
    gather_sizes: tuple[int, ...]
    reduced: tuple[int, ...]
    reduce_roots: tuple[int, ...]
    reduce_sizes: tuple[int, ...]
    divide_before: float
    divide_after: float
    here: int
    world_size: int
    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    group_name: str
    replicas_name: str

    @property
    def numel(self) -> int:
        """Elements of the full tensor."""
        return sum(self.gather_sizes)

    @classmethod
    def of(
        cls,
        shapes: Sequence[tuple[int, ...]],
        owners: Sequence[int | None],
        trainable: Sequence[bool],
        wires: Wires,
        precision: Precision,
    ) -> "UnitSpec":
        """The spec of parameters that are in the order of the full tensor.

        Args:
            shapes: global shapes.
            owners: coordinate of the owner of each; None for ``ROWS``.
            trainable: whether its gradient is reduced.
            wires: the groups.
            precision: the dtypes.
        """
        ranks, roots = wires.ranks, wires.roots
        places = _Places(ranks.size, ranks.coordinate)
        for shape, owner in zip(shapes, owners, strict=True):
            places.add(shape, owner)
        reduced = [index for index, trains in enumerate(trainable) if trains]
        sums = _Places(ranks.size, ranks.coordinate)
        for index in reduced:
            sums.add(shapes[index], owners[index])
        gloo = dist.get_backend(ranks.group) == "gloo"
        before, after, _, _ = _get_gradient_divide_factors(
            ranks.group, wires.replicas, precision.reduce, force_sum_reduction_for_comms=True
        )
        in_order = roots == tuple(range(ranks.size))
        gather = places.pieces(roots, even=in_order)
        # gloo's reduce-scatter sends as much as an all-reduce does
        reduce = sums.pieces(roots, even=in_order and not gloo)
        return cls(
            shapes=tuple(map(tuple, shapes)),
            local_shapes=tuple(places.local_shapes),
            offsets=tuple(places.offsets),
            gather_roots=tuple(root for root, _ in gather),
            gather_sizes=tuple(size for _, size in gather),
            reduced=tuple(reduced),
            reduce_roots=tuple(root for root, _ in reduce),
            reduce_sizes=tuple(size for _, size in reduce),
            divide_before=float(before or 1),
            divide_after=float(after or 1),
            here=roots[ranks.coordinate],
            world_size=ranks.size,
            stored=precision.stored,
            compute=precision.compute,
            reduce=precision.reduce,
            group_name=ranks.group.group_name,
            replicas_name=wires.replicas.group_name if wires.replicas is not None else "",
        )


class _Places:
    """Lays parameters out one after the other, and says what of each is this rank's."""

    def __init__(self, world_size: int, coordinate: int) -> None:
        self._world_size = world_size
        self._coordinate = coordinate
        self._end = 0
        self._pieces: list[tuple[int | None, list[int]]] = []  # owner and size, or None and the size of each rank
        self.local_shapes: list[tuple[int, ...]] = []
        self.offsets: list[int] = []

    def add(self, shape: tuple[int, ...], owner: int | None) -> None:
        if owner is None:
            self._add_rows(shape)
        else:
            mine = owner == self._coordinate
            self.local_shapes.append(tuple(shape) if mine else (0, *shape[1:]))
            self.offsets.append(self._end)
            numel = math.prod(shape)
            if self._pieces and self._pieces[-1][0] == owner:
                self._pieces[-1][1][0] += numel
            else:
                self._pieces.append((owner, [numel]))
            self._end += numel

    def _add_rows(self, shape: tuple[int, ...]) -> None:
        rows = [rows_of_rank(shape[0], rank, self._world_size) for rank in range(self._world_size)]
        width = math.prod(shape[1:])
        self.local_shapes.append((rows[self._coordinate], *shape[1:]))
        self.offsets.append(self._end + sum(rows[: self._coordinate]) * width)
        self._pieces.append((None, [held * width for held in rows]))
        self._end += shape[0] * width

    def pieces(self, roots: Sequence[int], even: bool) -> list[tuple[int, int]]:
        """(root, size) of each piece that has elements.

        Args:
            roots: group rank of each coordinate.
            even: whether rows that all ranks hold equally many of are one piece.
        """
        found: list[tuple[int, int]] = []
        for owner, sizes in self._pieces:
            if owner is not None:
                found.append((roots[owner], sizes[0]))
            elif even and len(set(sizes)) == 1:
                found.append((ALL_RANKS, sum(sizes)))
            else:
                found += list(zip(roots, sizes, strict=True))
        return [(root, size) for root, size in found if size]
