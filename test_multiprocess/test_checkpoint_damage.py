"""A checkpoint with any of its files cut, changed or gone is refused, on every rank, before anything is changed."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

import mfsdp
from mfsdp.checkpoint import DamagedCheckpointError
from mfsdp.dtensor import local_tensor
from test_multiprocess.checkpoint_cases import in_layout, is_first, train
from test_multiprocess.world import on_ranks

Damaging = Callable[[bytes], bytes | None]
"""The bytes of a file -> those after the damage, or None if the file is gone."""


def cut(size: Callable[[int], int]) -> Damaging:
    return lambda data: data[: size(len(data))]


def flip(position: Callable[[int], int]) -> Damaging:
    def flipped(data: bytes) -> bytes:
        where = position(len(data))
        return data[:where] + bytes([data[where] ^ 0x10]) + data[where + 1 :]

    return flipped


def damagings() -> Iterator[tuple[str, Damaging]]:
    """Each kind of damage, where it may do most harm and at places that are random but fixed."""
    yield "deleted", lambda data: None
    yield "emptied", cut(lambda size: 0)
    yield "cut in half", cut(lambda size: size // 2)
    yield "cut by a byte", cut(lambda size: size - 1)
    yield "longer by a byte", lambda data: data + b"\0"
    yield "first byte flipped", flip(lambda size: 0)
    yield "last byte flipped", flip(lambda size: size - 1)
    for number in range(3):
        place = random.Random(number).random()
        yield f"byte at {place:.2f} flipped", flip(lambda size, place=place: int(size * place))


def snapshot(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """All that a load could change of what this rank has, and where it lies."""

    def told(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        local = local_tensor(value)
        return id(value), local.data_ptr(), value.dtype, value.shape, local.detach().clone().tolist()

    return {
        "model": {name: told(value) for name, value in [*model.named_parameters(), *model.named_buffers()]},
        "gradients": [parameter.grad for parameter in model.parameters()],
        "states": [
            {name: told(value) for name, value in optimizer.state[parameter].items()}
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ],
        "groups": [
            {option: value for option, value in group.items() if option != "params"}
            for optimizer in optimizers
            for group in optimizer.param_groups
        ],
        "generator": torch.get_rng_state().tolist(),
    }


def put(file: Path, data: bytes | None) -> None:
    """Give a file these bytes, on one rank, before any rank goes on."""
    dist.barrier()
    if is_first():
        file.unlink(missing_ok=True)
        if data is not None:
            file.write_bytes(data)
    dist.barrier()


@on_ranks(1, 3)
def test_any_damage_to_any_file_is_refused_whole(mesh: DeviceMesh, world_size: int, tmp_path: Path) -> None:
    saved, saving = in_layout("mfsdp", mesh, "muon", seed=0)
    train(saved, saving, range(2))
    folder = mfsdp.checkpoint.save(tmp_path / "step-2", saved, saving, extra={"step": 2})
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=1)
    train(model, optimizers, range(1))
    before = snapshot(model, optimizers)
    names_of = {f"__{rank}_0.distcp": set[str]() for rank in range(world_size)}
    for name, entry in mfsdp.plan(saved, mesh).entries.items():
        if entry.owner is not None:
            names_of[f"__{entry.owner}_0.distcp"].add(f"model.{name}")

    files = sorted(folder.iterdir())
    assert {file.name for file in files} == {*names_of, ".metadata", "manifest.json", "plan.json"}
    for file in files:
        whole = file.read_bytes()
        for label, damaging in damagings():
            put(file, damaging(whole))
            with pytest.raises(DamagedCheckpointError) as raised:
                mfsdp.checkpoint.load(folder, model, optimizers)
            assert f"\n  {file.name} " in str(raised.value), label
            (damage,) = raised.value.damages
            assert damage.file == file.name, label
            for name in names_of.get(file.name, ()):
                assert name in damage.names, label
                assert name in str(raised.value), label
            assert snapshot(model, optimizers) == before, f"{file.name} {label}"
        put(file, whole)

    assert mfsdp.checkpoint.load(folder, model, optimizers) == {"step": 2}
    assert snapshot(model, optimizers) != before


@on_ranks(2)
def test_all_damaged_files_are_named_at_once(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, _ = in_layout("mfsdp", mesh, "muon", seed=0)
    folder = mfsdp.checkpoint.save(tmp_path / "step-0", model)
    put(folder / "__0_0.distcp", None)
    put(folder / "__1_0.distcp", b"short")
    put(folder / "plan.json", b"")
    with pytest.raises(DamagedCheckpointError, match="is damaged: 3 files are not what was saved") as raised:
        mfsdp.checkpoint.load(folder, model)
    assert [damage.file for damage in raised.value.damages] == ["__0_0.distcp", "__1_0.distcp", "plan.json"]
