"""What ranks really keep, and what they hold at most during a step, against the plan's numbers."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp.dtensor import local_tensor
from mfsdp.optim import build_optimizer
from mfsdp.planning import MuonCost, ShardPlan
from mfsdp.planning.comparison import step_peaks
from test_multiprocess.fsdp_cases import TinyLM, loss_of, same_model, shard
from test_multiprocess.world import on_ranks


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), before)
        return result

    def _see(self, storage: torch.UntypedStorage, before: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in before or key in self._known:
            return
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def trained(mesh: DeviceMesh) -> tuple[nn.Module, Optimizer, ShardPlan]:
    """A model after a step, with gradients for the next."""
    model = same_model(lambda: TinyLM(width=48, depth=4))
    made = shard(model, mesh)
    optimizer = build_optimizer(model)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 0:
            optimizer.step()
    return model, optimizer, made


def kept(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """The local tensors that live from step to step, without step counters."""
    for parameter in model.parameters():
        yield local_tensor(parameter)
        assert parameter.grad is not None
        yield local_tensor(parameter.grad)
        for name, value in optimizer.state[parameter].items():
            if name != "step":
                yield local_tensor(value)


@on_ranks(1, 2, 3, 4)
def test_resident_bytes_are_the_planned_ones(mesh: DeviceMesh) -> None:
    model, optimizer, made = trained(mesh)
    planned = made.loads()[dist.get_rank()].resident_bytes
    assert sum(tensor.nbytes for tensor in kept(model, optimizer)) == planned


@on_ranks(1, 2, 3, 4)
def test_the_most_bytes_in_a_step_are_within_five_percent_of_the_predicted_ones(mesh: DeviceMesh) -> None:
    model, optimizer, made = trained(mesh)
    resident = sum(tensor.nbytes for tensor in kept(model, optimizer))
    with Allocations() as allocations:
        optimizer.step()
    predicted = step_peaks(made, MuonCost())[dist.get_rank()]
    measured = resident + allocations.most
    assert allocations.most > 0
    assert abs(measured - predicted) <= 0.05 * predicted, (measured, predicted, resident)
