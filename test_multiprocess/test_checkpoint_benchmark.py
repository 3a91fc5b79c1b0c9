"""The benchmark of saving and loading runs, says what it measured, and leaves nothing."""

import re
from pathlib import Path

import pytest

from test_multiprocess.benchmark_scripts import run


def test_both_systems_are_measured(tmp_path: Path) -> None:
    printed = run("checkpoint.py", "--tiny", "--rounds", "1", "--cold", "--folder", str(tmp_path))
    number, spread = r"[\d.]+", r"\d+%"
    table = re.fullmatch(
        rf"43,648 parameters, 2 ranks, 1 rounds; when loading, files are not in the page cache\n"
        rf" +s / save +spread +s / load +spread +MB on disk\n"
        rf"fsdp2 +{number} +{spread} +{number} +{spread} +({number})\n"
        rf"mfsdp +{number} +{spread} +{number} +{spread} +({number})\n"
        rf"ratio +{number} +{number} +({number})\n",
        printed,
    )
    assert table, printed
    theirs, ours, ratio = map(float, table.groups())
    assert ratio == pytest.approx(ours / theirs, abs=1e-3)
    assert ratio <= 1
    states = 2 * 4 * 43_648  # a momentum for each parameter of a matrix, two moments for the others
    assert ours * 1e6 > states
    assert list(tmp_path.iterdir()) == []
