"""If one rank fails, the others end with an error that says what they were waiting for."""

import itertools
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from test_multiprocess.fsdp_cases import Block, groups_of, same_model, shard
from test_multiprocess.world import on_ranks


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Fault(Exception):
    pass


_numbers = itertools.count()


def impatient_mesh() -> DeviceMesh:
    """A mesh over all ranks whose collectives give up after 2 seconds; others are not affected."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    # Equal meshes are one to DTensor, whatever their groups, and it caches them. Hence a name of its own.
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"impatient{next(_numbers)}",))


def fail(*unused: object) -> None:
    raise _Fault


def run_with_a_fault_on_rank_1(model: nn.Module, install: Callable[[], object]) -> str | None:
    """Forward and backward; returns the error of a rank that waited in vain."""
    if dist.get_rank() == 1:
        install()
    try:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
    except _Fault:
        assert dist.get_rank() == 1
        return None
    except RuntimeError as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("gather", ["broadcast", "chain", "resplit"])
@on_ranks(3)
def test_a_fault_in_forward(mesh: DeviceMesh, gather: str) -> None:
    model = same_model(Stack)
    shard(model, impatient_mesh())
    for group in groups_of(model):
        if gather != "broadcast":
            lane = Lane.of(group._ranks)
            group.use_gather(ChainGather(lane) if gather == "chain" else ResplitGather(lane))
    message = run_with_a_fault_on_rank_1(model, lambda: model.layers[1].down.register_forward_pre_hook(fail))
    dist.barrier()
    if message is not None:
        assert message.startswith("gather of unit layers.")
        assert f"did not complete on rank {dist.get_rank()}: another rank has failed" in message


@on_ranks(3)
def test_a_fault_in_backward(mesh: DeviceMesh) -> None:
    model = same_model(Stack)
    shard(model, impatient_mesh())
    message = run_with_a_fault_on_rank_1(
        model, lambda: model.layers[3].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
    )
    dist.barrier()
    if message is not None:
        assert message.startswith(("gather of unit layers.", "reduction of unit layers."))
        assert f"did not complete on rank {dist.get_rank()}: another rank has failed" in message
