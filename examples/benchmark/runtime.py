"""Forward + backward of ``mfsdp.fully_shard`` against FSDP2: time, peak memory, and bytes.

Both shard the same GPT and take turns in one run, so that whatever else the machine does hits both alike.

    python examples/benchmark/runtime.py --ranks 4                            # loopback
    python examples/benchmark/runtime.py --ranks 8 --nodes 8 --rate 1gbit     # emulated nodes (root)
    python examples/benchmark/runtime.py --ranks 8 --model two-matrices       # fewer matrices than ranks

Peak memory is what the CPU allocator handed out above its level at the start of a step, of the rank with most. Peak
resident set is the largest of a process above that before the model was made; for it each system runs once more, alone
in its processes. Bytes are those at the network interface (``lo``, shared by all ranks, on loopback: then the mean per
rank), protocol headers included.
"""

import argparse
import copy
import ctypes
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocations import peak_memory
from chart import SUFFIX, Bars
from launching import Wire, is_rank, launch, slowest, world, write_results
from options import add_network_arguments, benchmark_parser, network_of, positive
from report import Column, Report, Table, factor, mib
from systems import AGAIN, OURS, add_model_arguments, shape_of
from timing import in_order, milliseconds, noise, ratio
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

import mfsdp
from mfsdp.fsdp.collectives import BroadcastGather
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from mfsdp.fsdp.param_group import OwnerParamGroup

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

SYSTEMS = ("fsdp2", OURS)
LIMITS = (
    "All ranks share this machine's cores, so that waiting for the network overlaps with other ranks' arithmetic. On "
    "gloo FSDP2's reduce_scatter_tensor sends as much as an all-reduce, which it does not on NCCL."
)


class TwoMatrices(nn.Module):
    """One unit with fewer matrices than there are ranks: a tall and a wide one, of equal size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU())])
        self.blocks[0].append(nn.Linear(4 * width, width, bias=False))
        self.width = width

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.nn.functional.one_hot(tokens % self.width, self.width).float()
        return self.blocks[0](x).square().mean()


@dataclass
class Measured:
    """One rank's numbers for one system, per step."""

    seconds: list[float]
    peak_bytes: int = 0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    peak_rss: int = 0


def make(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "two-matrices":
        return TwoMatrices(args.width)
    return GPT(args.width, args.layers, heads=8, context=args.context)


def shard(model: nn.Module, mesh: DeviceMesh, system: str) -> nn.Module:
    if system == OURS:
        plan = mfsdp.plan(model, mesh)
        for module in (*model.blocks, model):
            mfsdp.fully_shard(module, mesh=mesh, plan=plan)
    else:
        for module in (*model.blocks, model):
            fsdp2_fully_shard(module, mesh=mesh)
    return model


def choose_gather(model: nn.Module, name: str) -> None:
    """Make every unit use the gather ``name`` instead of the one that the library's rule chooses."""
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        for group in module._get_fsdp_state()._fsdp_param_groups:
            if isinstance(group, OwnerParamGroup):
                make = {"broadcast": lambda lane: BroadcastGather(), "chain": ChainGather, "resplit": ResplitGather}
                group.use_gather(make[name](Lane.of(group._ranks)))


def resident_set(field: str) -> int:
    """Bytes of this process in memory, now (``VmRSS``) or at most since the last reset (``VmHWM``)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def forget_peak() -> None:
    """Return unused memory to the system, and start the peak of the resident set anew."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def work(args: argparse.Namespace) -> None:
    """One rank: measure the systems in turn."""
    with world(args.threads) as mesh:
        before_model = resident_set("VmRSS")
        model = make(args)
        names = [args.alone] if args.alone else [*SYSTEMS, AGAIN]
        models = {name: shard(copy.deepcopy(model), mesh, name.removesuffix(SUFFIX)) for name in names}
        del model
        for name, sharded in models.items():
            if args.gather != "rule" and name.startswith(OURS):
                choose_gather(sharded, args.gather)
        generator = torch.Generator().manual_seed(dist.get_rank())
        tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator)

        def step(system: str) -> None:
            models[system](tokens[:, :-1], tokens[:, 1:]).backward()

        forget_peak()
        measured = {system: Measured([]) for system in models}
        for number in range(args.rounds + 1):  # the first is a warm-up
            for system in in_order(measured, number):
                result = measured[system]
                dist.barrier()
                before, start = Wire.now(), time.perf_counter()
                step(system)
                dist.barrier()
                if number:
                    result.seconds.append(time.perf_counter() - start)
                    wire = Wire.now() - before
                    result.sent_bytes, result.received_bytes = wire.sent, wire.received
                result.peak_rss = resident_set("VmHWM") - before_model
                models[system].zero_grad()
        if len(models) > 1:
            for system, result in measured.items():
                result.peak_bytes = peak_memory(lambda system=system: step(system))
                models[system].zero_grad()
        write_results({system: asdict(result) for system, result in measured.items()})


def measure(args: argparse.Namespace) -> list[dict[str, Measured]]:
    """Run all ranks, with both systems in turn and then with each alone; their numbers, by rank."""

    def run(*arguments: str) -> list[dict[str, Measured]]:
        by_rank = launch(args.ranks, args.nodes, args.rate, arguments)
        return [{system: Measured(**numbers) for system, numbers in rank.items()} for rank in by_rank]

    together = run()
    for system in SYSTEMS:
        for rank, alone in zip(together, run("--alone", system, "--rounds", "1"), strict=True):
            rank[system].peak_rss = alone[system].peak_rss
    return together


def padded_bytes(args: argparse.Namespace) -> tuple[int, int]:
    """(bytes of all units, the same with every owner's segment padded to the unit's largest)."""
    plan = mfsdp.plan(make(args), args.ranks)
    units: dict[str, dict[int, int]] = {}
    for entry in plan.entries.values():
        if entry.owner is not None:
            held = units.setdefault(entry.unit, {})
            held[entry.owner] = held.get(entry.owner, 0) + entry.parameter_bytes
    exact = sum(sum(held.values()) for held in units.values())
    return exact, sum(args.ranks * max(held.values()) for held in units.values())


def table(args: argparse.Namespace, by_rank: list[dict[str, Measured]]) -> Table:
    rows: list[dict[str, Any]] = []
    for system in by_rank[0]:
        ranks = [rank[system] for rank in by_rank]
        rows.append(
            {
                "system": system,
                "seconds": slowest(rank.seconds for rank in ranks),
                "peak": max(rank.peak_bytes for rank in ranks),
                "rss": max(rank.peak_rss for rank in ranks) or None,  # of the second run there is none
                "sent": statistics.mean(rank.sent_bytes for rank in ranks),
                "received": statistics.mean(rank.received_bytes for rank in ranks),
            }
        )
    theirs = rows[0]
    for row in rows:
        row["seconds_ratio"] = ratio(row["seconds"], theirs["seconds"])
        row |= {f"{key}_ratio": row[key] / theirs[key] for key in ("peak", "rss", "sent") if row[key]}
    exact, padded = padded_bytes(args)
    notes = [
        f"owned units: {mib(exact)}; a gather that pads segments would move {padded / exact:.1f}x that.",
        noise(OURS, rows[1]["seconds"], rows[2]["seconds"]),
    ]
    charts = [
        Bars(
            "forward and backward",
            "milliseconds",
            {row["system"]: statistics.median(row["seconds"]) * 1e3 for row in rows},
        ),
        Bars("peak memory of it", "MiB", {row["system"]: row["peak"] / 2**20 for row in rows}),
    ]
    return Table(f"{args.ranks} ranks, {network_of(args)}", COLUMNS, rows, notes, charts)


COLUMNS = (
    Column("system", ""),
    Column("seconds", "time", milliseconds),
    Column("seconds_ratio", "over fsdp2", factor),
    Column("peak", "peak memory", mib),
    Column("peak_ratio", "over fsdp2", factor),
    Column("rss", "peak resident set", mib),
    Column("rss_ratio", "over fsdp2", factor),
    Column("sent", "sent by a rank", mib),
    Column("sent_ratio", "over fsdp2", factor),
    Column("received", "received", mib),
)


def arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    add_network_arguments(parser)
    parser.add_argument("--model", choices=["gpt", "two-matrices"], default="gpt")
    add_model_arguments(parser)
    parser.set_defaults(width=512)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--threads", type=positive, default=1)
    gathers = ["rule", "broadcast", "chain", "resplit"]
    parser.add_argument("--gather", choices=gathers, default="rule", help="how mfsdp gathers")
    if is_rank():
        parser.add_argument("--alone", choices=SYSTEMS, help="measure only this one")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if is_rank():
        work(args)
        return
    shape = shape_of(args)
    if args.model != "gpt":
        shape = f"one unit of two matrices, {shape.partition(', ')[2]}"
    report = Report(args, "Forward and backward against FSDP2", shape, LIMITS, args.threads)
    report.add(table(args, measure(args)))


if __name__ == "__main__":
    main()
