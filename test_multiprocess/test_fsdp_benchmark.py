"""The benchmark scripts of the runtime run, and say what they measured."""

from pathlib import Path
from typing import Any

from test_multiprocess.benchmark_scripts import TINY, report, run
from test_multiprocess.world import Worlds


def check_both_systems(text: str, rows: list[dict[str, Any]]) -> None:
    assert [row["system"] for row in rows] == ["fsdp2", "mfsdp", "mfsdp (again)"]
    assert all(row["peak"] > 0 and row["sent"] > 0 and len(row["seconds"]) == 1 for row in rows)
    assert "a gather that pads segments would move " in text


def test_both_systems_are_measured(tmp_path: Path) -> None:
    text, (table,) = report("runtime.py", tmp_path, "--ranks", "2", "--rounds", "1", *TINY)
    check_both_systems(text, table["rows"])
    assert all(row["rss"] > 0 for row in table["rows"][:2])


def test_two_matrices_are_measured(worlds: Worlds, tmp_path: Path) -> None:
    # in processes that have had more memory before, so that the peak of the resident set says nothing
    options = ("--ranks", "2", "--model", "two-matrices", "--rounds", "1", *TINY)
    text, (table,) = report("runtime.py", tmp_path, *options, worlds=worlds)
    check_both_systems(text, table["rows"])


def test_every_gather_is_timed_and_the_rule_marked(worlds: Worlds, tmp_path: Path) -> None:
    _, (table,) = report("gathers.py", tmp_path, "--ranks", "3", "--rounds", "1", "--kib", "16", worlds=worlds)
    assert [row["owners"] for row in table["rows"]] == ["one owner", "1/2, 1/4, 1/4", "all evenly"]
    for row in table["rows"]:
        assert list(row["times"]) == ["broadcast", "chain", "re-split", "all-gather"]
        assert [name for name in row["times"] if row[name].endswith("*")] == ["broadcast"]


def test_all_styles_are_measured(worlds: Worlds, tmp_path: Path) -> None:
    size = ("--heads", "2", "--rounds", "1", *TINY)
    _, (table,) = report("graph.py", tmp_path, "--ranks", "2", "--backend", "aot_eager", *size, worlds=worlds)
    assert [row["system"] for row in table["rows"]] == [
        "fsdp2, blocks compiled",
        "hooks, blocks compiled",
        "graph, compiled",
        "hooks, eager",
        "graph, eager",
        "graph, compiled (again)",
    ]
    assert table["rows"][2]["seconds_ratio"] == table["rows"][2]["peak_ratio"] == 1
    assert all(row["peak"] > 0 for row in table["rows"])


def test_without_a_gpu_the_gpu_check_says_so() -> None:
    assert run("gpu_runtime.py") == "no GPU here: nothing was checked\n"
