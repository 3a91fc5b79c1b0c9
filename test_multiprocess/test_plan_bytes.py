"""What ranks really keep, and what they hold at most during a step, against the plan's numbers."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mfsdp.dtensor import local_tensor
from mfsdp.optim import build_optimizer
from mfsdp.optim.batching import MAX_BATCH_ELEMENTS_ON_CPU
from mfsdp.planning import MuonCost, ShardPlan
from mfsdp.planning.comparison import step_peaks
from test_multiprocess.fsdp_cases import TinyLM, loss_of, same_model, shard
from test_multiprocess.world import on_ranks


def storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of the tensors in ``tree``, local ones of DTensors."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield local_tensor(leaf).untyped_storage()


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, as long as these live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage._cdata for storage in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            self._see(storage, before)
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


def trained(mesh: DeviceMesh, **options: bool) -> tuple[nn.Module, Optimizer, ShardPlan, int]:
    """A model after a step, with gradients for the next; and the bytes that the first step left behind."""
    model = same_model(lambda: TinyLM(width=48, depth=4))
    made = shard(model, mesh)
    optimizer = build_optimizer(model, matrix_kwargs=options)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 0:
            with Allocations() as allocations:
                optimizer.step()
    return model, optimizer, made, allocations.now


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
    model, optimizer, made, _ = trained(mesh)
    planned = made.loads()[dist.get_rank()].resident_bytes
    assert sum(tensor.nbytes for tensor in kept(model, optimizer)) == planned


def held(model: nn.Module, optimizer: Optimizer, left: int) -> int:
    """Bytes of parameters, gradients and what the first step left behind, without step counters."""
    tensors = [t for parameter in model.parameters() for t in (parameter, parameter.grad) if t is not None]
    counters = sum(state["step"].nbytes for state in optimizer.state.values() if "step" in state)
    return sum(local_tensor(tensor).nbytes for tensor in tensors) + left - counters


@pytest.mark.parametrize("batched", [False, True])
@on_ranks(1, 2, 3, 4)
def test_a_step_leaves_nothing_behind_but_the_planned_state(mesh: DeviceMesh, batched: bool) -> None:
    model, optimizer, made, left = trained(mesh, batched=batched)
    assert held(model, optimizer, left) == made.loads()[dist.get_rank()].resident_bytes
    with Allocations() as allocations:
        optimizer.step()
    assert allocations.now == 0 < allocations.most


@pytest.mark.parametrize(("batched", "foreach"), [(False, False), (True, False), (True, True)])
@on_ranks(1, 2, 3, 4)
def test_the_most_bytes_in_a_step_are_the_predicted_ones(mesh: DeviceMesh, batched: bool, foreach: bool) -> None:
    model, optimizer, made, left = trained(mesh, batched=batched, foreach=foreach)
    with Allocations() as allocations:
        optimizer.step()
    cost_model = MuonCost(batch_elements=MAX_BATCH_ELEMENTS_ON_CPU if batched else 0, foreach=foreach)
    predicted = step_peaks(made, cost_model)[dist.get_rank()]
    assert predicted > 1.05 * made.loads()[dist.get_rank()].resident_bytes  # or else this test would see nothing
    assert 0 <= held(model, optimizer, left) + allocations.most - predicted <= 8  # a norm
