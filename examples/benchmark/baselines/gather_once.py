"""FSDP2, every matrix gathered in full on every rank at the start of the step, every rank doing all the work."""

import torch
import torch.distributed as dist
from torch import Tensor

from baselines.sharded_muon import ShardedMuon
from mfsdp.optim import newton_schulz


class GatherOnceMuon(ShardedMuon):
    """One all-gather of everything, then all orthogonalisations on all ranks; own rows are kept.

    It needs room for all matrices on every rank. Shards are padded to equal sizes, as an all-gather wants them.
    """

    def orthogonalized(self, updates: list[Tensor], shapes: list[torch.Size]) -> list[Tensor]:
        sizes = [-(-height // self.size) * width for height, width in shapes]
        padded = updates[0].new_zeros(sum(sizes))
        for update, place in zip(updates, padded.split(sizes), strict=True):
            place[: update.numel()] = update.flatten()
        gathered = padded.new_empty(self.size * padded.numel())
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        results = []
        for place, (height, width) in zip(gathered.view(self.size, -1).split(sizes, dim=1), shapes, strict=True):
            matrix = place.reshape(-1, width)[:height]
            results.append(newton_schulz(matrix)[self.rows(height, self.rank)])
        return results
