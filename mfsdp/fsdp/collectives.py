"""Gather and reduction of a unit's segments: the interface, and the two ways that suit most networks.

A *gather* brings every segment from its owner to all ranks of the shard dimension; a *reduction* brings the
sum of all ranks' gradients of a segment to its owner. Both are given whole segments, start without waiting,
and move exactly the segments' bytes: no padding, and no message for a segment without elements.

Each way to do it is a small class. Which one a unit uses is decided in :mod:`mfsdp.fsdp.strategy`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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
    "Shipment",
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
    def of(cls, mesh: DeviceMesh, dim: int) -> "ShardGroup":
        """The ranks of ``mesh`` that differ from this one on dimension ``dim`` only."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not part of {mesh}")
        line = mesh.mesh.movedim(dim, -1)[tuple(at for d, at in enumerate(coordinate) if d != dim)]
        return cls(mesh.get_group(dim), tuple(line.tolist()), coordinate[dim])

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


@dataclass(frozen=True)
class Shipment:
    """The segments of a unit that travel together: the same on every rank, by ascending owner.

    Args:
        pieces: the segments that have elements.
        whole: for a :class:`Gather` that is ``contiguous``, the 1-D tensor in which they lie one after the
            other.
    """

    pieces: tuple[Piece, ...]
    whole: Tensor | None = None


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
                raise failure(self._what, error) from error


def failure(what: str, error: Exception) -> RuntimeError:
    """The error of a rank that waits in vain, with the name of what it waits for."""
    return RuntimeError(
        f"{what} did not complete on rank {dist.get_rank()}: another rank has failed, or has not reached "
        f"this point within the timeout of the process group. ({error})"
    )


class Gather(ABC):
    """A way to bring segments from their owners to all ranks."""

    contiguous: ClassVar[bool] = False
    """Whether it needs the unit in one tensor, ``shipment.whole``; the owner's segment is not pinned then."""

    @abstractmethod
    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        """Start to fill the pieces on the ranks that do not own them. Called on every rank of ``ranks``.

        Args:
            ranks: who takes part.
            shipment: what travels.
            what: what to call this in errors.

        Raises:
            RuntimeError: another rank has failed already.
        """


class Reduction(ABC):
    """A way to bring the sum over all ranks of each segment to its owner."""

    @abstractmethod
    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        """Start to sum the pieces into the owners' tensors; those of other ranks are used up.

        Arguments and errors are those of :meth:`Gather.start`.
        """


class BroadcastGather(Gather):
    """One broadcast from each owner, as one group of the backend where it has such a thing (NCCL)."""

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        def start_one(piece: Piece) -> dist.Work:
            return dist.broadcast(piece.flat, src=ranks.ranks[piece.owner], group=ranks.group, async_op=True)

        return _start_each(ranks, shipment, what, start_one)


class RootedReduction(Reduction):
    """One rooted reduce to each owner, as one group of the backend where it has such a thing (NCCL)."""

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        def start_one(piece: Piece) -> dist.Work:
            return dist.reduce(
                piece.flat,
                dst=ranks.ranks[piece.owner],
                op=dist.ReduceOp.SUM,
                group=ranks.group,
                async_op=True,
            )

        return _start_each(ranks, shipment, what, start_one)


def _start_each(ranks: ShardGroup, shipment: Shipment, what: str, start_one: Callable[[Piece], dist.Work]) -> Pending:
    if ranks.size == 1 or not shipment.pieces:
        return Pending(what, [])
    device: torch.device = shipment.pieces[0].flat.device
    try:
        if len(shipment.pieces) > 1 and ranks.group._get_backend(device).supports_coalescing:
            with _coalescing_manager(ranks.group, device, async_ops=True) as manager:
                for piece in shipment.pieces:
                    start_one(piece)
            return Pending(what, [manager])
        return Pending(what, [start_one(piece) for piece in shipment.pieces])
    except RuntimeError as error:
        raise failure(what, error) from error
