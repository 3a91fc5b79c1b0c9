"""Saving and loading by ``mfsdp.checkpoint`` against FSDP2 with torch.distributed.checkpoint: time and bytes on disk.

Both have the same GPT and the same optimizers, Muon for the matrices and AdamW for everything else, and take turns in
one run, so that whatever else the machine does hits both alike.

    python examples/benchmark/checkpoint.py --ranks 2            # 200 M parameters: 1.6 GB in a checkpoint
    python examples/benchmark/checkpoint.py --ranks 4 --cold     # loading what is no longer in the page cache

A save is all that it takes from the model and its optimizer to files that are on the disk (both sync them), a load the
way back; with FSDP2 that includes get_state_dict and set_state_dict. mfsdp also sums every byte as it is written, and
checks it before it loads. Times are from a barrier to the next.
"""

import argparse
import copy
import os
import shutil
import statistics
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from chart import SUFFIX, Bars
from launching import is_rank, launch, slowest, world, write_results
from options import benchmark_parser, multiple_of, positive
from report import Column, Report, Table, factor
from timing import SLOWEST, in_order, milliseconds, noise, ratio, until_all
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import setups
from gpt import GPT
from systems import AGAIN, HEADS, OURS, example_options

import mfsdp
from mfsdp.checkpoint.checksums import crc32

CONTEXT = 64


class System(ABC):
    """A sharded model, its optimizers with their states, and how they are saved and loaded."""

    def __init__(self, setup: setups.Setup) -> None:
        self.model, self.optimizers = setup.model, setup.optimizers
        for optimizer in self.optimizers:
            fill_state(optimizer)

    @abstractmethod
    def save(self, path: Path) -> None: ...

    @abstractmethod
    def load(self, path: Path) -> None: ...


class Ours(System):
    """mfsdp."""

    def save(self, path: Path) -> None:
        mfsdp.checkpoint.save(path, self.model, self.optimizers)

    def load(self, path: Path) -> None:
        mfsdp.checkpoint.load(path, self.model, self.optimizers)


class Torchs(System):
    """FSDP2 and torch.distributed.checkpoint."""

    def save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path)

    def load(self, path: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def _state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizer": optimizer}


SYSTEMS: dict[str, Callable[[GPT, DeviceMesh], System]] = {
    "fsdp2": lambda model, mesh: Torchs(setups.with_fsdp2(model, mesh, example_options())),
    OURS: lambda model, mesh: Ours(setups.with_mfsdp(model, mesh, example_options())),
}


def fill_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that it has in training, and change none.

    Muon's momentum is set by hand: it is all that a step would leave, and needs no Newton-Schulz on 200 M parameters.
    """
    usual = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            if "ns_steps" in group:
                optimizer.state[param] = {"momentum_buffer": torch.randn_like(param)}
            else:
                param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, usual, strict=True):
        group["lr"] = lr


def forget_cached(folder: Path) -> None:
    """Drop the files in ``folder`` from the page cache."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def work(args: argparse.Namespace) -> None:
    """One rank: save and load by the systems in turn."""
    with world(args.threads) as mesh:
        torch.manual_seed(0)
        model = GPT(args.width, args.layers, heads=HEADS, context=CONTEXT)
        systems = {name: make(copy.deepcopy(model), mesh) for name, make in SYSTEMS.items()}
        del model
        measured: dict[str, dict[str, list[float]]] = {
            name: {"save": [], "load": [], "bytes": []} for name in (*SYSTEMS, AGAIN)
        }
        for number in range(args.rounds + 1):  # the first is a warm-up
            for name in in_order(measured, number):
                saving, loading, nbytes = save_and_load(args, systems, name.removesuffix(SUFFIX))
                if number:
                    for key, value in (("save", saving), ("load", loading), ("bytes", nbytes)):
                        measured[name][key].append(value)
        write_results(measured)


def save_and_load(args: argparse.Namespace, systems: dict[str, System], name: str) -> tuple[float, float, int]:
    """Seconds of both, until all ranks are done, and bytes on the disk."""
    path, system = Path(args.folder, name), systems[name]
    saving = until_all(lambda: system.save(path))
    nbytes = sum(file.stat().st_size for file in path.iterdir())
    dist.barrier()
    if args.cold and dist.get_rank() == 0:
        forget_cached(path)
    loading = until_all(lambda: system.load(path))
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    return saving, loading, nbytes


def table(args: argparse.Namespace, by_rank: list[dict[str, Any]]) -> Table:
    rows: list[dict[str, Any]] = []
    for system in by_rank[0]:
        times = {key: slowest(rank[system][key] for rank in by_rank) for key in ("save", "load")}
        rows.append({"system": system, **times, "bytes": max(by_rank[0][system]["bytes"])})
    theirs = rows[0]
    for row in rows:
        row |= {f"{key}_ratio": ratio(row[key], theirs[key]) for key in ("save", "load")}
        row["bytes_ratio"] = row["bytes"] / theirs["bytes"]
    columns = [
        Column("system", ""),
        Column("save", "save", milliseconds),
        Column("save_ratio", "over fsdp2", factor),
        Column("load", "load", milliseconds),
        Column("load_ratio", "over fsdp2", factor),
        Column("bytes", "MB on disk", lambda nbytes: f"{nbytes / 1e6:,.3f}"),
        Column("bytes_ratio", "over fsdp2", "{:.4f}".format),
    ]
    ours, again = rows[1], rows[2]
    notes = [noise(f"mfsdp's {key}", ours[key], again[key]) for key in ("save", "load")]
    charts = [
        Bars(key, "seconds", {row["system"]: statistics.median(row[key]) for row in rows}) for key in ("save", "load")
    ]
    return Table(f"{args.ranks} ranks", columns, rows, notes, charts)


def main() -> None:
    args = arguments()
    if is_rank():
        work(args)
        return
    parameters = sum(param.numel() for param in GPT(args.width, args.layers, HEADS, CONTEXT).parameters())
    cache = "not in the page cache" if args.cold else "in the page cache"
    shape = f"{parameters:,} parameters, fp32, {args.rounds} rounds after 1 to warm up; {SLOWEST}"
    limits = (
        f"The disk, and what else uses it; when loading, files are {cache}. mfsdp sums every byte that it writes, and "
        f"checks it before it loads, by the CRC-32 of {crc32.__module__.partition('.')[0]}."
    )
    report = Report(args, "Saving and loading", shape, limits, args.threads)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        by_rank = launch(args.ranks, arguments=["--folder", folder])
    report.add(table(args, by_rank))


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--width", type=multiple_of(HEADS), default=1024)
    parser.add_argument("--layers", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before they are loaded")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--folder", default=None, help="where to save (default: the system's temporary folder)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
