"""Gathers for gloo between hosts, where the slowest link decides.

gloo's broadcast is a tree: its root sends log2(W) copies of its segment, so that one link carries the unit
several times. In the two gathers here every link carries it about once.

:class:`ChainGather` passes each segment on from rank to rank, in chunks, so that all links are busy at the
same time (here for the segment of rank 1 of four)::

    rank 1   c0 c1 c2 c3 ->
    rank 2      c0 c1 c2 c3 ->          each rank receives a chunk and sends it on
    rank 3         c0 c1 c2 c3 ->
    rank 0            c0 c1 c2 c3

:class:`ResplitGather` first cuts the unit anew, into even slices, and then gathers these as FSDP does::

    owners' segments    | rank 0        | rank 2                     | rank 3 |
                        uneven all-to-all: every element once
    even slices         | rank 0     | rank 1     | rank 2     | rank 3     |rest|
                        all-gather of equal slices; the rest, fewer elements than there are ranks, went to
    full unit           | .................................................... |    everybody before
"""

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mfsdp.fsdp.collectives import Gather, Pending, Piece, ShardGroup, Shipment
from mfsdp.fsdp.lane import Lane

__all__ = ["ChainGather", "ResplitGather"]

_Range = tuple[int, int]
"""Elements of a unit, from the first to before the second."""


class ChainGather(Gather):
    """A pipelined chain from each owner; where many own a part, together a ring.

    Args:
        lane: where it runs.
        chunk_bytes: size of a chunk.
    """

    def __init__(self, lane: Lane, chunk_bytes: int = 256 * 1024) -> None:
        self._lane = lane
        self._chunk_bytes = chunk_bytes

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        return Pending(what, [self._lane.run(lambda: self.move(ranks, shipment))])

    def move(self, ranks: ShardGroup, shipment: Shipment) -> None:
        """Gather, and return when it is done."""
        sends: list[dist.Work] = []
        receives: list[tuple[int, list[tuple[int, Tensor, dist.Work]]]] = []
        previous, following = (ranks.ranks[(ranks.coordinate + step) % ranks.size] for step in (-1, 1))
        tag = 0
        for piece in shipment.pieces:
            distance = (ranks.coordinate - piece.owner) % ranks.size
            chunks = list(enumerate(self._chunks(piece), start=tag))
            tag += len(chunks)
            if distance == 0:
                sends += [self._send(chunk, following, number) for number, chunk in chunks]
            else:
                posted = [(number, chunk, self._receive(chunk, previous, number)) for number, chunk in chunks]
                receives.append((distance, posted))
        # The nearest owner's chunks arrive first. With this order no two ranks can wait for each other:
        # what a rank waits for at one distance, the previous rank passes on at a smaller one.
        for distance, posted in sorted(receives, key=lambda entry: entry[0]):
            for number, chunk, receive in posted:
                receive.wait()
                if distance < ranks.size - 1:
                    sends.append(self._send(chunk, following, number))
        for send in sends:
            send.wait()

    def _chunks(self, piece: Piece) -> tuple[Tensor, ...]:
        return piece.flat.split(max(1, self._chunk_bytes // piece.flat.itemsize))

    def _send(self, chunk: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.isend(chunk, dst=rank, group=self._lane.group, tag=tag)
        assert work is not None
        return work

    def _receive(self, chunk: Tensor, rank: int, tag: int) -> dist.Work:
        work = dist.irecv(chunk, src=rank, group=self._lane.group, tag=tag)
        assert work is not None
        return work


class ResplitGather(Gather):
    """An uneven all-to-all into even slices and an all-gather of these: better than broadcasts, and measured to be no
    better than the chain anywhere (:mod:`mfsdp.fsdp.strategy`).

    Args:
        lane: where it runs.
    """

    contiguous: ClassVar[bool] = True

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        if not shipment.pieces:
            return Pending(what, [])
        return Pending(what, [self._lane.run(lambda: self.move(ranks, shipment))])

    def move(self, ranks: ShardGroup, shipment: Shipment) -> None:
        """Gather, and return when it is done."""
        whole = shipment.whole
        if whole is None:
            raise ValueError("ResplitGather needs the unit in one tensor, and was given segments only")
        rank_of = [dist.get_group_rank(self._lane.group, rank) for rank in ranks.ranks]
        here = rank_of[ranks.coordinate]
        sizes = [(rank_of[piece.owner], piece.flat.numel()) for piece in shipment.pieces]
        cut = _Cut(whole.numel(), ranks.size, sizes)
        with torch.autograd._unsafe_preserve_version_counter(whole):
            self._exchange(whole, cut.parts_of(here), cut.parts_for(here))
            if cut.even:
                own = whole[here * cut.even : (here + 1) * cut.even]
                dist.all_gather_single(whole[: cut.even * ranks.size], own, group=self._lane.group)

    def _exchange(self, whole: Tensor, sent: list[list[_Range]], received: list[list[_Range]]) -> None:
        parts = [whole[start:stop] for ranges in sent for start, stop in ranges]
        outgoing = torch.cat(parts) if parts else whole.new_empty(0)
        incoming = whole.new_empty(_length(part for ranges in received for part in ranges))
        dist.all_to_all_single(
            incoming,
            outgoing,
            output_split_sizes=[_length(ranges) for ranges in received],
            input_split_sizes=[_length(ranges) for ranges in sent],
            group=self._lane.group,
        )
        at = 0
        for start, stop in (part for ranges in received for part in ranges):
            whole[start:stop] = incoming[at : at + stop - start]
            at += stop - start


def _length(ranges: Iterable[_Range]) -> int:
    return sum(stop - start for start, stop in ranges)


class _Cut:
    """Which elements of a unit go where when it is cut into even slices.

    Args:
        numel: elements of the unit.
        slices: number of even slices.
        segments: (rank of the owner, elements) of its segments, in order.
    """

    def __init__(self, numel: int, slices: int, segments: list[tuple[int, int]]) -> None:
        self.even = numel // slices
        self._slices = slices
        self._rest = (self.even * slices, numel)
        self._segments: dict[int, tuple[int, int]] = {}
        start = 0
        for owner, size in segments:
            self._segments[owner] = (start, start + size)
            start += size

    def _parts(self, source: int, destination: int) -> list[_Range]:
        """Ranges of elements that ``source`` sends to ``destination``: of its slice, and of the rest."""
        segment = self._segments.get(source, (0, 0))
        wanted = (destination * self.even, (destination + 1) * self.even)
        ranges = ((max(segment[0], a), min(segment[1], b)) for a, b in (wanted, self._rest))
        return [(start, stop) for start, stop in ranges if start < stop]

    def parts_of(self, source: int) -> list[list[_Range]]:
        """What ``source`` sends, by destination."""
        return [self._parts(source, destination) for destination in range(self._slices)]

    def parts_for(self, destination: int) -> list[list[_Range]]:
        """What ``destination`` receives, by source."""
        return [self._parts(source, destination) for source in range(self._slices)]
