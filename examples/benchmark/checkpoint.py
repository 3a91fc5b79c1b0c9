"""Saving and loading by ``mfsdp.checkpoint`` against FSDP2 with torch.distributed.checkpoint: time and bytes on disk.

Both have the same GPT and the same optimizers, Muon for the matrices and AdamW for everything else, and take turns in
one run, so that whatever else the machine does hits both alike.

    python examples/benchmark/checkpoint.py --ranks 2            # 200 M parameters: 1.6 GB in a checkpoint
    python examples/benchmark/checkpoint.py --ranks 4 --cold     # loading what is no longer in the page cache
    python examples/benchmark/checkpoint.py --ranks 2 --tiny

A save is all that it takes from the model and its optimizer to files that are on the disk (both sync them), a load the
way back; with FSDP2 that includes get_state_dict and set_state_dict. mfsdp also sums every byte as it is written, and
checks it before it loads. Times are medians over rounds, from a barrier to the next; the spread is the largest less
the smallest, over the median.
"""

import argparse
import copy
import os
import shutil
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launching import is_rank, launch, slowest, write_results
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import setups
from gpt import GPT
from systems import example_options

import mfsdp

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
    "mfsdp": lambda model, mesh: Ours(setups.with_mfsdp(model, mesh, example_options())),
}


def fill_state(optimizer: Optimizer) -> None:
    """Give every parameter the state that it has in training, by a step that costs little and changes none."""
    usual = [dict(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        if "ns_steps" in group:
            group["ns_steps"] = 1
        for param in group["params"]:
            param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, options in zip(optimizer.param_groups, usual, strict=True):
        group.update(options)


def forget_cached(folder: Path) -> None:
    """Drop the files in ``folder`` from the page cache."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def seconds_of(work: Callable[[], None]) -> float:
    """How long it takes until all ranks have done ``work``."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def work(args: argparse.Namespace) -> None:
    """One rank: save and load by the systems in turn."""
    dist.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, heads=8, context=CONTEXT)
    systems = {name: make(copy.deepcopy(model), mesh) for name, make in SYSTEMS.items()}
    del model
    measured: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": [], "bytes": []} for name in systems}
    for number in range(args.rounds + 1):  # the first is a warm-up
        order = list(systems) if number % 2 else list(systems)[::-1]
        for name in order:
            path, system, result = Path(args.folder, name), systems[name], measured[name]
            saving = seconds_of(lambda path=path, system=system: system.save(path))
            result["bytes"].append(sum(file.stat().st_size for file in path.iterdir()))
            dist.barrier()
            if args.cold and dist.get_rank() == 0:
                forget_cached(path)
            loading = seconds_of(lambda path=path, system=system: system.load(path))
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            if number:
                result["save"].append(saving)
                result["load"].append(loading)
    write_results(measured)
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace) -> None:
    """Run all ranks, and print what the slowest took."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=args.folder) as folder:
        ranks = launch(args.ranks, arguments=["--folder", folder])
    parameters = sum(param.numel() for param in GPT(args.width, args.layers, 8, CONTEXT).parameters())
    cache = "not in the page cache" if args.cold else "in the page cache"
    print(f"{parameters:,} parameters, {args.ranks} ranks, {args.rounds} rounds; when loading, files are {cache}")
    print(f"{'':<8}{'s / save':>10}{'spread':>8}{'s / load':>10}{'spread':>8}{'MB on disk':>12}")
    rows = []
    for system in SYSTEMS:
        row, cells = [], []
        for activity in ("save", "load"):
            times = slowest(rank[system][activity] for rank in ranks)
            row.append(statistics.median(times))
            cells.append(f"{row[-1]:>10.3f}{(max(times) - min(times)) / row[-1]:>8.0%}")
        row.append(max(ranks[0][system]["bytes"]))
        rows.append(row)
        print(f"{system:<8}{''.join(cells)}{row[-1] / 1e6:>12.3f}")
    save, load, size = (ours / theirs for theirs, ours in zip(*rows, strict=True))
    print(f"{'ratio':<8}{save:>10.2f}{'':>8}{load:>10.2f}{'':>8}{size:>12.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tiny", action="store_true", help="a model of width 32 and 2 layers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the files from the page cache before they are loaded")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", default=None, help="where to save (default: the system's temporary folder)")
    args = parser.parse_args()
    if args.tiny:
        args.width, args.layers = 32, 2
    return args


if __name__ == "__main__":
    options = arguments()
    if is_rank():
        work(options)
    else:
        report(options)
