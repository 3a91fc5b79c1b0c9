"""A training step of ``style="graph"``, compiled as one graph, against hooks style and FSDP2 compiled per block.

All three shard the same GPT and take turns in one run, so that whatever else the machine does hits all alike.

    python examples/benchmark/graph.py --ranks 2
    python examples/benchmark/graph.py --ranks 4 --layers 4

A step is forward and backward, of the same tokens in all three; peak memory is what the CPU allocator handed out above
its level at the start of a step, of the rank with most. "eager" rows are the same without a compiler.
"""

import argparse
import copy
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocations import peak_memory
from chart import SUFFIX, Bars
from launching import is_rank, launch, slowest, world, write_results
from options import benchmark_parser, positive
from report import Column, Report, Table, factor, mib
from systems import add_model_arguments, shape_of
from timing import in_turns, milliseconds, noise, until_all
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import mfsdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

GRAPH = "graph, compiled"
WARM_UP = 2
"""Rounds: the first compiles."""
SYSTEMS = (
    "fsdp2, blocks compiled",
    "hooks, blocks compiled",
    GRAPH,
    "hooks, eager",
    "graph, eager",
    GRAPH + SUFFIX,
)


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
    with world(args.threads) as mesh:
        torch.manual_seed(0)
        model = GPT(args.width, args.layers, heads=args.heads, context=args.context)
        models = {
            system: shard(copy.deepcopy(model), mesh, system.removesuffix(SUFFIX), args.backend) for system in SYSTEMS
        }
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator)
        losses: dict[str, float] = {}

        def step(system: str) -> None:
            models[system].zero_grad()
            loss = models[system](tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses[system] = loss.item()

        steps = {system: partial(step, system) for system in SYSTEMS}
        times = in_turns(steps, args.rounds, WARM_UP, clock=until_all)
        for model in models.values():
            model.zero_grad()
        measured = {}
        for system in SYSTEMS:
            measured[system] = {"seconds": times[system], "peak": peak_memory(steps[system])}
            models[system].zero_grad()
        if max(losses.values()) - min(losses.values()) > 1e-4:
            raise SystemExit(f"the systems do not compute the same loss: {losses}")
        write_results(measured)


def table(args: argparse.Namespace, by_rank: list[dict[str, Any]]) -> Table:
    """One row for each system; ratios are of the compiled graph to it."""
    rows: list[dict[str, Any]] = [
        {
            "system": system,
            "seconds": slowest(rank[system]["seconds"] for rank in by_rank),
            "peak": max(rank[system]["peak"] for rank in by_rank),
        }
        for system in SYSTEMS
    ]
    ours = next(row for row in rows if row["system"] == GRAPH)
    for row in rows:
        pairs = zip(ours["seconds"], row["seconds"], strict=True)
        row["seconds_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
        row["peak_ratio"] = ours["peak"] / row["peak"]
    columns = [
        Column("system", ""),
        Column("seconds", "time", milliseconds),
        Column("seconds_ratio", "graph over it", factor),
        Column("peak", "peak memory", mib),
        Column("peak_ratio", "graph over it", factor),
    ]
    note = noise(GRAPH, ours["seconds"], rows[-1]["seconds"])
    chart = Bars(
        "forward and backward",
        "milliseconds",
        {row["system"]: statistics.median(row["seconds"]) * 1e3 for row in (ours, *rows)},
    )
    return Table(f"{args.ranks} ranks, loopback", columns, rows, [note], [chart])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    add_model_arguments(parser)
    parser.set_defaults(width=256, layers=4, batch=4)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument(
        "--backend", choices=["inductor", "aot_eager", "eager"], default="inductor", help="of torch.compile"
    )
    parser.add_argument("--threads", type=positive, default=1)
    args = parser.parse_args()
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if is_rank():
        work(args)
        return
    limits = "All ranks share this machine's cores, and gathers and reductions are copies over loopback."
    report = Report(args, "Forward and backward as one compiled graph", shape_of(args, WARM_UP), limits, args.threads)
    report.add(table(args, launch(args.ranks)))


if __name__ == "__main__":
    main()
