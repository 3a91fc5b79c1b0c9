"""A training step of ``style="graph"``, compiled as one graph, against hooks style and FSDP2 compiled per block.

All three shard the same GPT and take turns in one run, so that whatever else the machine does hits all alike.

    python examples/benchmark/graph.py --ranks 2
    python examples/benchmark/graph.py --ranks 4 --layers 4

A step is forward and backward, of the same tokens in all three. Time is the median over rounds of the slowest rank,
with the quartiles beside it; peak memory is what the CPU allocator handed out above its level at the start of a step,
of the rank with most. "eager" rows are the same without a compiler.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from allocations import peak_memory
from launching import is_rank, launch, slowest, write_results
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import mfsdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

SYSTEMS = ("fsdp2, blocks compiled", "hooks, blocks compiled", "graph, compiled", "hooks, eager", "graph, eager")


@dataclass
class Measured:
    """One rank's numbers for one system, per step."""

    seconds: list[float]
    peak_bytes: int


def shard(model: GPT, mesh: DeviceMesh, system: str, backend: str) -> nn.Module:
    """The model ready to be called with (tokens, targets)."""
    style, compiled = system.split(", ")
    if style == "graph":
        mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh), style="graph")
        return torch.compile(model, fullgraph=True, backend=backend) if compiled == "compiled" else model
    plan = mfsdp.plan(model, mesh)
    for block in model.blocks:
        if compiled != "eager":
            block.compile(fullgraph=True, backend=backend)
    for module in (*model.blocks, model):
        if style == "hooks":
            mfsdp.fully_shard(module, mesh=mesh, plan=plan)
        else:
            fsdp2_fully_shard(module, mesh=mesh)
    return model


def work(args: argparse.Namespace) -> None:
    """One rank: measure all systems in turn."""
    dist.init_process_group("gloo")
    torch.set_num_threads(args.threads)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, heads=args.heads, context=args.context)
    models = {system: shard(copy.deepcopy(model), mesh, system, args.backend) for system in SYSTEMS}
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator)
    losses: dict[str, float] = {}

    def step(system: str) -> None:
        loss = models[system](tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses[system] = loss.item()

    measured = {system: Measured([], 0) for system in SYSTEMS}
    for number in range(args.rounds + 2):  # the first two compile and warm up
        for system, result in measured.items():
            dist.barrier()
            start = time.perf_counter()
            step(system)
            dist.barrier()
            if number > 1:
                result.seconds.append(time.perf_counter() - start)
            models[system].zero_grad()
    for system, result in measured.items():
        result.peak_bytes = peak_memory(lambda system=system: step(system))
        models[system].zero_grad()
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the systems do not compute the same loss: {losses}")
    write_results({system: asdict(result) for system, result in measured.items()})
    dist.barrier()
    dist.destroy_process_group()


def report(args: argparse.Namespace, ranks: list[dict[str, Measured]]) -> None:
    """One row for each system; ratios are of the compiled graph to it."""
    print(f"GPT, width {args.width}, {args.layers} layers, batch {args.batch} x {args.context}, {args.ranks} ranks")
    print(f"{'':<26}{'ms / step':>10}{'quartiles':>14}{'graph over it':>15}{'peak MiB':>10}{'graph over it':>15}")

    def times_of(system: str) -> list[float]:
        return slowest(rank[system].seconds for rank in ranks)

    def peak(system: str) -> int:
        return max(rank[system].peak_bytes for rank in ranks)

    median: Callable[[list[float]], float] = statistics.median
    ours = "graph, compiled"
    for system in SYSTEMS:
        times = times_of(system)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        ratio = median([mine / theirs for mine, theirs in zip(times_of(ours), times, strict=True)])
        print(
            f"{system:<26}{median(times) * 1e3:>10.1f}{f'{low * 1e3:.0f} - {high * 1e3:.0f}':>14}{ratio:>15.2f}"
            f"{peak(system) / 2**20:>10.1f}{peak(ours) / peak(system):>15.2f}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    if is_rank():
        work(options)
    else:
        by_rank = launch(options.ranks)
        report(options, [{system: Measured(**numbers) for system, numbers in rank.items()} for rank in by_rank])
