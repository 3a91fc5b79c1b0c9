"""``.safetensors`` files of sharded models: written by owners without gathering, loaded into any layout."""

import errno
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import mfsdp
from mfsdp.checkpoint import (
    CheckpointError,
    checkpoint_to_safetensors,
    load_safetensors,
    save,
    save_safetensors,
)
from test_multiprocess.checkpoint_cases import assert_holds, in_layout, train, whole_state
from test_multiprocess.fsdp_cases import TinyLM, same_model, shard
from test_multiprocess.world import on_ranks


def read(folder: Path) -> dict[str, Tensor]:
    """All tensors of an export, by the package."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_exported(folder: Path, model: nn.Module) -> None:
    expected = whole_state(model, [])["model"]
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("layout", ["mfsdp", "rotated", "fsdp2"])
@on_ranks(2, 3, 4)
def test_goes_out_of_one_layout_and_into_another(mesh: DeviceMesh, layout: str, tmp_path: Path) -> None:
    model, optimizers = in_layout(layout, mesh, "muon", seed=0)
    train(model, optimizers, [0])
    folder = save_safetensors(tmp_path / "export", model, max_file_bytes=500)
    assert_exported(folder, model)
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    expected = whole_state(model, [])
    for other in ("mfsdp", "rotated", "fsdp2", "single"):
        loaded, _ = in_layout(other, mesh, "muon", seed=1)
        load_safetensors(folder, loaded)
        assert_holds(loaded, [], expected, f"{layout} to {other}")


@on_ranks(4)
def test_hsdp_writes_each_replica_once(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, _ = in_layout("hsdp", mesh, "muon", seed=0)
    folder = save_safetensors(tmp_path / "export", model)
    assert_exported(folder, model)
    loaded, _ = in_layout("hsdp", mesh, "muon", seed=1)
    load_safetensors(folder, loaded)
    assert_holds(loaded, [], whole_state(model, []), "hsdp")


class Columns(nn.Module):
    """A parameter whose shards are not contiguous in the whole, and one that some ranks have nothing of."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(distribute_tensor(torch.randn(5, 7), mesh, [Shard(1)]))
        self.short = nn.Parameter(distribute_tensor(torch.randn(2, 3), mesh, [Shard(0)]))
        self.whole = nn.Parameter(torch.randn(3))


@on_ranks(3)
def test_shards_of_any_dimension(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = Columns(mesh)
    folder = save_safetensors(tmp_path / "export", model)
    assert_exported(folder, model)
    loaded = Columns(mesh)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    load_safetensors(folder / "model.safetensors", loaded)
    assert_holds(loaded, [], whole_state(model, []), "columns")


class Tied(TinyLM):
    """The head is the embedding; in bf16, with a buffer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(12))
        self.bfloat16()


@on_ranks(2)
def test_tied_parameters_and_dtypes(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, loaded = same_model(Tied), same_model(Tied, seed=1)
    for each in (model, loaded):
        shard(each, mesh)
    folder = save_safetensors(tmp_path / "export", model)
    found = read(folder)
    assert "head.weight" not in found
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.bfloat16", "torch.int64"}
    loaded.seen.zero_()
    load_safetensors(folder, loaded)
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.seen == 12
    assert_holds(loaded, [], whole_state(model, []), "tied")


@on_ranks(3)
def test_nothing_is_gathered(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = same_model(lambda: TinyLM(width=256, depth=2))
    shard(model, mesh)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with mfsdp.CommCounter() as counter:
        folder = save_safetensors(tmp_path / "export", model)
        load_safetensors(folder, model)
    assert counter.bytes < nbytes / 20, counter  # names, shapes and places


@on_ranks(2)
def test_ranks_share_the_export_of_a_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=0)
    checkpoint = save(tmp_path / "step-1", model, optimizers)
    assert_exported(checkpoint_to_safetensors(checkpoint, tmp_path / "together"), model)
    alone = dist.new_subgroups(1)[0]
    if dist.get_rank() == 0:
        checkpoint_to_safetensors(checkpoint, tmp_path / "alone", process_group=alone)
    dist.barrier()
    assert_exported(tmp_path / "alone", model)


@on_ranks(2)
def test_a_failure_of_one_rank_is_one_of_all(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, _ = in_layout("mfsdp", mesh, "muon", seed=0)
    last = dist.get_rank() == 1
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("os.pwrite", side_effect=full if last else os.pwrite),
        pytest.raises(CheckpointError, match="space"),
    ):
        save_safetensors(tmp_path / "export", model)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []

    folder = save_safetensors(tmp_path / "export", model)
    absent = {"safetensors": None} if last else {}
    before = whole_state(model, [])
    with mock.patch.dict(sys.modules, absent), pytest.raises(CheckpointError, match="needs the package safetensors"):
        load_safetensors(folder, model)
    assert_holds(model, [], before, "unchanged")
