"""Gather and reduction of a unit's segments: one small class for each way to do it.

A *gather* brings every segment from its owner to all ranks of the shard dimension; a *reduction* brings the
sum of all ranks' gradients of a segment to its owner. Both are given whole segments, start without waiting,
and move exactly the segments' bytes: no padding, and no message for a segment without elements.

How they are done is a strategy. :func:`choose_gather` and :func:`choose_reduction` hold the rule by which
one is chosen from backend, ranks and sizes:

==================  ===========================================  =====================================
strategy            what it does                                 where it is chosen
==================  ===========================================  =====================================
BroadcastGather     one broadcast per segment, all of a unit     everywhere
                    in one group where the backend can (NCCL)
RootedReduction     one reduce to the owner per segment, all     everywhere
                    of a unit in one group (NCCL)
==================  ===========================================  =====================================
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _coalescing_manager

__all__ = [
    "BroadcastGather",
    "Gather",
    "Pending",
    "Piece",
    "Reduction",
    "RootedReduction",
    "ShardGroup",
    "choose_gather",
    "choose_reduction",
]


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that a unit is spread over, addressed by their coordinate on the mesh dimension.

    A mesh may list its ranks in any order, and its process group sorts them: a coordinate is neither a
    global rank nor a rank within the group.

    Args:
        group: the process group of the mesh dimension.
        ranks: global rank of each coordinate.
        coordinate: that of this rank.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    coordinate: int

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: int, group: dist.ProcessGroup | None = None) -> "ShardGroup":
        """The ranks of ``mesh`` that differ from this one on dimension ``dim`` only."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not part of {mesh}")
        line = mesh.mesh.movedim(dim, -1)[tuple(at for d, at in enumerate(coordinate) if d != dim)]
        return cls(group or mesh.get_group(dim), tuple(line.tolist()), coordinate[dim])

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


@dataclass(frozen=True)
class Piece:
    """One segment as it travels.

    Args:
        owner: coordinate of the rank that holds it (gather) or that receives the sum (reduction).
        flat: 1-D tensor of the segment's size, on every rank; read or written in place.
    """

    owner: int
    flat: Tensor


class _Waitable(Protocol):
    def wait(self) -> object: ...


class Pending:
    """Collectives that were started together.

    Args:
        what: for error messages: the collective and the unit.
        works: their handles.
    """

    def __init__(self, what: str, works: Sequence[_Waitable]) -> None:
        self._what = what
        self._works = works

    def wait(self) -> None:
        """Return when the results can be used: on a CPU when they are there, on a GPU when the current
        stream has been told to wait for them.

        Raises:
            RuntimeError: the collective failed, because it timed out or another rank ended.
        """
        works, self._works = self._works, ()
        for work in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"{self._what} did not complete on rank {dist.get_rank()}: another rank has failed, or "
                    f"has not reached this point within the timeout of the process group. ({error})"
                ) from error


def _start_each(
    group: dist.ProcessGroup, device: torch.device, starts: Sequence[Callable[[], dist.Work]]
) -> list[_Waitable]:
    """Start collectives, as one group of the backend where it has such a thing."""
    if len(starts) > 1 and group._get_backend(device).supports_coalescing:
        with _coalescing_manager(group, device, async_ops=True) as manager:
            for start in starts:
                start()
        return [manager]
    return [start() for start in starts]


class Gather(ABC):
    """A way to bring segments from their owners to all ranks."""

    @abstractmethod
    def start(self, ranks: ShardGroup, pieces: Sequence[Piece], what: str) -> Pending:
        """Start to fill ``pieces`` on the ranks that do not own them. Called on every rank of ``ranks``.

        Args:
            ranks: who takes part.
            pieces: the same segments in the same order on every rank, each of at least one element.
            what: what to call this in errors.
        """


class Reduction(ABC):
    """A way to bring the sum over all ranks of each segment to its owner."""

    @abstractmethod
    def start(self, ranks: ShardGroup, pieces: Sequence[Piece], what: str) -> Pending:
        """Start to sum ``pieces`` into the owners' tensors; those of other ranks are used up.

        Arguments are those of :meth:`Gather.start`.
        """


class BroadcastGather(Gather):
    """One broadcast from each owner."""

    def start(self, ranks: ShardGroup, pieces: Sequence[Piece], what: str) -> Pending:
        if ranks.size == 1 or not pieces:
            return Pending(what, [])

        def start_one(piece: Piece) -> Callable[[], dist.Work]:
            return lambda: dist.broadcast(piece.flat, src=ranks.ranks[piece.owner], group=ranks.group, async_op=True)

        starts = [start_one(piece) for piece in pieces]
        return Pending(what, _start_each(ranks.group, pieces[0].flat.device, starts))


class RootedReduction(Reduction):
    """One rooted reduce to each owner."""

    def start(self, ranks: ShardGroup, pieces: Sequence[Piece], what: str) -> Pending:
        if ranks.size == 1 or not pieces:
            return Pending(what, [])

        def start_one(piece: Piece) -> Callable[[], dist.Work]:
            return lambda: dist.reduce(
                piece.flat,
                dst=ranks.ranks[piece.owner],
                op=dist.ReduceOp.SUM,
                group=ranks.group,
                async_op=True,
            )

        starts = [start_one(piece) for piece in pieces]
        return Pending(what, _start_each(ranks.group, pieces[0].flat.device, starts))


def choose_gather() -> Gather:
    """The gather for a unit; the rule is in the module's docstring."""
    return BroadcastGather()


def choose_reduction() -> Reduction:
    """The reduction for a unit; the rule is in the module's docstring."""
    return RootedReduction()
