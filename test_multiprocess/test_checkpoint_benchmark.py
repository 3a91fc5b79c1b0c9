"""The benchmark of saving and loading runs, says what it measured, and leaves nothing."""

from pathlib import Path

import pytest

from test_multiprocess.benchmark_scripts import report
from test_multiprocess.world import Worlds


def test_both_systems_are_measured(worlds: Worlds, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    size = ("--width", "32", "--layers", "2", "--rounds", "1")
    text, (table,) = report("checkpoint.py", tmp_path, *size, "--cold", "--folder", str(folder), worlds=worlds)
    assert "43,648 parameters, fp32, 1 rounds" in text
    assert "when loading, files are not in the page cache" in text
    theirs, ours, again = table["rows"]
    assert [row["system"] for row in table["rows"]] == ["fsdp2", "mfsdp", "mfsdp (again)"]
    assert ours["bytes"] <= theirs["bytes"]
    assert again["bytes"] == pytest.approx(ours["bytes"], abs=100)  # times are written into it
    states = 2 * 4 * 43_648  # a momentum for each parameter of a matrix, two moments for the others
    assert ours["bytes"] > states
    assert list(folder.iterdir()) == []
