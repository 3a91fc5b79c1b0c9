"""The benchmark scripts of the optimizers run, and say what they measured."""

from pathlib import Path

from test_multiprocess.benchmark_scripts import TINY, report, run
from test_multiprocess.world import Worlds


def test_variants_of_the_step_are_timed_compiled_too(tmp_path: Path) -> None:
    arguments = ("--shapes", "tiny", "--rounds", "2", "--threads", "1", "--compile")
    text, (table,) = report("optimizer_step.py", tmp_path, *arguments)
    assert "- measured: 6 matrices, tiny, fp32, cpu, 1 threads, 2 rounds after 3 to warm up;" in text
    assert [row["name"] for row in table["rows"]] == [
        "torch.optim.Muon",
        "mfsdp, one by one",
        "mfsdp, batched",
        "mfsdp, compiled",
        "torch.optim.Muon (again)",
        "torch's products",
        "plain products",
    ]
    assert all(len(row["times"]) == 2 for row in table["rows"])


def test_without_a_gpu_the_step_on_it_says_so() -> None:
    assert run("optimizer_step.py", "--device", "cuda") == "no GPU here: nothing was measured\n"


def test_layouts_of_tails_are_timed(tmp_path: Path) -> None:
    _, (table,) = report("tails.py", tmp_path, "--tails", "3", "--elements", "5", "--rounds", "2")
    names = ["fused", "one by one", "foreach", "flat, with its copies", "flat", "fused (again)"]
    assert [row["name"] for row in table["rows"]] == names
    assert all(row["least"] == min(row["times"]) > 0 for row in table["rows"])


def test_owned_and_plain_steps_are_timed_and_nothing_is_sent(worlds: Worlds, tmp_path: Path) -> None:
    arguments = ("--ranks", "2", "--matrices", "4", "--width", "8", "--rounds", "2")
    text, (table,) = report("owned_step.py", tmp_path, *arguments, worlds=worlds)
    assert [row["which"] for row in table["rows"]] == ["median rank", "worst rank"]
    assert "\n- collectives in an owned step, over all ranks: 0\n" in text


def test_owner_placements_are_timed_against_none(tmp_path: Path) -> None:
    _, tables = report("dispatch.py", tmp_path, "--ranks", "2", "--rounds", "1", "--sizes", "8")
    names = [[row["name"] for row in table["rows"]] for table in tables]
    assert names == [
        ["owned DTensors", "plain tensors", "plain tensors (again)"],
        ["skipped ops", "ops on ordinary DTensors", "ops on ordinary DTensors (again)"],
        ["mfsdp imported", "not imported", "not imported (again)"],
    ]
    assert all(table["rows"][1]["ratio"] == 1 for table in tables)


def test_steps_in_backward_hold_the_gradients_of_a_unit_at_a_time(worlds: Worlds, tmp_path: Path) -> None:
    _, (table,) = report("overlap.py", tmp_path, "--ranks", "2", "--rounds", "1", *TINY, "--layers", "6", worlds=worlds)
    after, during, again = table["rows"]
    assert (after["way"], during["way"]) == ("step after backward", "steps in backward")
    assert during["peak"] < after["peak"] / 2
    assert again["peak"] == after["peak"]
