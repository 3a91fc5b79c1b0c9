"""Running the benchmark scripts in tests."""

import os
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parent.parent / "examples" / "benchmark"


def run(script: str, *arguments: str) -> str:
    """What a script prints, run without a GPU."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK / script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
