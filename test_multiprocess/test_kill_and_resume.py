"""A run that is killed again and again ends where one ends that was never killed; here with few kills.

The long version is ``python examples/kill_and_resume.py --kills 20``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # its modules import each other, as those of any script do

import kill_and_resume  # noqa: E402


def test_killed_runs_end_as_if_they_had_not_been() -> None:
    script = [sys.executable, str(EXAMPLES / "kill_and_resume.py"), "--kills", "5", "--seed", "3"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    first, _, *kills, last = done.stdout.splitlines()
    assert first.startswith("36 steps, a save every ")
    rows = [line.split() for line in kills]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5"]
    ranks, saved = [int(row[1]) for row in rows], [int(row[-2]) for row in rows]
    assert set(ranks) == {1, 2, 4}
    assert saved == sorted(saved)
    assert saved[-1] > 0
    assert re.fullmatch(r"5 kills, \d of them while saving: all 92 tensors equal to the bit", last)


def test_the_comparison_misses_no_bit() -> None:
    one = {"a": [torch.zeros(2), {"b": torch.ones(3)}], "c": 1}
    assert kill_and_resume.compare(one, {"a": [torch.zeros(2), {"b": torch.ones(3)}], "c": 1}, "") == 2
    for other in (
        {"a": [torch.zeros(2), {"b": torch.tensor([1.0, 1.0, 1.0 + 2**-23])}], "c": 1},
        {"a": [torch.zeros(2), {"b": torch.ones(3, dtype=torch.float64)}], "c": 1},
        {"a": [torch.zeros(2)], "c": 1},
        {"a": [torch.zeros(2), {"b": torch.ones(3)}], "c": 2},
    ):
        with pytest.raises(SystemExit, match="the run that was never killed"):
            kill_and_resume.compare(one, other, "state")
