"""Starting the ranks of a benchmark, on this host or in emulated nodes, and collecting what they measured."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from emulated_nodes import INTERFACE, EmulatedNodes

RESULTS = "BENCHMARK_RESULTS"
"""Environment variable of a rank: the folder for its results. The program that starts the ranks has none."""


def is_rank() -> bool:
    """Whether this process is one of the ranks."""
    return RESULTS in os.environ


def write_results(results: Any) -> None:
    """Hand a rank's results, anything that JSON can hold, to :func:`launch`."""
    Path(os.environ[RESULTS], f"{os.environ['RANK']}.json").write_text(json.dumps(results))


def bytes_sent() -> int:
    """Bytes that have left this rank's network interface so far, headers included.

    On loopback all ranks share the interface, so that it counts those of all of them.
    """
    name = INTERFACE if "EMULATED" in os.environ else "lo"
    return int(Path(f"/sys/class/net/{name}/statistics/tx_bytes").read_text())


def launch(ranks: int, nodes: int = 0, rate: str = "1gbit", arguments: Sequence[str] = ()) -> list[Any]:
    """Start the running program again, once for each rank; what each gave to :func:`write_results`, by rank.

    Args:
        ranks: how many.
        nodes: emulated nodes that they are dealt out to; 0 for this host.
        rate: egress of an emulated node.
        arguments: the ranks' command line, after this program's own.

    Raises:
        SystemExit: a rank failed.
    """
    # so that nodes and ranks are cleared away as well when this program is told to end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        emulated = stack.enter_context(EmulatedNodes(nodes, rate)) if nodes else None
        environment = {
            **os.environ,
            RESULTS: folder,
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": emulated.address(0) if emulated else "127.0.0.1",
            "MASTER_PORT": "29500" if emulated else str(_free_port()),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "KINETO_LOG_LEVEL": "99",
        }
        if emulated:
            environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "EMULATED": "1"}
        command = [sys.executable, "-W", "ignore", *sys.argv, *arguments]
        processes = []
        try:
            for rank in range(ranks):
                here = emulated.command(rank % nodes, command) if emulated else command
                processes.append(subprocess.Popen(here, env={**environment, "RANK": str(rank)}))
            if any(process.wait() for process in processes):
                raise SystemExit("a rank failed; its message is above")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def slowest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """For each round the time of the rank that took longest, from the times of each rank by round."""
    return [max(times) for times in zip(*ranks, strict=True)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
