"""What benchmarks print and write, and what they say without matplotlib."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from expecttest import assert_expected_inline

from test_multiprocess.benchmark_scripts import BENCHMARK

sys.path.insert(0, str(BENCHMARK))
import chart
import report
import timing
from machine import Machine
from report import Column, Report, Table

NO_BENCHMARKS = {
    "allocations.py",
    "chart.py",
    "comparison.py",
    "emulated_nodes.py",
    "launching.py",
    "machine.py",
    "options.py",
    "report.py",
    "systems.py",
    "timing.py",
}
"""Modules that benchmarks share."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that does not change."""
    machine = Machine(
        "A CPU", 2, 3 * 2**30, 0.25, "1", 1, None, {"Python": "3.11.0", "torch": "2.13.0", "mfsdp": "0.1.0"}
    )
    monkeypatch.setattr(Machine, "here", lambda threads: machine)
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK / "tails.py"), "--rounds", "3"])
    return tmp_path / "results" / "found"


def made(stem: Path | None, no_plot: bool = False) -> Report:
    args = argparse.Namespace(output=stem, no_plot=no_plot)
    found = Report(args, "Steps", "3 rounds", "the cache.")
    rows = [{"name": "ours", "times": [0.001, 0.0015, 0.002]}, {"name": "theirs", "times": [12.0], "more": 1}]
    columns = [Column("name", ""), Column("times", "step", timing.milliseconds), Column("more", "more")]
    bars = chart.Bars("a step", "ms", {"ours": 1.5, "theirs": 12000.0}, log=True, errors={"ours": 0.5})
    lines = chart.Lines("more", "x", "ranks", [1, 2], {"ours": [1.0, None]}, log_axis=True)
    found.add(Table("On 2 ranks", columns, rows, ["noise: none."], [bars, lines]))
    return found


def test_markdown_is_printed_and_written_with_all_that_figures_depend_on(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(here)
    printed = capsys.readouterr().out
    assert here.with_suffix(".md").read_text() == printed
    assert here.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert_expected_inline(
        printed,
        """\
# Steps

    python examples/benchmark/tails.py --rounds 3

- measured: 3 rounds
- machine: A CPU, 2 cores, 3 GiB of memory; load average at the start 0.2; OMP_NUM_THREADS 1, 1 thread of torch in a process
- versions: Python 3.11.0, torch 2.13.0, mfsdp 0.1.0
- limits: the cache.

## On 2 ranks

|  | step | more |
|---|---:|---:|
| ours | 1.50 ms ± 33% |  |
| theirs | 12,000 ms ± 0% | 1 |

- noise: none.
""",
    )


def test_json_holds_every_number(here: Path) -> None:
    made(here, no_plot=True)
    written = json.loads(here.with_suffix(".json").read_text())
    assert written["tables"][0]["rows"][0]["times"] == [0.001, 0.0015, 0.002]
    assert written["machine"]["versions"]["torch"] == "2.13.0"
    assert not here.with_suffix(".png").exists()


def test_without_matplotlib_a_plot_is_refused_in_one_line(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "can_draw", lambda: False)
    with pytest.raises(SystemExit) as caught:
        made(here)
    assert str(caught.value) == "plots need matplotlib (pip install 'mfsdp[plots]'); --no-plot does without."
    made(here, no_plot=True)
    made(None)


def test_spread_and_noise() -> None:
    assert timing.spread([1.0]) == 0
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(0.5)
    assert timing.noise("it", [2.0, 2.0, 9.0], [1.9, 1.9, 1.9]) == "noise: two runs of it differ by 5.0%."


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in ("a", "b")}
    times = timing.in_turns(calls, rounds=2, warm_up=1)
    assert timing.in_order({"a": 0, "b": 0, "c": 0}, 1) == timing.in_order("cba", 2) == ["a", "b", "c"]
    assert "".join(order) == "baabba"
    assert all(len(taken) == 2 for taken in times.values())


def test_the_machine_says_how_many_threads_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert str(Machine.here()).endswith("; OMP_NUM_THREADS 7, 3 threads of torch in a process")
    assert str(Machine.here(1)).endswith("; OMP_NUM_THREADS 7, 1 thread of torch in a process")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "; OMP_NUM_THREADS not set, " in str(Machine.here())


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (
            "end_to_end.py",
            ["--shapes", "4y64"],
            "argument --shapes: '4y64' is not BATCHxCONTEXT, such as 4x256 for 4 sequences of 256 tokens",
        ),
        ("memory.py", ["--ranks", "--predict"], "neither --ranks to measure nor models to --predict"),
        ("scaling.py", ["--ranks", "--simulate"], "neither --ranks to measure nor ranks to --simulate"),
        ("training_step.py", ["--rounds", "0"], "argument --rounds: '0' is not a whole number from 1 on"),
        ("training_step.py", ["--width", "30"], "argument --width: 30 is not a multiple of the number of heads, 8"),
        ("planner.py", ["time", "--largest", "9"], "argument --largest: '9' is not a whole number from 1000 on"),
        ("gathers.py", ["--rate", "fast"], "argument --rate: 'fast' is not a rate such as 1gbit, 200mbit or 500kbit"),
        ("runtime.py", ["--alone", "mfsdp"], "unrecognized arguments: --alone mfsdp"),
        ("graph.py", ["--width", "32", "--heads", "3"], "--width 32 is not a multiple of --heads 3"),
        (
            "owned_step.py",
            ["--ranks", "4", "--matrices", "3"],
            "every rank needs a matrix, but --matrices 3 are fewer than --ranks 4",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(
    script: str,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = importlib.import_module(Path(script).stem)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as caught:
        module.main()
    assert caught.value.code == 2
    printed, errors = capsys.readouterr()
    assert printed == ""
    assert errors.splitlines()[-1] == f"{script}: error: {message}"


def test_every_benchmark_is_tested_and_explained() -> None:
    scripts = {file.name for file in BENCHMARK.glob("*.py")}
    assert scripts >= NO_BENCHMARKS
    here = Path(__file__).parent
    tests = [here / "test_benchmark_training.py", here.parent / "tests" / "test_plan_benchmark.py"]
    tests += here.glob("test_*_benchmark.py")
    tests += here.glob("test_benchmark_*.py")
    texts = "".join(file.read_text() for file in tests)
    explained = (BENCHMARK / "README.md").read_text()
    for script in sorted(scripts - NO_BENCHMARKS):
        assert f'"{script}"' in texts, f"no test runs {script}"
        assert f"examples/benchmark/{script}" in explained, f"README.md does not explain {script}"
