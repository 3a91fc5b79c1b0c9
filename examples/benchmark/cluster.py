"""Ways to train with Muon on an emulated cluster: network namespaces joined by a bridge, the egress of each limited.

    python examples/benchmark/cluster.py                                       # everything
    python examples/benchmark/cluster.py --worlds 4x2 8x1 --rates 200mbit      # in parts

Needs Linux, root (for namespaces), and ``ip`` and ``tc`` of iproute2. Nodes and ranks are cleared away at the end,
whatever the end is. ``--worlds 4x2`` are 4 nodes of 2 ranks each. One node has no network, so it is measured once.

A *matched* rate makes the links stand to the Newton-Schulz arithmetic of a rank here as those of a GPU cluster do
there: an A100 does about 200 TFLOP/s of it and has 12.5 to 25 GB/s of network, which is 8,000 to 16,000 operations for
a byte; 12,000 is taken. The arithmetic is measured first, with all ranks busy at once; a node with several ranks gets
as many times the rate.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from chart import Chart, Lines
from comparison import STOCK, Result, add_comparison_arguments, measure, step_table, work
from emulated_nodes import unavailable
from launching import RANK_THREADS, is_rank, launch, world, write_results
from options import World, benchmark_parser, rate
from report import Column, Report, Table, factor
from systems import AGAIN, OURS, shape_of
from timing import ratio

from mfsdp.optim import newton_schulz
from mfsdp.planning.cost import newton_schulz_flops

FLOP_PER_BYTE = 12_000
MATCHED = "matched"
LIMITS = (
    "Several ranks share this machine's cores, so that waiting for the network overlaps with other ranks' arithmetic, "
    "and what a network costs is understated, the more so the higher its rate; the emulated links have a bandwidth but "
    f"no latency to speak of. {STOCK}"
)


def rate_of_a_node(text: str) -> str:
    """A rate as ``tc`` writes it, or the matched one."""
    return text if text == MATCHED else rate(text)


@dataclass(frozen=True)
class Cell:
    """One world at one rate, measured."""

    world: World
    rate: str
    results: list[Result]


def newton_schulz_rate(args: argparse.Namespace) -> None:
    """One rank: operations per second in Newton-Schulz of a matrix of the model, while all ranks do the same."""
    with world():
        matrix = torch.randn(args.width, args.width)
        newton_schulz(matrix)
        dist.barrier()
        start, repeats = time.perf_counter(), max(10, 200_000_000 // args.width**3)
        for _ in range(repeats):
            newton_schulz(matrix)
        dist.barrier()
        flops = repeats * newton_schulz_flops(args.width, args.width, 5)
        write_results(flops / (time.perf_counter() - start))


def matched_bits(ranks: int) -> tuple[float, str]:
    """Bits per second of a rank's matched link, and how it was found."""
    rate = statistics.mean(launch(ranks, arguments=["--measure-rate"]))
    bits = rate / FLOP_PER_BYTE * 8
    how = (
        f"{ranks} ranks do {rate / 1e9:.1f} GFLOP/s of Newton-Schulz each; at {FLOP_PER_BYTE:,} operations for a byte "
        f"a rank's matched link has {bits / 1e6:.1f} Mbit/s."
    )
    return bits, how


def measure_cell(args: argparse.Namespace, place: World, rate: str, report: Report) -> Cell:
    """Measure one world at one rate, and add its table to the report."""
    systems, plot = ["--systems", *args.systems], len(args.worlds) == 1  # otherwise the summary has pictures
    if place.nodes == 1:
        cell = Cell(place, "no network", measure(place.ranks, 1, "100gbit", systems))
        report.add(step_table(f"{place}", cell.results, plot=plot))
        return cell
    notes: tuple[str, ...] = ()
    shown = limit = rate
    if rate == MATCHED:
        bits, how = matched_bits(place.ranks)
        limit = f"{bits * place.ranks_per_node / 1e3:.0f}kbit"
        shown = f"a matched {bits * place.ranks_per_node / 1e6:.1f} Mbit/s"
        notes = (how,)
    cell = Cell(place, rate, measure(place.ranks, place.nodes, limit, systems))
    report.add(step_table(f"{place}, {shown}", cell.results, notes, plot))
    return cell


def summary(cells: list[Cell], what: str) -> Table:
    """How many times as long as mfsdp each system takes, in all cells."""

    def times(result: Result) -> list[float]:
        return result.step if what == "optimizer step" else result.whole

    systems = [result.system for result in cells[0].results if result.system != OURS]
    rows: list[dict[str, Any]] = []
    for cell in cells:
        ours = times(cell.results[0])
        ratios = {result.system: ratio(times(result), ours) for result in cell.results if result.system != OURS}
        rows.append({"world": str(cell.world), "nodes": cell.world.nodes, "rate": cell.rate, **ratios})
    columns = [
        Column("world", ""),
        Column("rate", "rate of a node"),
        *(Column(system, system, factor) for system in systems),
    ]
    return Table(f"The {what} over mfsdp's", columns, rows, (f"{AGAIN} shows the noise.",), charts(rows, systems, what))


def charts(rows: list[dict[str, Any]], systems: list[str], what: str) -> list[Chart]:
    """One picture for each rate, over the number of nodes; one node belongs to all of them."""
    found: list[Chart] = []
    alone = [row for row in rows if row["nodes"] == 1]
    if len({row["nodes"] for row in rows}) == 1:
        return found
    for shown in dict.fromkeys(row["rate"] for row in rows if row["nodes"] > 1):
        chosen = sorted([*alone, *(row for row in rows if row["rate"] == shown)], key=lambda row: row["nodes"])
        series = {system: [row[system] for row in chosen] for system in systems}
        at = [row["nodes"] for row in chosen]
        found.append(Lines(f"{what} over mfsdp's, {shown}", "times mfsdp's", "nodes", at, series, True, True))
    return found


def main() -> None:
    parser = benchmark_parser(__doc__)
    worlds = [World(1, 8), World(2, 4), World(4, 2), World(8, 1)]
    parser.add_argument("--worlds", nargs="+", type=World.parse, default=worlds, metavar="NODESxRANKS")
    rates = ["1gbit", "200mbit", MATCHED]
    parser.add_argument(
        "--rates", nargs="+", type=rate_of_a_node, default=rates, help="egress of a node as tc writes it, or matched"
    )
    add_comparison_arguments(parser, rounds=3)
    parser.set_defaults(width=256, layers=4)
    if is_rank():
        parser.add_argument("--measure-rate", action="store_true")
    args = parser.parse_args()
    if is_rank():
        newton_schulz_rate(args) if args.measure_rate else work(args)
        return
    reason = unavailable()
    if reason:
        raise SystemExit(reason)
    report = Report(args, "Training on an emulated cluster", shape_of(args), LIMITS, RANK_THREADS)
    cells = []
    for place in args.worlds:
        cells += [measure_cell(args, place, rate, report) for rate in (args.rates if place.nodes > 1 else ["none"])]
    for what in ("optimizer step", "training step"):
        report.add(summary(cells, what))


if __name__ == "__main__":
    main()
