"""Starting the ranks of a benchmark, on this host or in emulated nodes, and collecting what they measured."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_nodes import INTERFACE, EmulatedNodes, NodesUnavailable, undisturbed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

RESULTS = "BENCHMARK_RESULTS"
"""Environment variable of a rank: the folder for its results. The program that starts the ranks has none."""
SHARING = "BENCHMARK_SHARING"
"""Environment variable of a rank: how many ranks share its network interface, it being one of them."""


RANK_THREADS = 1
"""torch's threads in a rank, where a benchmark has no other number: ranks share the cores."""


def is_rank() -> bool:
    """Whether this process is one of the ranks."""
    return RESULTS in os.environ


def write_results(results: Any) -> None:
    """Hand a rank's results, anything that JSON can hold, to :func:`launch`."""
    Path(os.environ[RESULTS], f"{os.environ['RANK']}.json").write_text(json.dumps(results))


@contextmanager
def world(threads: int = RANK_THREADS) -> Iterator[DeviceMesh]:
    """All ranks as a mesh of one dimension over gloo, for the time of a ``with`` block; in a rank."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo")
    yield init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Wire:
    """Bytes at the network interface so far, headers included; a rank's share where several use one interface.

    Attributes:
        sent: that left it.
        received: that came in.
    """

    sent: float
    received: float

    @staticmethod
    def now() -> "Wire":
        name = INTERFACE if "EMULATED" in os.environ else "lo"
        counters = Path("/sys/class/net", name, "statistics")
        sharing = int(os.environ[SHARING])
        return Wire(*(int((counters / f"{way}_bytes").read_text()) / sharing for way in ("tx", "rx")))

    def __sub__(self, earlier: "Wire") -> "Wire":
        return Wire(self.sent - earlier.sent, self.received - earlier.received)


def launch(ranks: int, nodes: int = 0, rate: str = "1gbit", arguments: Sequence[str] = ()) -> list[Any]:
    """Start the running program again, once for each rank; what each gave to :func:`write_results`, by rank.

    Whatever happens, ranks, what they have started (a compiler's workers, say), and nodes are gone when it returns:
    also after Ctrl-C, and when this program is told to end.

    Args:
        ranks: how many.
        nodes: emulated nodes, each of which gets ``ranks / nodes`` successive ranks; 0 for this host.
        rate: egress of an emulated node.
        arguments: the ranks' command line, after this program's own.

    Raises:
        SystemExit: a rank failed, or nodes cannot be emulated here.
    """
    if nodes and ranks % nodes:
        raise SystemExit(f"{ranks} ranks do not divide evenly among {nodes} nodes.")
    # so that nodes and ranks are cleared away as well when this program is told to end, or loses its terminal
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # and not ignored, as under nohup
            signal.signal(number, lambda *_: sys.exit("terminated"))
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            emulated = stack.enter_context(EmulatedNodes(nodes, rate)) if nodes else None
            processes = stack.enter_context(_started(ranks, nodes, emulated, folder, arguments))
            _wait(processes)
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
    except NodesUnavailable as error:
        raise SystemExit(str(error)) from None


@contextmanager
def _started(
    ranks: int, nodes: int, emulated: EmulatedNodes | None, folder: str, arguments: Sequence[str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = {
        **os.environ,
        RESULTS: folder,
        SHARING: str(ranks // nodes if nodes else ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": emulated.address(0) if emulated else "127.0.0.1",
        "MASTER_PORT": "29500" if emulated else str(_free_port()),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "KINETO_LOG_LEVEL": "99",
    }
    if emulated:
        environment |= {"GLOO_SOCKET_IFNAME": INTERFACE, "EMULATED": "1"}
    command = [sys.executable, "-W", "ignore", *sys.argv, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            here = emulated.command(rank * nodes // ranks, command) if emulated else command
            # a session of its own, and so a group: Ctrl-C is for this program, which then ends all of the group
            process = subprocess.Popen(here, env={**environment, "RANK": str(rank)}, start_new_session=True)
            processes.append(process)
        yield processes
    finally:
        with undisturbed():
            for process in processes:
                with suppress(ProcessLookupError):  # a group of which nothing is left
                    os.killpg(process.pid, signal.SIGKILL)
            for process in processes:
                process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all have ended well, or one has not: the others would wait for it."""
    while True:
        codes = [_code(process.pid) for process in processes]
        if any(codes):
            raise SystemExit("a rank failed; its message is above")
        if None not in codes:
            return
        time.sleep(0.05)


def _code(process: int) -> int | None:
    """Its exit code, or the signal that has ended it; None while it runs.

    The process is not collected: so long nothing else is given its id, which is its group's.
    """
    ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended.si_status if ended else None


def slowest(ranks: Iterable[Sequence[float]]) -> list[float]:
    """For each round the time of the rank that took longest, from the times of each rank by round."""
    return [max(times) for times in zip(*ranks, strict=True)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
