"""The planner's benchmark runs, so that it does not rot."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "benchmark" / "planner.py"


def output(*arguments: str) -> list[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_times() -> None:
    lines = output("time", "--largest", "1000", "--repeats", "1")
    assert [line.split("|")[1].strip() for line in lines[2:4]] == ["1,000", "1,000"]
    assert lines[-1].startswith("CPU seconds, least of 1")


def test_plans_of_public_models_are_as_even_as_they_can_be() -> None:
    lines = output("evenness", "--models", "gpt2-124m", "llama3-8b", "llama3-70b")
    assert len(lines) == 2 + 3 * 4
    for line in lines[2:]:
        *_, step, nbytes, limit = (cell.strip() for cell in line.strip("|").split("|"))
        assert max(float(step), float(nbytes)) <= 1.05 or "proven to be least" in limit, line
