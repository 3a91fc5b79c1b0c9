"""Owned tensors in files and copies: torch.save, deepcopy, and torch's distributed checkpoints."""

import copy
import io
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import mfsdp
from mfsdp import OwnerShard, Tail
from test_multiprocess.world import on_ranks


class Net(nn.Module):
    """Several matrices and vectors in one unit, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.temperature


def sharded(mesh: DeviceMesh, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.reshard()
    return model, optimizer


def full(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@on_ranks(2, 3)
def test_state_dicts_are_saved_loaded_and_copied(mesh: DeviceMesh) -> None:
    """Of parameters that do not start their rank's segment, too."""
    model, optimizer = sharded(mesh, seed=1)
    state = model.state_dict()
    expected = full(state)
    assert equal(full(copy.deepcopy(state)), expected)
    assert equal(full({"w": copy.deepcopy(model.layers[1].weight).detach()}), {"w": expected["layers.1.weight"]})
    copy.deepcopy(optimizer)
    buffer = io.BytesIO()
    torch.save({"model": state, "optimizer": optimizer.state_dict()}, buffer)
    # each tensor with its own bytes and not with its rank's whole segment
    held = sum(value.to_local().nbytes for value in state.values())
    assert buffer.tell() < 4 * held + 40_000
    buffer.seek(0)
    loaded = torch.load(buffer)  # weights_only, as is torch's default
    assert loaded["model"]["layers.1.weight"].placements == state["layers.1.weight"].placements
    other, other_optimizer = sharded(mesh, seed=2)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    assert equal(full(other.state_dict()), expected)
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())


@on_ranks(2)
def test_single_tensors_are_saved(mesh: DeviceMesh) -> None:
    for placement in (OwnerShard(1), Tail(0)):
        tensor = mfsdp.distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [placement])
        buffer = io.BytesIO()
        torch.save(tensor, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer).full_tensor(), tensor.full_tensor())


@on_ranks(2, 3)
def test_distributed_checkpoints(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Through torch's own functions; parameters without dimensions as well. Every byte is written once."""
    model, optimizer = sharded(mesh, seed=1)
    expected = full(model.state_dict())
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    metadata = dcp.FileSystemReader(tmp_path / "checkpoint").read_metadata()
    for name, entry in metadata.state_dict_metadata.items():
        if name.startswith("model."):
            assert len(entry.chunks) == 1, (name, entry)
            assert entry.chunks[0].sizes == entry.size
    other, other_optimizer = sharded(mesh, seed=2)
    loaded = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, other_optimizer)}
    dcp.load(loaded, checkpoint_id=tmp_path / "checkpoint")
    set_model_state_dict(other, loaded["model"])
    set_optimizer_state_dict(other, other_optimizer, loaded["optimizer"])
    assert equal(full(other.state_dict()), expected)
    for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())


@on_ranks(2)
def test_full_state_dicts(mesh: DeviceMesh) -> None:
    model, _ = sharded(mesh, seed=1)
    expected = full(model.state_dict())
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert equal(dict(state), expected)
    other, _ = sharded(mesh, seed=2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state if dist.get_rank() == 0 else {}, options=options)
    assert equal(full(other.state_dict()), expected)
