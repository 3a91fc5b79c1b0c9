"""Emulated nodes: network namespaces joined by a bridge, the egress of each limited.

Needs Linux, root, ``ip`` and ``tc``. A process in a node sees one network interface, ``eth0``, of the given
rate, and nothing else; so processes in different nodes are as far apart as hosts of a cluster are.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

INTERFACE = "eth0"


class NodesUnavailable(RuntimeError):
    """Nodes cannot be emulated here; the message says what is missing."""


def unavailable() -> str | None:
    """Why nodes cannot be emulated here; None if they can."""
    if sys.platform != "linux":
        return f"emulated nodes need Linux, for network namespaces; this is {sys.platform}."
    if os.geteuid() != 0:
        return "emulated nodes need root, for network namespaces."
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return f"emulated nodes need {' and '.join(missing)} (package iproute2)."
    return None


class EmulatedNodes:
    """``number`` nodes; a context manager that makes them, and removes what it has made.

    Args:
        number: at most 200.
        rate: egress of each, as ``tc`` writes it: ``"1gbit"``, ``"200mbit"``.

    Raises:
        NodesUnavailable: they cannot be made here.
    """

    def __init__(self, number: int, rate: str) -> None:
        reason = unavailable()
        if reason:
            raise NodesUnavailable(reason)
        self._rate = rate
        self._tag = f"mf{os.getpid() % 100_000}"  # interfaces have names of at most 15 characters
        self._names = [f"{self._tag}n{node}" for node in range(number)]

    @staticmethod
    def address(node: int) -> str:
        """The node's IP address."""
        return f"10.77.0.{node + 1}"

    def command(self, node: int, command: Sequence[str]) -> list[str]:
        """``command`` as it runs inside the node."""
        return ["ip", "netns", "exec", self._names[node], *command]

    def __enter__(self) -> Self:
        try:
            _run("ip", "link", "add", self._tag, "type", "bridge")
            _run("ip", "link", "set", self._tag, "up")
            for node, name in enumerate(self._names):
                self._add(node, name)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _add(self, node: int, name: str) -> None:
        port = f"{name}p"
        _run("ip", "netns", "add", name)
        _run("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _run("ip", "link", "set", port, "master", self._tag, "up")
        inside = ("ip", "-n", name)
        _run(*inside, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        _run(*inside, "link", "set", INTERFACE, "up")
        _run(*inside, "link", "set", "lo", "up")
        limit = ("tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", *limit)

    def _remove(self) -> None:
        with undisturbed():
            for name in self._names:
                # a namespace, and with it its end of the link, outlives its name while it has closing sockets
                subprocess.run(["ip", "link", "del", f"{name}p"], check=False, capture_output=True)
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", self._tag], check=False, capture_output=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, and being told to end, wait until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NodesUnavailable(f"emulated nodes cannot be made here: {' '.join(command)}: {done.stderr.strip()}")
