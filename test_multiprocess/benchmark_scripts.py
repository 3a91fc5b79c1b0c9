"""Running the benchmark scripts in tests: as a user does, or in processes that are there already."""

import gc
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from test_multiprocess.world import Worlds

BENCHMARK = Path(__file__).resolve().parent.parent / "examples" / "benchmark"
sys.path.insert(0, str(BENCHMARK))  # its modules import each other, as those of any script do
import launching  # noqa: E402

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


def run_in(worlds: Worlds, script: str, *arguments: str) -> str:
    """What a script prints that does not start its ranks but finds them among ``worlds``.

    A process that imports torch takes some seconds, and most scripts start several.
    """

    given = list(arguments)

    def launch(ranks: int, nodes: int = 0, rate: str = "", arguments: Sequence[str] = ()) -> list[Any]:
        assert nodes == 0, "nodes are emulated by new processes only"
        with tempfile.TemporaryDirectory() as folder:
            rank = {"script": script, "arguments": [*given, *arguments], "folder": folder}
            worlds.get(ranks).run(__name__, "be_a_rank", rank, timeout=100)
            return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]

    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr(launching, "launch", launch)
        patch.setattr(sys, "argv", [str(BENCHMARK / script), *given])
        with _imported(script) as module:
            module.main()
    return printed.getvalue()


def be_a_rank(mesh: DeviceMesh, script: str, arguments: list[str], folder: str) -> None:
    """One rank of a script, in a process and a process group that are there already."""

    @contextmanager
    def world(threads: int = 1) -> Iterator[DeviceMesh]:
        yield mesh
        dist.barrier()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "world", world)
        patch.setattr(sys, "argv", [str(BENCHMARK / script), *arguments])
        for name, value in {
            launching.RESULTS: folder,
            launching.SHARING: str(mesh.size()),
            "RANK": str(mesh.get_local_rank()),
            "WORLD_SIZE": str(mesh.size()),
        }.items():
            patch.setenv(name, value)
        with _imported(script) as module:
            module.main()
    gc.collect()


be_a_rank.on_rank = be_a_rank  # type: ignore[attr-defined]


@contextmanager
def _imported(script: str) -> Iterator[ModuleType]:
    """The script as a module; it and what it imports from its folder, which know what is patched now, are forgotten."""

    def forget() -> None:
        for name, module in list(sys.modules.items()):
            file = vars(module).get("__file__")
            if module is not launching and file is not None and Path(file).parent == BENCHMARK:
                del sys.modules[name]

    forget()
    yield importlib.import_module(script.removesuffix(".py"))
    forget()


def report(
    script: str, folder: Path, *arguments: str, worlds: Worlds | None = None
) -> tuple[str, list[dict[str, Any]]]:
    """What a script prints, and the tables of its JSON file; the files are checked to be there and to agree.

    Args:
        script: its name.
        folder: for its files.
        arguments: its command line.
        worlds: has the processes that are its ranks; by default it starts them.
    """
    stem = folder / "result"
    options = ("--output", str(stem), *arguments)
    printed = run(script, *options) if worlds is None else run_in(worlds, script, *options)
    written = json.loads(stem.with_suffix(".json").read_text())
    assert stem.with_suffix(".md").read_text() == printed
    for line in ("- measured: ", "- machine: ", "- versions: Python ", "- limits: "):
        assert f"\n{line}" in printed, printed
    assert re.search(r"^- machine: .*; OMP_NUM_THREADS .*, \d+ threads? of torch in a process$", printed, re.M), printed
    assert all(any("noise" in note for note in table["notes"]) for table in written["tables"]), printed
    assert stem.with_suffix(".png").exists()
    return printed, written["tables"]
