"""torch's own checkpoint functions on models and optimizers of mfsdp, and on its checkpoints."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import mfsdp.checkpoint
from test_multiprocess.checkpoint_cases import (
    assert_holds,
    assert_identical,
    in_layout,
    on_rank,
    small_model,
    torchs,
    train,
    whole_state,
)
from test_multiprocess.world import Worlds, on_ranks


@on_ranks(2, 3)
def test_a_model_alone(mesh: DeviceMesh, tmp_path: Path) -> None:
    """``dcp.save`` and ``dcp.load`` of ``model.state_dict()``, in place, and our load of it."""
    model, _ = in_layout("mfsdp", mesh, "muon", seed=1)
    saved = whole_state(model, [])
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "model")
    other, _ = in_layout("rotated", mesh, "muon", seed=2)
    dcp.load(other.state_dict(), checkpoint_id=tmp_path / "model")
    assert_holds(other, [], saved, "in place")
    another, _ = in_layout("rotated", mesh, "muon", seed=3)
    mfsdp.checkpoint.load(tmp_path / "model", another)
    assert_holds(another, [], saved, "by load")


@pytest.mark.parametrize("kind", ["normuon", "shampoo", "soap"])
@on_ranks(2)
def test_our_checkpoint_by_torchs_load(mesh: DeviceMesh, tmp_path: Path, kind: str) -> None:
    model, optimizers = in_layout("mfsdp", mesh, kind, seed=1)
    train(model, optimizers, range(2))
    path = mfsdp.checkpoint.save(tmp_path / "step-2", model, optimizers)
    other, theirs = in_layout("rotated", mesh, kind, seed=2)
    states = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, theirs)}
    dcp.load(states, checkpoint_id=path)
    set_model_state_dict(other, states["model"])
    set_optimizer_state_dict(other, theirs, states["optimizer"])
    assert_holds(other, theirs, whole_state(model, optimizers), kind)


@pytest.mark.parametrize("kind", ["muon", "soap"])
@on_ranks(2, 3)
def test_full_states(mesh: DeviceMesh, kind: str) -> None:
    """Gathered on rank 0, and broadcast from it."""
    model, optimizers = in_layout("mfsdp", mesh, kind, seed=1)
    train(model, optimizers, range(2))
    saved = whole_state(model, optimizers)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizers, options=full)
    if dist.get_rank() == 0:
        for name, value in states[0].items():
            assert_identical(value, saved["model"][name], name)
        for name, entries in states[1]["state"].items():
            for entry, value in entries.items():
                assert_identical(value, saved["states"][name][entry], f"{name}.{entry}")
    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    other, theirs = in_layout("rotated", mesh, kind, seed=2)
    set_model_state_dict(other, copy.deepcopy(states[0]), options=broadcast)
    set_optimizer_state_dict(other, theirs, copy.deepcopy(states[1]), options=broadcast)
    assert_holds(other, theirs, saved, "broadcast")
    train(other, theirs, [2])


@on_ranks(2)
def test_strict_and_not(mesh: DeviceMesh) -> None:
    model, _ = in_layout("mfsdp", mesh, "muon", seed=1)
    saved = whole_state(model, [])
    state = get_model_state_dict(model)
    del state["norm.bias"]
    other, _ = in_layout("mfsdp", mesh, "muon", seed=3)
    bias = whole_state(other, [])["model"]["norm.bias"]
    with pytest.raises(RuntimeError, match=r"[Mm]issing key.*norm\.bias"):
        set_model_state_dict(other, state)
    set_model_state_dict(other, state, options=StateDictOptions(strict=False))
    assert_holds(other, [], saved | {"model": saved["model"] | {"norm.bias": bias}}, "not strict")


@on_ranks(2)
def test_offloaded_and_flattened_states(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=1)
    train(model, optimizers, range(2))
    saved = whole_state(model, optimizers)
    for options in (StateDictOptions(cpu_offload=True), StateDictOptions(flatten_optimizer_state_dict=True)):
        states = {
            "model": get_model_state_dict(model, options=options),
            "optim": get_optimizer_state_dict(model, optimizers, options=options),
        }
        folder = tmp_path / f"{options.cpu_offload}"
        dcp.save({"app": states}, checkpoint_id=folder)
        other, theirs = in_layout("rotated", mesh, "muon", seed=2)
        mfsdp.checkpoint.load(folder, other, theirs)
        assert_holds(other, theirs, saved, f"{options}")


@on_ranks(2)
def test_ddp(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=1)
    train(model, optimizers, range(2))
    path = mfsdp.checkpoint.save(tmp_path / "mfsdp", model, optimizers)
    inner = small_model()
    theirs = torchs(inner)
    wrapped = DistributedDataParallel(inner)
    mfsdp.checkpoint.load(path, wrapped, theirs)
    assert_holds(inner, theirs, whole_state(model, optimizers), "mfsdp in DDP")
    train(wrapped, theirs, [2])
    path = mfsdp.checkpoint.save(tmp_path / "ddp", wrapped, theirs)
    mfsdp.checkpoint.load(path, model, optimizers)
    assert_holds(model, optimizers, whole_state(inner, theirs), "DDP in mfsdp")


@on_rank
def save_for_one(mesh: DeviceMesh, folder: Path) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=1)
    train(model, optimizers, range(2))
    mfsdp.checkpoint.save(folder / "own", model, optimizers)
    state = whole_state(model, optimizers)
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    dist.barrier()


def test_a_single_process_reads_it_without_us(worlds: Worlds, tmp_path: Path) -> None:
    """``dcp_to_torch_save``, ``load_state_dict`` and a setter, into torch.optim.Muon and AdamW."""
    worlds.get(3).run(__name__, "save_for_one", {"folder": tmp_path}, timeout=60)
    saved = torch.load(tmp_path / "state.pt", weights_only=False)
    dcp_to_torch_save(tmp_path / "own", tmp_path / "file.pt")
    states = torch.load(tmp_path / "file.pt")
    model = small_model()
    optimizers = torchs(model)
    model.load_state_dict(states["model"])
    set_optimizer_state_dict(model, optimizers, states["optimizer"])
    assert_holds(model, optimizers, saved, "one process")
