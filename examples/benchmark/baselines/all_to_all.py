"""FSDP2, matrices exchanged so that each rank orthogonalises some of them: the best that row shards allow."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.sharded_muon import ShardedMuon
from mfsdp.optim import newton_schulz


@dataclass
class _Exchange:
    """Matrices of one shape that are exchanged together.

    Attributes:
        members: which matrices.
        height: rows of each.
        width: columns of each.
        sent: this rank's message, kept until it has gone.
        received: the message to it.
        work: the exchange under way.
    """

    members: list[int]
    height: int
    width: int
    sent: Tensor | None = None
    received: Tensor | None = None
    work: dist.Work | None = None

    def start(self, message: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> None:
        self.sent, self.received = message, message.new_empty(sum(receive))
        self.work = dist.all_to_all_single(self.received, message, receive, send, group=group, async_op=True)

    def wait(self) -> Tensor:
        assert self.work is not None
        assert self.received is not None
        self.work.wait()
        received, self.sent, self.received, self.work = self.received, None, None, None
        return received


class AllToAllMuon(ShardedMuon):
    """Two uneven all-to-alls for each shape: rows to the matrix's worker, orthogonalised rows back.

    What it does about the cost: matrices are dealt out by the arithmetic they need; bfloat16 is what travels, which
    is what Newton-Schulz works in anyway, so that the results are the same; nothing is padded; the exchanges of all
    shapes are under way while matrices that have arrived are worked on, in one batch for each shape.

    Args:
        batched: whether matrices of one shape are orthogonalised together.
    """

    def __init__(self, *args: object, batched: bool = True, **options: float) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._batched = batched
        self._worker = self._deal_out([param.shape for param in self._params])

    def _deal_out(self, shapes: list[torch.Size]) -> list[int]:
        """The rank that works on each matrix: the largest first, each to the rank that has least to do."""
        cost = [min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes]
        loads = [0] * self.size
        worker = [0] * len(shapes)
        for index in sorted(range(len(shapes)), key=lambda index: -cost[index]):
            worker[index] = loads.index(min(loads))
            loads[worker[index]] += cost[index]
        return worker

    def orthogonalized(self, shapes: list[torch.Size]) -> Iterator[tuple[int, Tensor]]:
        by_shape: dict[torch.Size, list[int]] = {}
        for index, shape in enumerate(shapes):
            by_shape.setdefault(shape, []).append(index)
        # large shapes first: what is worked on last should leave little to send
        exchanges = [_Exchange(members, *shape) for shape, members in sorted(by_shape.items(), reverse=True)]
        for exchange in exchanges:
            self._send_rows(exchange)
        for exchange in exchanges:
            matrices = self._assemble(exchange, exchange.wait())
            self._send_back(exchange, self._orthogonal(matrices))
        for exchange in exchanges:
            yield from self._take_back(exchange, exchange.wait())

    def _of(self, exchange: _Exchange, rank: int) -> list[int]:
        return [index for index in exchange.members if self._worker[index] == rank]

    def _lengths(self, exchange: _Exchange) -> tuple[list[int], list[int]]:
        """Elements of this rank's rows of each rank's matrices, and of each rank's rows of this rank's matrices."""
        rows = [self.rows(exchange.height, rank) for rank in range(self.size)]
        heights = [part.stop - part.start for part in rows]
        mine, own = heights[self.rank], len(self._of(exchange, self.rank))
        to = [len(self._of(exchange, rank)) * mine * exchange.width for rank in range(self.size)]
        return to, [own * height * exchange.width for height in heights]

    def _send_rows(self, exchange: _Exchange) -> None:
        order = [index for rank in range(self.size) for index in self._of(exchange, rank)]
        message = torch.cat([self.update(index).to(torch.bfloat16).flatten() for index in order])
        to, back = self._lengths(exchange)
        exchange.start(message, to, back, self.group)

    def _assemble(self, exchange: _Exchange, received: Tensor) -> Tensor:
        """This rank's matrices, shape ``(number, height, width)``."""
        number = len(self._of(exchange, self.rank))
        parts = received.split(self._lengths(exchange)[1])
        if not number:
            return received.view(0, exchange.height, exchange.width)
        return torch.cat([part.view(number, -1, exchange.width) for part in parts if part.numel()], dim=1)

    def _orthogonal(self, matrices: Tensor) -> Tensor:
        if not len(matrices):
            return matrices
        if self._batched and len(matrices) > 1:
            return newton_schulz(matrices)
        return torch.stack([newton_schulz(matrix) for matrix in matrices])

    def _send_back(self, exchange: _Exchange, matrices: Tensor) -> None:
        parts = [matrices[:, self.rows(exchange.height, rank)].flatten() for rank in range(self.size)]
        to, back = self._lengths(exchange)
        exchange.start(torch.cat(parts), back, to, self.group)

    def _take_back(self, exchange: _Exchange, received: Tensor) -> Iterator[tuple[int, Tensor]]:
        for rank, part in enumerate(received.split(self._lengths(exchange)[0])):
            members = self._of(exchange, rank)
            if members:
                yield from zip(members, part.view(len(members), part.numel() // len(members)), strict=True)
