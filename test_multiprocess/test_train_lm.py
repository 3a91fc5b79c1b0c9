"""The training example, in a tiny size: the loss falls, and the same numbers come out however it is sharded."""

import argparse
import io
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from test_multiprocess.checkpoint_cases import on_rank
from test_multiprocess.world import Worlds, on_ranks

EXAMPLES = str(Path(__file__).parent.parent / "examples")
sys.path.insert(0, EXAMPLES)  # its modules import each other, as those of any script do

import arguments  # noqa: E402
import setups  # noqa: E402
import train_lm  # noqa: E402

TINY = [
    *("--steps", "20", "--width", "24", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "12"),
    *("--report-every", "10", "--data", str(Path(EXAMPLES).parent / "LICENSE")),  # a text that does not change
]


def with_unmodified_torch_optimizers(model: setups.GPT, mesh: DeviceMesh, args: argparse.Namespace) -> setups.Setup:
    """Sharded by mfsdp; stepped by torch.optim.Muon and torch.optim.AdamW, which know nothing of it."""
    matrices = setups.matrix_names(model, mesh)
    setup = setups.with_mfsdp(model, mesh, args)
    return setups.Setup(model, setups.torch_optimizers(model, matrices, args), setup.plan)


SLOWLY = ("--lr", "0.001", "--other-lr", "0.001")
"""Learning rates at which the rounding of sums over ranks stays small."""

LIKE_TORCH = ("--ns-dtype", "bf16")
"""The numbers of torch.optim.Muon, whatever this processor does best."""

setups.SETUPS["unmodified"] = with_unmodified_torch_optimizers


def trained(mesh: DeviceMesh, baseline: str, *options: str) -> tuple[train_lm.Trainer, str]:
    """A trainer after its run, and what it printed on this rank."""
    args = arguments.parse([*TINY, *options], ranks=mesh.size())
    args.baseline = baseline  # "unmodified" is no choice on the command line
    printed = io.StringIO()
    with redirect_stdout(printed):
        trainer = train_lm.Trainer(args, mesh)
        trainer.run()
    return trainer, printed.getvalue()


def full_parameters(trainer: train_lm.Trainer) -> dict[str, torch.Tensor]:
    """Every parameter in full, by name; as the optimizers have them, who see sharded ones only."""
    named = {name.removeprefix("module."): param for name, param in trainer.setup.model.named_parameters()}
    return {
        name: param.full_tensor() if isinstance(param, DTensor) else param.detach() for name, param in named.items()
    }


@pytest.mark.parametrize("baseline", ["mfsdp", "fsdp2", "ddp"])
@on_ranks(2)
def test_trains_and_reports(mesh: DeviceMesh, baseline: str) -> None:
    trainer, printed = trained(mesh, baseline)
    result = trainer.result
    assert len(result.train_losses) == 20
    assert math.isclose(result.validation_losses[0], math.log(256), abs_tol=0.1)
    assert result.validation_losses[-1] < result.validation_losses[0] - 1
    assert result.steps_counted == 2
    assert (result.comm.collectives == 0) == (baseline != "fsdp2"), result.comm
    if dist.get_rank() == 0:
        lines = printed.splitlines()
        progress = lines[next(i for i, line in enumerate(lines) if line.startswith(" step")) + 1 :]
        assert [line.split()[0] for line in progress[:3]] == ["0", "10", "20"]
        assert lines[-1].startswith("collectives in the 2 counted optimizer steps, over all ranks: ")
        assert ("ShardPlan for 2 ranks" in printed) == (baseline == "mfsdp")
    else:
        assert printed == ""


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@on_ranks(2, 3)
def test_each_rank_holds_what_the_plan_says(mesh: DeviceMesh, world_size: int, optimizer: str) -> None:
    trainer, _ = trained(mesh, "mfsdp", "--optimizer", optimizer)
    plan = trainer.setup.plan
    assert plan is not None
    assert trainer.resident_bytes() == plan.loads()[dist.get_rank()].resident_bytes
    held = torch.tensor(trainer.resident_bytes())
    dist.all_reduce(held)
    whole, _ = trained(mesh, "ddp", "--optimizer", optimizer)
    assert held.item() == whole.resident_bytes()


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
@pytest.mark.parametrize("baseline", ["mfsdp", "unmodified"])
@on_ranks(2)
def test_two_ranks_are_bit_equal_to_ddp(mesh: DeviceMesh, baseline: str, optimizer: str) -> None:
    options = ("--optimizer", optimizer, *(LIKE_TORCH if optimizer == "muon" else ()))
    sharded, _ = trained(mesh, baseline, *options)
    whole, _ = trained(mesh, "ddp", *options)
    assert (sharded.result.comm.collectives, sharded.result.comm.bytes) == (0, 0), sharded.result.comm
    assert sharded.result.train_losses == whole.result.train_losses
    expected = full_parameters(whole)
    found = full_parameters(sharded)
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("baseline", ["mfsdp", "unmodified"])
@on_ranks(3, 4)
def test_more_ranks_agree_with_ddp(mesh: DeviceMesh, world_size: int, baseline: str) -> None:
    # The sums of three or more gradients are rounded differently, which Newton-Schulz in bf16 amplifies: at
    # ten times these learning rates FSDP2 and mfsdp alike are 1e-5 from DDP after 20 steps.
    sharded, _ = trained(mesh, baseline, *SLOWLY, *LIKE_TORCH)
    whole, _ = trained(mesh, "ddp", *SLOWLY, *LIKE_TORCH)
    assert (sharded.result.comm.collectives, sharded.result.comm.bytes) == (0, 0), sharded.result.comm
    for found, expected in zip(sharded.result.train_losses, whole.result.train_losses, strict=True):
        assert math.isclose(found, expected, rel_tol=1e-6)


@pytest.mark.parametrize("optimizer", ["shampoo", "soap"])
@on_ranks(2)
def test_other_matrix_optimizers_train(mesh: DeviceMesh, optimizer: str) -> None:
    trainer, _ = trained(mesh, "mfsdp", "--optimizer", optimizer, "--lr", "0.003")
    assert trainer.setup.plan is not None
    assert trainer.resident_bytes() == trainer.setup.plan.loads()[dist.get_rank()].resident_bytes
    assert trainer.result.comm.collectives == 0
    assert trainer.result.validation_losses[-1] < trainer.result.validation_losses[0] - 0.5
    with pytest.raises(ValueError, match="shampoo and soap are mfsdp's"):
        trained(mesh, "ddp", "--optimizer", optimizer)


@on_ranks(2)
def test_steps_in_backward_change_no_number(mesh: DeviceMesh) -> None:
    overlapped, _ = trained(mesh, "mfsdp", "--overlap")
    ordinary, _ = trained(mesh, "mfsdp")
    assert overlapped.result.train_losses == ordinary.result.train_losses
    assert overlapped.resident_bytes() < ordinary.resident_bytes()  # gradients are gone


@pytest.mark.parametrize("slow", [True, False])
@on_ranks(2)
def test_newton_schulz_computes_in_what_the_processor_is_quick_at(mesh: DeviceMesh, slow: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": not slow, "avx_ne_convert": False})
        chosen, printed = trained(mesh, "mfsdp", "--steps", "1")
        asked, unremarked = trained(mesh, "mfsdp", "--steps", "1", "--ns-dtype", "bf16")
    assert chosen.setup.optimizers[0].param_groups[0]["ns_dtype"] == ("float32" if slow else "bfloat16")
    assert asked.setup.optimizers[0].param_groups[0]["ns_dtype"] == "bfloat16"
    assert ("Muon iterates in fp32: bf16 is slow" in printed) == (slow and dist.get_rank() == 0)
    assert "Muon iterates" not in unremarked


@on_ranks(2)
def test_bf16_trains(mesh: DeviceMesh) -> None:
    for baseline in ("mfsdp", "ddp"):
        trainer, _ = trained(mesh, baseline, "--dtype", "bf16")
        assert trainer.result.validation_losses[-1] < trainer.result.validation_losses[0] - 1
        groups = [group for optimizer in trainer.setup.optimizers for group in optimizer.param_groups]
        assert {param.dtype for group in groups for param in group["params"]} == {torch.float32}


@pytest.mark.parametrize("baseline", ["mfsdp", "fsdp2", "ddp"])
@on_ranks(2)
def test_a_resumed_run_is_bit_equal(mesh: DeviceMesh, baseline: str, tmp_path: Path) -> None:
    options = ("--checkpoint", str(tmp_path), "--save-every", "6", "--keep", "2")
    unbroken, _ = trained(mesh, baseline, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-18", "step-20"]
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "step-20" / ".metadata").unlink()  # no longer complete
    dist.barrier()
    resumed, printed = trained(mesh, baseline, *options, "--resume")
    assert resumed.result.train_losses == unbroken.result.train_losses[18:]
    expected = full_parameters(unbroken)
    for name, parameter in full_parameters(resumed).items():
        assert torch.equal(parameter, expected[name]), name
    if dist.get_rank() == 0:
        assert "\ngoing on after step 18\n" in printed
        assert [line.split()[0] for line in printed.splitlines() if line.lstrip()[:2] in ("18", "20")] == ["18", "20"]
    for wrong in (("--batch", "24"), ("--seed", "1"), ("--other-lr", "0.1")):
        with pytest.raises(ValueError, match=f"is of a run with {wrong[0]} .*; --resume goes on with the same"):
            trained(mesh, baseline, *options, "--resume", *wrong)
    dist.barrier()
    beyond, _ = trained(mesh, baseline, *options, "--resume")  # from step 20, which is there again
    assert beyond.result.train_losses == []


@on_ranks(2)
def test_without_a_checkpoint_a_resumed_run_starts_anew(mesh: DeviceMesh, tmp_path: Path) -> None:
    resumed, printed = trained(mesh, "mfsdp", "--checkpoint", str(tmp_path / "none"), "--resume")
    assert len(resumed.result.train_losses) == 20
    assert not (tmp_path / "none").exists()
    assert (dist.get_rank() == 1) or f"no checkpoint in {tmp_path / 'none'}: from the start" in printed


@on_rank
def resumes_on(mesh: DeviceMesh, folder: Path, losses: list[float]) -> None:
    """Resume after step 18 what was trained on two ranks, without saving."""
    resumed, _ = trained(mesh, "mfsdp", *SLOWLY, "--checkpoint", str(folder), "--resume")
    assert len(resumed.result.train_losses) == 2
    for found, expected in zip(resumed.result.train_losses, losses[18:], strict=True):
        assert math.isclose(found, expected, rel_tol=1e-5), (found, expected)


@on_rank
def saves(mesh: DeviceMesh, folder: Path) -> list[float]:
    """Train on these ranks; the losses."""
    trainer, _ = trained(mesh, "mfsdp", *SLOWLY, "--checkpoint", str(folder), "--save-every", "18", "--keep", "2")
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-20")
    return trainer.result.train_losses


def test_resumes_on_another_number_of_ranks(worlds: Worlds, tmp_path: Path) -> None:
    losses = worlds.get(2).run(__name__, "saves", {"folder": tmp_path}, timeout=60)[0]
    for ranks in (1, 3, 4):
        worlds.get(ranks).run(__name__, "resumes_on", {"folder": tmp_path, "losses": losses}, timeout=60)


def test_from_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be, " * 200)
    checkpoints = ("--checkpoint", str(tmp_path / "run"))
    command = [sys.executable, f"{EXAMPLES}/train_lm.py", *TINY, "--data", str(text), *checkpoints]
    alone = subprocess.run([*command, "--save-every", "15"], capture_output=True, text=True, timeout=120)
    assert alone.returncode == 0, alone.stderr
    assert "ShardPlan for 1 rank" in alone.stdout
    assert alone.stdout.rstrip().endswith("0, with 0 bytes")

    (data,) = (tmp_path / "run" / "step-20").glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[-1] ^= 1
    data.write_bytes(damaged)
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 2
    assert f"train_lm: the checkpoint {tmp_path / 'run' / 'step-20'} is damaged" in again.stdout
    assert "model.blocks.0.up.weight" in again.stdout

    missing = subprocess.run([*command, "--data", "nowhere"], capture_output=True, text=True, timeout=120)
    assert missing.returncode == 2
    assert missing.stderr == "train_lm: --data nowhere: there is no such file or folder.\n"


def test_bad_arguments(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for wrong, message in {
        "--report-every 0": "--report-every must be at least 1, but is 0.",
        "--batch 25": "--batch 25 must be a multiple of the number of ranks, 2.",
        "--heads 5": "--width 192 must be a multiple of --heads 5.",
        "--baseline ddp --overlap": "--overlap and --optimizer shampoo and soap are mfsdp's; "
        "the baselines are torch's own.",
        "--stepz 3": "unrecognized arguments: --stepz 3",
        "--optimizer soap --ns-dtype fp32": "--ns-dtype is an option of --optimizer muon; soap has no such iterations.",
        "--baseline ddp --ns-dtype fp32": "--ns-dtype fp32 is for --baseline mfsdp: torch.optim.Muon iterates in bf16.",
        "--resume": "--save-every and --resume need --checkpoint DIR, the folder of the run's checkpoints.",
        "--save-every 5": "--save-every and --resume need --checkpoint DIR, the folder of the run's checkpoints.",
        "--checkpoint here --save-every 0": "--save-every must be at least 1, but is 0.",
        "--checkpoint here --keep 2": "--keep needs --save-every N: without it nothing is saved.",
    }.items():
        with pytest.raises(SystemExit) as ended:
            arguments.parse(wrong.split(), ranks=2)
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"train_lm: {message}\n"
    assert tuple(name for name in setups.SETUPS if name != "unmodified") == arguments.BASELINES
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="too few"):
        train_lm.load(str(tmp_path), 128)


def test_split_is_by_file_and_deterministic(tmp_path: Path) -> None:
    for index in range(60):
        (tmp_path / f"{index}.txt").write_bytes(bytes([index]) * 50)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "skipped.txt").write_bytes(bytes([200]) * 500)
    first, second = train_lm.load(str(tmp_path), 16), train_lm.load(str(tmp_path), 16)
    assert torch.equal(first.train, second.train)
    train, validation = set(first.train.tolist()), set(first.validation.tolist())
    assert train | validation == set(range(60))
    assert not train & validation


def with_aot_eager(compile: Callable[..., None]) -> Callable[..., None]:
    """``nn.Module.compile`` by the backend that generates no code, which is much the quickest."""
    return lambda module, **options: compile(module, backend="aot_eager", **options)


@on_ranks(2, timeout=240)
def test_a_compiled_model_learns_the_same(mesh: DeviceMesh) -> None:
    losses = {}
    for how in ("none", "block", "graph"):
        torch._dynamo.reset()
        options = ("--steps", "3", "--report-every", "3", "--layers", "1", "--width", "8", "--compile", how)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "compile", with_aot_eager(torch.nn.Module.compile))
            trainer, _ = trained(mesh, "mfsdp", *options)
        losses[how] = trainer.result.train_losses
    assert losses["block"] == pytest.approx(losses["none"], rel=1e-4)
    assert losses["graph"] == pytest.approx(losses["none"], rel=1e-4)


def test_one_graph_is_for_graph_style() -> None:
    for options in (("--baseline", "fsdp2"), ("--overlap",)):
        with pytest.raises(SystemExit):
            arguments.parse([*TINY, "--compile", "graph", *options])
