"""The systems that the benchmarks compare give the same parameters, so that only their cost differs."""

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from test_multiprocess.benchmark_scripts import BENCHMARK, run
from test_multiprocess.world import on_ranks


def trained(
    mesh: DeviceMesh, world_size: int, name: str, steps: int = 3
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters before and after some steps of the system ``name``, whole."""
    sys.path.insert(0, str(BENCHMARK))
    from systems import GPT, SYSTEMS

    torch.manual_seed(0)
    model = GPT(width=24, layers=2, heads=4, context=16)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    setup = SYSTEMS[name](copy.deepcopy(model), mesh)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for _ in range(steps):
        tokens = torch.randint(256, (2, 17), generator=generator)
        setup.model(tokens[:, :-1], tokens[:, 1:]).backward()
        for optimizer in setup.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    after = {
        name.removeprefix("module."): (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in setup.model.named_parameters()
    }
    return before, after


@on_ranks(2)
def test_two_ranks_give_the_same_bits(mesh: DeviceMesh, world_size: int) -> None:
    _, expected = trained(mesh, world_size, "ddp")
    for system in ("mfsdp", "gather-once", "all-to-all", "zero1-owner"):
        _, after = trained(mesh, world_size, system)
        for name, value in expected.items():
            assert torch.equal(after[name], value), f"{system}: {name}"


@on_ranks(4)
def test_more_ranks_give_the_same_up_to_the_order_of_sums(mesh: DeviceMesh, world_size: int) -> None:
    """After one step: bfloat16 Newton-Schulz amplifies what sums of four gradients differ by; stock DTensors, which
    add up partial products in bfloat16 besides, differ by more."""
    before, expected = trained(mesh, world_size, "ddp", steps=1)
    for system in ("mfsdp", "stock", "gather-once", "all-to-all", "zero1-owner"):
        _, after = trained(mesh, world_size, system, steps=1)
        for name, value in expected.items():
            update = value - before[name]
            tolerance = 0.2 if system == "stock" else 0.03
            assert (after[name] - value).norm() <= tolerance * update.norm(), f"{system}: {name}"


def measured(script: str, json_file: Path, *arguments: str) -> tuple[str, Any]:
    """What a script prints, and the numbers that it writes."""
    small = ("--width", "32", "--layers", "1", "--context", "8", "--json", str(json_file))
    return run(script, *small, *arguments), json.loads(json_file.read_text())


def test_every_system_is_measured(tmp_path: Path) -> None:
    text, numbers = measured("training_step.py", tmp_path / "out.json", "--ranks", "2", "--rounds", "2")
    assert text.startswith("GPT of 1 blocks, width 32, 2 x 8 tokens a rank, 2 ranks, loopback, 2 rounds, torch ")
    rows = {row["system"]: row for row in numbers["rows"]}
    assert list(rows) == ["mfsdp", "stock", "gather-once", "all-to-all", "zero1-owner", "ddp", "adamw", "(again)"]
    assert all(len(re.findall(rf"^\| {re.escape(name)} \|", text, re.M)) == 1 for name in rows)
    silent = {name for name, row in rows.items() if row["collectives"] == 0 and row["counted_bytes"] == 0}
    assert silent == {"mfsdp", "ddp", "adamw", "(again)"}
    # six matrices of 32 x 32 elements (one up, one down of four times that), rows of half of them on each rank
    elements = (4 + 4 + 4) * 32 * 32
    assert rows["gather-once"]["counted_bytes"] == elements // 2 * 4
    # bfloat16; half of its rows go away, and so do half of those that it works on for others
    assert rows["all-to-all"]["counted_bytes"] == elements // 2 * 2 * 2
    assert rows["zero1-owner"]["counted_bytes"] == elements * 4


def test_memory_is_measured_beside_its_prediction(tmp_path: Path) -> None:
    systems = ("--systems", "mfsdp", "stock", "ddp")
    text, numbers = measured("memory.py", tmp_path / "out.json", "--ranks", "2", *systems, "--predict", "qwen3-14b")
    assert re.search(r"^\| qwen3-14b, zero1-owner \| 56\.85 GiB \| 57\.78 GiB \|$", text, re.M), text
    rows = numbers["2"]
    assert list(rows) == ["mfsdp", "stock", "ddp"]
    # the planner's picture of FSDP2 lacks the tokens and AdamW's step counters
    assert 0 < rows["stock"]["resident"] - rows["stock"]["predicted"][0] < 512
    assert rows["stock"]["resident"] < rows["ddp"]["resident"]


def test_scaling_is_measured_and_simulated(tmp_path: Path) -> None:
    arguments = ("--ranks", "1", "2", "--rounds", "1", "--model", "llama3-8b", "--simulate", "64", "1024")
    text, numbers = measured("scaling.py", tmp_path / "out.json", *arguments)
    assert [row["ranks"] for row in numbers["measured"]] == [1, 2]
    few, many = numbers["simulated"]
    assert few["step"] >= few["bound"]
    # fewer matrices than ranks: the largest one's step, and some elements of embeddings
    assert many["bound"] <= many["step"] < 1.02 * many["bound"]
    assert re.search(r"^\| 1,024 \| 224 \| 800 \|", text, re.M), text
