"""How long planning takes, and how even plans of public models are.

``python examples/benchmark/planner.py time`` plans models of up to 100,000 parameters for up to 1,024 ranks, on
one core, and prints CPU seconds and the memory of the process. ``... evenness`` prints how even plans are, and what
is in the way of more.
"""

import gc
import os
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from chart import Lines
from options import at_least, benchmark_parser, positive
from report import Column, Report, Table

from mfsdp.planning import ParameterSpec, Role, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.cost import MuonCost
from mfsdp.planning.summary import Summary

LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
PARAMETERS = (1_000, 10_000, 100_000)
RANKS = (8, 64, 256, 1024)
NO_CAP = 1 << 62


def model(parameters: int, distinct: bool) -> list[ParameterSpec]:
    """``parameters`` in layers of 7 matrices and 3 vectors; with ``distinct``, no two matrices are alike."""
    rng = random.Random(0)
    specs = []
    for number in range(parameters):
        layer, index = divmod(number, len(LAYER) + 3)
        unit = f"layers.{layer}"
        if index >= len(LAYER):
            specs.append(ParameterSpec(f"{unit}.vector{index}", Role.TAIL, (4096,), torch.float32, unit))
            continue
        shape = (rng.randint(64, 8192), rng.randint(64, 8192)) if distinct else LAYER[index]
        specs.append(ParameterSpec(f"{unit}.matrix{index}.weight", Role.MATRIX, shape, torch.float32, unit))
    return specs


def seconds(specs: Sequence[ParameterSpec], ranks: int, rounds: int) -> float:
    """The least CPU seconds of a few runs: what planning itself takes, whatever else the machine does."""
    found = []
    for _ in range(rounds):
        gc.collect()
        start = time.process_time()
        plan_specs(specs, ranks)
        found.append(time.process_time() - start)
    return min(found)


def times(largest: int, rounds: int) -> Table:
    """CPU seconds of planning, by number of parameters and ranks."""
    rows: list[dict[str, Any]] = []
    for parameters in (number for number in PARAMETERS if number <= largest):
        for distinct in (False, True):
            specs = model(parameters, distinct)
            found = {f"{ranks} ranks": seconds(specs, ranks, rounds) for ranks in RANKS}
            rows.append({"parameters": parameters, "shapes": "all different" if distinct else "5", **found})
    again = seconds(specs, RANKS[-1], rounds)
    columns = [
        Column("parameters", "parameters", "{:,}".format),
        Column("shapes", "shapes"),
        *(Column(f"{ranks} ranks", f"{ranks:,} ranks", "{:.3f} s".format) for ranks in RANKS),
    ]
    series = {f"{row['parameters']:,}, {row['shapes']}": [row[f"{ranks} ranks"] for ranks in RANKS] for row in rows}
    differ = abs(again / rows[-1][f"{RANKS[-1]} ranks"] - 1)
    notes = [f"noise: two runs of the last cell differ by {differ:.1%}."]
    chart = Lines("planning, by parameters and shapes", "CPU seconds", "ranks", RANKS, series, log=True, log_axis=True)
    return Table("Planning", columns, rows, notes, [chart])


def _limit(summary: Summary) -> str:
    """What keeps operations or bytes above 1.05, in a few words."""
    (flops, nbytes), reached = summary.ratios, summary.reached
    found = []
    for what, ratio, bound, value in zip(("step", "bytes"), (flops, nbytes), summary.bounds, reached, strict=True):
        if ratio <= 1.05:
            continue
        if value <= 1.01 * bound.value:
            found.append(f"{what}: {bound.value / bound.simple:.3f} is proven to be least, {bound.reason}")
            continue
        entries = [entry.spec for entry in summary.plan.entries.values()]
        free = Summary(plan_specs(entries, summary.plan.world_size, bytes_cap=NO_CAP), summary.cost_model)
        found.append(
            f"{what}: the cap on bytes; without it {free.ratios[0]:.3f} with bytes {free.ratios[1]:.3f}; "
            f"{bound.value / bound.simple:.3f} is proven to be least"
        )
    return "; ".join(found)


def evenness(models: Sequence[str]) -> Table:
    """The fullest and the busiest rank over what no plan could be below, or nearly."""
    rows: list[dict[str, Any]] = []
    for name in models:
        for ranks in RANKS:
            made = plan_specs(catalogue_specs(name), ranks)
            summary = Summary(made, MuonCost())
            loads = made.loads()
            flops, nbytes = summary.ratios
            rows.append(
                {
                    "model": name,
                    "ranks": ranks,
                    "matrices": sum(load.matrices for load in loads),
                    "idle": sum(not load.matrices for load in loads),
                    "step": flops,
                    "bytes": nbytes,
                    "limit": _limit(summary),
                }
            )
    columns = [
        Column("model", "model"),
        Column("ranks", "ranks", "{:,}".format),
        Column("matrices", "matrices", "{:,}".format),
        Column("idle", "idle ranks"),
        Column("step", "step", "{:.3f}".format),
        Column("bytes", "bytes", "{:.3f}".format),
        Column("limit", "what is in the way"),
    ]
    charts = [
        Lines(
            f"{what}, over max(mean, largest item)",
            "ratio",
            "ranks",
            RANKS,
            {name: [row[what] for row in rows if row["model"] == name] for name in models},
            log_axis=True,
        )
        for what in ("step", "bytes")
    ]
    return Table("Plans", columns, rows, ["no noise: planning is deterministic."], charts)


def main() -> None:
    """Print one of the two tables."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("table", choices=("time", "evenness"))
    parser.add_argument(
        "--largest", type=at_least(PARAMETERS[0]), default=PARAMETERS[-1], help="most parameters to time"
    )
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--models", nargs="+", choices=model_names(), default=model_names())
    args = parser.parse_args()
    if args.table == "evenness":
        shape = "Muon in fp32; the fullest or busiest rank over max(mean of all ranks, largest item)"
        limits = "The bounds that are named are proven; where none is, the ratio is 1.05 or less."
        Report(args, "How even plans of public models are", shape, limits).add(evenness(args.models))
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    shape = f"models of up to {args.largest:,} parameters; CPU seconds on one core, least of {args.rounds} runs"
    report = Report(args, "How long planning takes", shape, "It is Python on one core; other load hardly shows.")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = times(args.largest, args.rounds)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = f"memory of the process: {after / 1024:.0f} MiB, of which {before / 1024:.0f} MiB before planning."
    report.add(replace(table, notes=[*table.notes, memory]))


if __name__ == "__main__":
    main()
