"""What the tests of graph style share."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.fsdp import fully_shard
from mfsdp.planning import ShardPlan, plan
from test_multiprocess.fsdp_cases import OnlyOwned


def shard_graph(model: nn.Module, mesh: DeviceMesh, **options: Any) -> ShardPlan:
    """``fully_shard(model, style="graph")``; the plan is returned."""
    made = plan(model, mesh)
    fully_shard(model, mesh=mesh, plan=made, style="graph", **options)
    return made


class WithEncode(OnlyOwned):
    """It has another method that uses its own parameters, which calls ``forward``, too."""

    def encode(self, x: Tensor) -> Tensor:
        return self(x) * 2 + self.last.bias
