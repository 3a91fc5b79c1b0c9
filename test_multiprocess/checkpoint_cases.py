"""What the tests of checkpoints share: one model in every layout, and its whole state, told without a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import mfsdp
from mfsdp.placements import is_owner
from mfsdp.planning import Role, ShardPlan
from test_multiprocess.fsdp_cases import TinyLM, loss_of, whole

MATRIX_OPTIONS: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02},
    "normuon": {"lr": 0.02, "nesterov": False, "second_moment": 0.95},
    "shampoo": {"lr": 0.01},
    "soap": {"lr": 0.01},
}

Trained = tuple[nn.Module, list[Optimizer]]


def small_model() -> nn.Module:
    return TinyLM(width=6, depth=2)


def built(model: nn.Module, kind: str) -> list[Optimizer]:
    """mfsdp's optimizer of a model."""
    matrix = "muon" if kind == "normuon" else kind
    other = {"lr": 3e-3, "betas": (0.8, 0.9)}
    return [mfsdp.optim.build_optimizer(model, matrix, MATRIX_OPTIONS[kind], other)]


def torchs(model: nn.Module) -> list[Optimizer]:
    """torch's Muon for the matrices and its AdamW for everything else."""
    matrices = {name for name, entry in mfsdp.plan(small_model(), 1).entries.items() if entry.role is Role.MATRIX}
    named = list(model.named_parameters())
    return [
        torch.optim.Muon([param for name, param in named if name in matrices], **MATRIX_OPTIONS["muon"]),
        torch.optim.AdamW([param for name, param in named if name not in matrices], lr=3e-3, betas=(0.8, 0.9)),
    ]


def moved(plan: ShardPlan, model: nn.Module, owner: Callable[[int], int]) -> ShardPlan:
    """``plan`` with ``owner(old owner)`` as the owner of everything that has one."""
    entries = {
        name: entry if entry.owner is None else replace(entry, owner=owner(entry.owner))
        for name, entry in plan.entries.items()
    }
    return ShardPlan(entries, plan.world_size, plan.replicas, plan.cost_model).bind(model)


def sharded(model: nn.Module, mesh: DeviceMesh, owner: Callable[[int], int] = lambda owner: owner) -> nn.Module:
    """``model`` under mfsdp."""
    plan = moved(mfsdp.plan(model, mesh), model, owner)
    for layer in model.layers:  # type: ignore[union-attr]
        mfsdp.fully_shard(layer, mesh=mesh, plan=plan)
    mfsdp.fully_shard(model, mesh=mesh, plan=plan)
    return model


def in_layout(layout: str, mesh: DeviceMesh, kind: str, seed: int) -> Trained:
    """The small model and its optimizers, as ``layout`` has them.

    ``mfsdp``, ``rotated`` (other owners), ``hsdp`` (2 x 2 ranks), ``fsdp2`` with torch's optimizers, ``single``
    (nothing is sharded) and ``single-torch`` (that, with torch's optimizers).
    """
    torch.manual_seed(seed)
    model = small_model()
    if layout == "single":
        return model, built(model, kind)
    if layout == "single-torch":
        return model, torchs(model)
    if layout == "fsdp2":
        for layer in model.layers:  # type: ignore[union-attr]
            torch_fsdp.fully_shard(layer, mesh=mesh)
        torch_fsdp.fully_shard(model, mesh=mesh)
        return model, torchs(model)
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ranks = mesh.size(-1)
    owner = (lambda owner: (owner + 1) % ranks) if layout == "rotated" else (lambda owner: owner)
    sharded(model, mesh, owner)
    return model, built(model, kind)


def train(model: nn.Module, optimizers: Sequence[Optimizer], steps: Sequence[int]) -> None:
    """Step on batches that differ from rank to rank; a model that is not sharded sees those of rank 0."""
    for step in steps:
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def whole_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Every value, whole, on every rank: parameters, states and options by parameter, all by name."""
    for module in model.modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.reshard()
    names = {param: name for name, param in model.named_parameters()}
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                states[names[param]] = {
                    entry: whole(value).clone() if isinstance(value, Tensor) else value
                    for entry, value in optimizer.state.get(param, {}).items()
                }
                options[names[param]] = {
                    option: value for option, value in group.items() if option not in ("params", "param_names")
                }
    return {
        "model": {name: whole(param).clone() for name, param in model.named_parameters()},
        "states": states,
        "options": options,
    }


def assert_holds(model: nn.Module, optimizers: Sequence[Optimizer], saved: dict[str, Any], label: str) -> None:
    """This rank's part of each value is equal to the bit, dtypes and shapes included; of options, those of both."""
    params = dict(model.named_parameters())
    assert params.keys() == saved["model"].keys(), label
    names = {param: name for name, param in params.items()}
    for name, param in params.items():
        assert_part(param, saved["model"][name], f"{label}: {name}")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for param in group["params"]:
                name, state = names.pop(param), optimizer.state.get(param, {})
                assert state.keys() == saved["states"][name].keys(), f"{label}: {name}"
                for entry, expected in saved["states"][name].items():
                    assert_part(state[entry], expected, f"{label}: {name}.{entry}")
                theirs = saved["options"][name]
                for option in group.keys() & theirs.keys():
                    assert as_tuples(group[option]) == as_tuples(theirs[option]), f"{label}: {option} of {name}"
    assert not names or not optimizers, f"{label}: {names.values()}"


def as_tuples(option: Any) -> Any:
    """Lists as tuples: torch's broadcast of state dicts makes the one of the other."""
    return tuple(map(as_tuples, option)) if isinstance(option, (list, tuple)) else option


def assert_part(value: Any, whole: Any, label: str) -> None:
    """``value`` is this rank's part of ``whole``."""
    if isinstance(value, DTensor):
        assert value.shape == whole.shape, label
        whole = part_of(value, whole)
        value = value.to_local()
    assert_identical(value, whole, label)


def part_of(tensor: DTensor, whole: Tensor) -> Tensor:
    """What this rank should hold of ``whole``, sharded as ``tensor`` is."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    for place, ranks, placement in zip(coordinate, tensor.device_mesh.shape, tensor.placements, strict=True):
        if is_owner(placement):
            whole = whole if place == placement.owner else whole.new_empty((0, *whole.shape[1:]))
        elif isinstance(placement, Shard):
            pieces = whole.chunk(ranks, placement.dim)
            whole = pieces[place] if place < len(pieces) else whole.narrow(placement.dim, 0, 0)
    return whole


def assert_identical(one: Any, other: Any, label: str) -> None:
    if isinstance(one, Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), label
        assert torch.equal(one, other), label
    else:
        assert one == other, label


def assert_written_once(path: Path) -> None:
    """Every element of every tensor lies in the files of the checkpoint ``path`` once, and hardly anything else."""
    metadata = FileSystemReader(path).read_metadata()
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            assert sum(prod(chunk.sizes) for chunk in entry.chunks) == prod(entry.size), key
    # two names of a tied tensor lead to one place
    places = {(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()}
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    assert size == sum(length for _, _, length in places)


def on_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``worlds.get(size).run`` call ``function`` on every rank."""
    function.on_rank = function  # type: ignore[attr-defined]
    return function


def is_first() -> bool:
    return dist.get_rank() == 0
