"""Running the benchmark scripts in tests."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).resolve().parent.parent / "examples" / "benchmark"
TINY = ("--width", "32", "--layers", "1", "--context", "8")


def start(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """A script that runs, without a GPU."""
    return subprocess.Popen(
        [sys.executable, str(BENCHMARK / script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(environment or {})},
    )


def run(script: str, *arguments: str) -> str:
    """What a script prints, run without a GPU."""
    with start(script, *arguments) as process:
        try:
            printed, errors = process.communicate(timeout=100)
        finally:
            process.terminate()  # if it has not ended, so that it takes its ranks with it
    assert process.returncode == 0, errors
    return printed


def report(script: str, folder: Path, *arguments: str) -> tuple[str, list[dict[str, Any]]]:
    """What a script prints, and the tables of its JSON file; the files are checked to be there and to agree."""
    stem = folder / "result"
    printed = run(script, "--output", str(stem), *arguments)
    written = json.loads(stem.with_suffix(".json").read_text())
    assert stem.with_suffix(".md").read_text() == printed
    for line in ("- measured: ", "- machine: ", "- versions: Python ", "- limits: "):
        assert f"\n{line}" in printed, printed
    assert re.search(r"^- machine: .*; OMP_NUM_THREADS .*, \d+ threads? of torch in a process$", printed, re.M), printed
    assert all(any("noise" in note for note in table["notes"]) for table in written["tables"]), printed
    assert stem.with_suffix(".png").exists()
    return printed, written["tables"]
