"""The ranks of a benchmark end with it, whatever ends it, and so does what they have started themselves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from test_multiprocess.benchmark_scripts import BENCHMARK

SCRIPT = f"""\
import subprocess, sys, time
from pathlib import Path

sys.path.insert(0, {str(BENCHMARK)!r})
import os
from launching import is_rank, launch, write_results

if is_rank():
    worker = subprocess.Popen(["sleep", "300"])  # as a compiler's, it does not look whether the rank is still there
    partial = Path(sys.argv[1], os.environ["RANK"] + ".partial")
    partial.write_text(f"{{os.getpid()}} {{worker.pid}}")
    partial.rename(partial.with_suffix(".ids"))
    if sys.argv[2] == "ends":
        write_results(os.environ["RANK"])
    elif sys.argv[2] == "fails" and os.environ["RANK"] == "1":
        raise SystemExit("rank 1 has had enough")
    else:
        time.sleep(300)
else:
    print(launch(2))
"""


def runs(process: int) -> bool:
    """Whether it is there, and not merely waits to be collected."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool]) -> bool:
    """Whether it has come true within a minute."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], tuple["subprocess.Popen[str]", list[int]]]]:
    """What starts the script; gives its process, and the ids of the ranks and of what they have started."""
    ids: list[int] = []
    # what is started can be interrupted, even where this process, in the background, ignores that itself
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def start(how: str) -> tuple["subprocess.Popen[str]", list[int]]:
        script = tmp_path / "script.py"
        script.write_text(SCRIPT)
        command = [sys.executable, str(script), str(tmp_path), how]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert until(lambda: len(list(tmp_path.glob("*.ids"))) == 2)
        ids.extend(int(number) for file in tmp_path.glob("*.ids") for number in file.read_text().split())
        return process, ids

    yield start
    signal.signal(signal.SIGINT, before)
    for process in filter(runs, ids):
        os.kill(process, signal.SIGKILL)


Start = Callable[[str], tuple["subprocess.Popen[str]", list[int]]]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_when_it_is_told_to_end(started: Start, how: signal.Signals) -> None:
    process, ids = started("waits")
    assert len(ids) == 4
    assert all(map(runs, ids))
    process.send_signal(how)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert until(lambda: not any(map(runs, ids)))


def test_nothing_is_left_when_a_rank_fails(started: Start) -> None:
    process, ids = started("fails")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "rank 1 has had enough\na rank failed; its message is above\n")
    assert until(lambda: not any(map(runs, ids)))


def test_nothing_is_left_at_the_end(started: Start) -> None:
    process, ids = started("ends")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (0, "['0', '1']\n"), errors
    assert until(lambda: not any(map(runs, ids)))
