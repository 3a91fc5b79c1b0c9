"""Process worlds that are started once and shared by the tests of a session.

``@on_ranks(2, 3, 4)`` turns a function into one test per world size; the function's body runs on every
rank of a gloo world whose processes stay alive between tests. If any rank fails, or does not answer in
time, the whole world is ended and the next test that needs its size starts a new one: a rank that died
inside a collective can therefore never poison the tests after it.

The function may name ``mesh`` among its parameters (a 1-D CPU mesh over the world). Its other parameters
are pytest fixtures or parametrised values; they are pickled to the ranks.
"""

import importlib
import inspect
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COLLECTIVE_TIMEOUT = timedelta(seconds=40)


def _serve(rank: int, world_size: int, init_file: str, search_path: list[str], connection: Connection) -> None:
    """The life of one rank: join the world, then run what arrives until the parent hangs up."""
    sys.path[:] = search_path
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    mesh = init_device_mesh("cpu", (world_size,))
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            break
        try:
            connection.send((None, _run_one(mesh, module, name, kwargs)))
        except BaseException:  # whatever it is, the parent must hear of it
            connection.send((traceback.format_exc(), None))
    os._exit(0)  # no goodbye collective: peers may be gone already


def _run_one(mesh: DeviceMesh, module: str, name: str, kwargs: dict[str, Any]) -> Any:
    function = getattr(importlib.import_module(module), name).on_rank
    if "mesh" in inspect.signature(function).parameters:
        kwargs = {"mesh": mesh, **kwargs}
    torch.manual_seed(0)
    return function(**kwargs)


class World:
    """``world_size`` processes joined in one gloo process group."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="mfsdp-world-")
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, f"{self._folder.name}/rendezvous", sys.path, theirs),
                daemon=True,
            )
            with mock.patch.dict(os.environ, PYTHONHASHSEED=str(rank + 1)):
                process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, module: str, name: str, kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """Run ``module.name.on_rank(**kwargs)`` on every rank; the results by rank, or an AssertionError."""
        for connection in self._connections:
            connection.send((module, name, kwargs))
        errors: dict[int, str] = {}
        results: dict[int, Any] = {}
        pending = dict(enumerate(self._connections))
        while pending:
            # once one rank has failed the others can only wait for it in vain
            ready = wait(list(pending.values()), timeout=3.0 if errors else timeout)
            if not ready:
                errors.update(dict.fromkeys(pending, "did not answer in time\n"))
                break
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    error, results[rank] = pending.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    error = "process died\n"
                if error is not None:
                    errors[rank] = error
        if errors:
            self.close()
            report = "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items()))
            raise AssertionError(f"{len(errors)} of {self.world_size} ranks failed\n{report}")
        return [results[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._folder.cleanup()


class Worlds:
    """The worlds of a test session by size; a broken one is replaced when it is next asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def get(self, world_size: int) -> World:
        world = self._worlds.get(world_size)
        if world is None or not world.alive:
            world = self._worlds[world_size] = World(world_size)
        return world

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()


def on_ranks(*world_sizes: int, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on every rank of a shared world, once for each of ``world_sizes``."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("world_size", world_sizes)
        def test(worlds: Worlds, world_size: int, **kwargs: Any) -> None:
            if "world_size" in wanted:
                kwargs["world_size"] = world_size
            worlds.get(world_size).run(function.__module__, function.__name__, kwargs, timeout)

        wanted = inspect.signature(function).parameters
        fixtures = [p for name, p in wanted.items() if name not in ("mesh", "world_size")]
        own = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in ("worlds", "world_size")]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in fixtures), *own]
        )
        # marks may stand on either side of this decorator
        test.pytestmark = [*getattr(function, "pytestmark", []), *test.pytestmark]  # type: ignore[attr-defined]
        test.__name__ = function.__name__
        test.__qualname__ = function.__qualname__
        test.__module__ = function.__module__
        test.__doc__ = function.__doc__
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return decorate
