"""What benchmarks print and write, and what they say without matplotlib."""

import argparse
import json
import sys
from pathlib import Path

import pytest
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
    "report.py",
    "systems.py",
    "timing.py",
}
"""Modules that benchmarks share."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that does not change."""
    machine = Machine("A CPU", 2, 3 * 2**30, 0.25, None, {"Python": "3.11.0", "torch": "2.13.0", "mfsdp": "0.1.0"})
    monkeypatch.setattr(Machine, "here", lambda: machine)
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
- machine: A CPU, 2 cores, 3 GiB of memory; load average at the start 0.2
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
    assert "".join(order) == "baabba"
    assert all(len(taken) == 2 for taken in times.values())


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
