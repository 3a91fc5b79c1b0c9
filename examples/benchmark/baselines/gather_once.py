"""FSDP2, every matrix gathered in full on every rank at the start of the step, every rank doing all the work."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.sharded_muon import ShardedMuon
from mfsdp.optim import newton_schulz


class GatherOnceMuon(ShardedMuon):
    """One all-gather of everything, then all orthogonalisations on all ranks; own rows are kept.

    It needs room for all matrices on every rank, in the dtype of the gradients, and for its own rows of them; no more
    than that. Shards are padded to equal sizes, as an all-gather wants them.
    """

    def orthogonalized(self, shapes: list[torch.Size]) -> Iterator[tuple[int, Tensor]]:
        sizes = [-(-height // self.size) * width for height, width in shapes]
        gathered = self._gather(sizes)
        for index, (place, (height, width)) in enumerate(
            zip(gathered.view(self.size, -1).split(sizes, dim=1), shapes, strict=True)
        ):
            matrix = place.reshape(-1, width)[:height]
            yield index, newton_schulz(matrix)[self.rows(height, self.rank)]

    def _gather(self, sizes: list[int]) -> Tensor:
        """All ranks' rows of all matrices, of ``sizes`` elements a rank with padding: shape ``(ranks * sum,)``."""
        first = self.update(0)
        padded = first.new_zeros(sum(sizes))
        for index, place in enumerate(padded.split(sizes)):
            rows = self.update(index) if index else first
            place[: rows.numel()] = rows.flatten()
        gathered = padded.new_empty(self.size * padded.numel())
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return gathered
