"""Checkpoints of one process, with and without a process group, and without NumPy."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import mfsdp
from mfsdp.checkpoint import AsyncCheckpointerType, async_save, load, save


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    optimizer = mfsdp.optim.build_optimizer(model)
    for _ in range(steps):
        model(torch.randn(3, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def assert_equal(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_equal(one[key], other[key], f"{path}.{key}")
    else:
        assert one == other, path


@pytest.mark.parametrize("kind", [None, *AsyncCheckpointerType])
def test_one_process(tmp_path: Path, kind: AsyncCheckpointerType | None) -> None:
    model, optimizer = trained(1)
    if kind is None:
        path = save(tmp_path / "one", model, optimizer, extra=[1, "two"])
    else:
        path = async_save(tmp_path / "one", model, optimizer, extra=[1, "two"], async_checkpointer_type=kind).result()
    other, its_optimizer = trained(2, steps=0)
    drawn = torch.rand(3)
    assert load(path, other, its_optimizer) == [1, "two"]
    assert not torch.equal(torch.rand(3), drawn)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())


def test_torch_save_and_back(tmp_path: Path) -> None:
    """By torch's own converters and setters."""
    model, optimizer = trained(1)
    dcp_to_torch_save(save(tmp_path / "own", model, optimizer), tmp_path / "file.pt")
    saved = torch.load(tmp_path / "file.pt")
    other, its_optimizer = trained(2, steps=0)
    other.load_state_dict(saved["model"])
    set_optimizer_state_dict(other, its_optimizer, saved["optimizer"])
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())

    states = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    torch.save(states, tmp_path / "other.pt")
    torch_save_to_dcp(tmp_path / "other.pt", tmp_path / "dcp")
    other, its_optimizer = trained(2)
    load(tmp_path / "dcp", other, its_optimizer)
    assert_equal(other.state_dict(), model.state_dict())
    assert_equal(its_optimizer.state_dict(), optimizer.state_dict())


def test_wrapped_models(tmp_path: Path) -> None:
    """Names are those of the unwrapped model."""
    model, optimizer = trained(1)
    compiled, its_optimizer = trained(2)
    compiled = torch.compile(compiled)  # type: ignore[assignment]
    load(save(tmp_path / "plain", model, optimizer), compiled, its_optimizer)
    again, last_optimizer = trained(3)
    load(save(tmp_path / "compiled", compiled, its_optimizer), again, last_optimizer)
    assert_equal(again.state_dict(), model.state_dict())
    assert_equal(last_optimizer.state_dict(), optimizer.state_dict())


def test_tensors_are_stored_by_themselves(tmp_path: Path) -> None:
    """Not with what lies around them, nor in gaps, and in any order of dimensions; large ones are read in place."""
    whole = torch.randn(4, 300, 100)
    model = nn.ParameterDict(
        {"view": whole[1], "strided": whole[:, :, ::2], "transposed": whole[2].T, "scalar": whole[0, 0, 0]}
    )
    path = save(tmp_path / "views", model)
    nbytes = sum(param.nbytes for param in model.values())
    written = sum(each.stat().st_size for each in path.iterdir())
    assert nbytes < written < nbytes + 30_000
    other = nn.ParameterDict(
        {"view": torch.empty(100, 300).T, "strided": torch.empty(4, 300, 50), "transposed": torch.empty(100, 300)}
    )
    other["scalar"] = nn.Parameter(torch.tensor(0.0))
    load(path, other)
    assert_equal(dict(other), dict(model))
    double = nn.ParameterDict({name: param.detach().double() for name, param in model.items()})
    load(path, double)
    assert_equal(dict(double), {name: param.double() for name, param in model.items()})


PROGRAM = """
import sys
sys.modules["numpy"] = None  # as where it is not installed
import torch
import torch.distributed as dist
from pathlib import Path
from mfsdp.checkpoint import AsyncCheckpointerType, async_save, load, save
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(200, 200)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(200)).sum().backward()
optimizer.step()
for path in [
    save(Path(sys.argv[1]) / "one", model, optimizer),
    async_save(Path(sys.argv[1]) / "two", model, optimizer).result(),
    async_save(
        Path(sys.argv[1]) / "three", model, optimizer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    ).result(),
]:
    load(path, model, optimizer)
try:
    torch.ones(1).numpy()
except RuntimeError:
    print("saved and loaded without numpy")
dist.destroy_process_group()
"""


def test_without_numpy(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=120)
    assert result.stdout == "saved and loaded without numpy\n", result.stderr
