"""The emulated cluster is built, used, and gone afterwards, whatever happens; and it says what it lacks."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_multiprocess.benchmark_scripts import BENCHMARK, TINY, report, start

sys.path.insert(0, str(BENCHMARK))
import emulated_nodes

needs_nodes = pytest.mark.skipif(
    emulated_nodes.unavailable() is not None, reason=emulated_nodes.unavailable() or "nodes can be emulated"
)
CLUSTER = ("cluster.py", "--worlds", "2x1", "--rates", "1gbit")


def left_over(pid: int) -> list[str]:
    """Namespaces and links of the nodes that the process made."""
    commands = (["ip", "netns", "list"], ["ip", "-o", "link"])
    lines = [line for command in commands for line in subprocess.check_output(command, text=True).splitlines()]
    return [line for line in lines if re.search(rf"\bmf{pid % 100_000}(n|:|$)", line)]


def ranks_of(pid: int) -> list[str]:
    """Ids of the processes that the process has started and that still run."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    return file.read_text().split() if file.exists() else []


@needs_nodes
def test_systems_are_measured_at_the_matched_rate(tmp_path: Path) -> None:
    arguments = (
        "--worlds",
        "1x2",
        "2x1",
        "--rates",
        "matched",
        "--systems",
        "mfsdp",
        "--rounds",
        "1",
        *TINY,
        "--width",
        "64",
    )
    text, tables = report("cluster.py", tmp_path, *arguments)
    found = re.search(
        r"2 ranks do ([\d.]+) GFLOP/s of Newton-Schulz each; at 12,000 operations for a byte a rank's matched link has "
        r"([\d.]+) Mbit/s\.",
        text,
    )
    assert found, text
    assert float(found[2]) == pytest.approx(float(found[1]) * 1e9 / 12_000 * 8 / 1e6, abs=0.1)
    alone, matched, steps, whole = tables
    assert alone["title"] == "1 node of 2 ranks"
    assert matched["title"] == f"2 nodes of 1 rank, a matched {found[2]} Mbit/s"
    assert [row["system"] for row in matched["rows"]] == ["mfsdp", "mfsdp (again)"]
    assert [row["rate"] for row in steps["rows"]] == ["no network", "matched"]
    assert whole["rows"][1]["mfsdp (again)"] == matched["rows"][1]["whole_ratio"]
    # nothing but a barrier passes the interface in a step
    assert 0 < matched["rows"][0]["wire_sent"] < 4096
    assert 0 < matched["rows"][0]["wire_received"] < 4096
    assert alone["rows"][0]["wire_sent"] == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What is started can be interrupted, even where this process, in the background, ignores that itself."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@needs_nodes
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_nodes_are_gone_when_it_is_interrupted(how: signal.Signals) -> None:
    with start(*CLUSTER, *TINY) as process:
        deadline = time.monotonic() + 60
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = ranks_of(process.pid)
        assert left_over(process.pid), "no nodes were made"
        process.send_signal(how)
        process.communicate(timeout=60)
    assert process.returncode != 0
    assert left_over(process.pid) == []
    assert len(ranks) == 2
    assert not any(Path("/proc", rank).exists() for rank in ranks)


@needs_nodes
def test_nodes_are_gone_when_a_rank_fails() -> None:
    with start(*CLUSTER, *TINY) as process:
        deadline = time.monotonic() + 60
        while len(ranks_of(process.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int(ranks_of(process.pid)[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.endswith("a rank failed; its message is above\n")
    assert left_over(process.pid) == []


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert emulated_nodes.unavailable() == "emulated nodes need root, for network namespaces."
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert emulated_nodes.unavailable() == "emulated nodes need ip and tc (package iproute2)."
    monkeypatch.setattr(sys, "platform", "darwin")
    assert emulated_nodes.unavailable() == "emulated nodes need Linux, for network namespaces; this is darwin."


def test_without_nodes_nothing_is_measured() -> None:
    with start(*CLUSTER, environment={"PATH": "/nowhere"}) as process:
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert printed == ""
    assert re.fullmatch(r"emulated nodes need .*\.\n", errors), errors


def test_worlds_are_nodes_and_ranks() -> None:
    with start("cluster.py", "--worlds", "0x2") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors.splitlines()[-1] == (
        "cluster.py: error: argument --worlds: '0x2' is not NODESxRANKS, such as 4x2 for 4 nodes of 2 ranks each"
    )
