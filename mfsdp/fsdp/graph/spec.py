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


_LARGE = 1024 * 1024
"""Bytes from which an owned parameter travels by itself, and so without having been copied next to others."""


@dataclass(frozen=True)
class UnitSpec:
    """The numbers that gather and reduce one unit, on one rank.

    Parameters come in the order of the full tensor: owned ones by owner, then ``ROWS``.

    Attributes:
        shapes: global shape of each parameter.
        local_shapes: of what this rank holds of it.
        starts: where it starts in the full tensor, in elements; -1 if what this rank holds of it is the full parameter.
        offsets: where what this rank holds of it starts there; -1 likewise.
        numel: elements of the full tensor.
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
    starts: tuple[int, ...]
    offsets: tuple[int, ...]
    numel: int
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
        pinned = precision.compute == precision.stored
        places = _Places(ranks.size, ranks.coordinate, pinned, _LARGE // precision.stored.itemsize if pinned else None)
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
            starts=tuple(places.starts),
            offsets=tuple(places.offsets),
            numel=places.numel,
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
    """Lays parameters out one after the other, and says what of each is this rank's.

    Args:
        world_size: number of ranks.
        coordinate: this one.
        pinned: whether parameters that this rank owns are left where they are.
        large: elements from which an owned parameter is a piece by itself, if any is.
    """

    def __init__(self, world_size: int, coordinate: int, pinned: bool = False, large: int | None = None) -> None:
        self._world_size = world_size
        self._coordinate = coordinate
        self._pinned = pinned
        self._large = math.inf if large is None else large
        self._pieces: list[tuple[int | None, list[int]]] = []  # owner and size, or None and the size of each rank
        self._open = False  # whether the last piece may grow
        self.numel = 0
        self.local_shapes: list[tuple[int, ...]] = []
        self.starts: list[int] = []
        self.offsets: list[int] = []

    def add(self, shape: tuple[int, ...], owner: int | None) -> None:
        if owner is None:
            self._add_rows(shape)
            return
        mine = owner == self._coordinate
        numel = math.prod(shape)
        self.local_shapes.append(tuple(shape) if mine else (0, *shape[1:]))
        self.starts.append(-1 if mine and self._pinned else self.numel)
        self.offsets.append(self.starts[-1])
        small = numel < self._large
        if small and self._open and self._pieces[-1][0] == owner:
            self._pieces[-1][1][0] += numel
        else:
            self._pieces.append((owner, [numel]))
        self._open = small
        self.numel += 0 if mine and self._pinned else numel

    def _add_rows(self, shape: tuple[int, ...]) -> None:
        rows = [rows_of_rank(shape[0], rank, self._world_size) for rank in range(self._world_size)]
        width = math.prod(shape[1:])
        self.local_shapes.append((rows[self._coordinate], *shape[1:]))
        self.starts.append(self.numel)
        self.offsets.append(self.numel + sum(rows[: self._coordinate]) * width)
        self._pieces.append((None, [held * width for held in rows]))
        self._open = False
        self.numel += shape[0] * width

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
