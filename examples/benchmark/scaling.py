"""How the costs of mfsdp scale: measured on 1 to 8 ranks here, and from the cost model on 64 to 1,024 of a cluster.

    python examples/benchmark/scaling.py --ranks 1 2 4 8
    python examples/benchmark/scaling.py --ranks --model llama3-8b gpt2-124m --simulate 64 128 256 512 1024

Measured are the optimizer step, the gather of all units one after the other, the reduction of all gradients (backward
with it less backward without), and planning; times of the slowest rank. Simulated are the busiest rank's step and the
time that a rank's link needs for all gathers and reductions of one training step, from the plan alone: ``--tflops`` a
rank of Newton-Schulz and ``--gbytes`` per second of network are an A100 cluster's by default. With fewer matrices than
ranks the step cannot become shorter than the largest matrix's.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from chart import SUFFIX, Lines
from launching import RANK_THREADS, is_rank, launch, slowest, world, write_results
from options import benchmark_parser, positive, positive_number
from report import Column, Report, Table
from systems import OURS, SYSTEMS, add_model_arguments, model_of, shape_of
from timing import in_order, milliseconds, noise, own_time
from torch.distributed.fsdp import FSDPModule

import mfsdp
from mfsdp.planning import MuonCost, Role, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.traffic import unit_traffic

ACTIVITIES = {
    "step": "optimizer step",
    "gather": "gather of all units",
    "reduce": "reduction of all gradients",
    "plan": "planning",
}
AGAIN = "step" + SUFFIX


def work(args: argparse.Namespace) -> None:
    """One rank."""
    with world() as mesh:
        planned = model_of(args)
        found: dict[str, list[float]] = {name: [] for name in (*ACTIVITIES, AGAIN)}
        found["plan"] = [own_time(lambda: mfsdp.plan(planned, mesh, cost_model=MuonCost())) for _ in range(args.rounds)]
        setup = SYSTEMS[OURS](model_of(args), mesh)
        model = setup.model
        assert isinstance(model, FSDPModule)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        tokens = torch.randint(256, (args.batch, args.context + 1))

        def gather() -> None:
            for unit in units:
                unit.unshard()
                unit.reshard()

        def backward(synchronised: bool) -> float:
            model.set_requires_gradient_sync(synchronised)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            return own_time(loss.backward)

        def step() -> None:
            for optimizer in setup.optimizers:
                optimizer.step()

        for number in range(args.rounds + 1):  # the first is a warm-up
            alone = backward(synchronised=False)
            reduction = backward(synchronised=True) - alone
            timed = {"step": step, "gather": gather, AGAIN: step}
            times = {name: own_time(timed[name]) for name in in_order(timed, number)} | {"reduce": reduction}
            for optimizer in setup.optimizers:
                optimizer.zero_grad()
            if number:
                for name, elapsed in times.items():
                    found[name].append(elapsed)
        write_results(found)


def measured(args: argparse.Namespace) -> Table:
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        by_rank = launch(ranks)
        rows.append({"ranks": ranks, **{name: slowest(rank[name] for rank in by_rank) for name in by_rank[0]}})
    columns = [Column("ranks", "ranks"), *(Column(key, name, milliseconds) for key, name in ACTIVITIES.items())]
    notes = [f"{row['ranks']} ranks, {noise('the step', row['step'], row[AGAIN])}" for row in rows]
    notes.append("the reduction is a difference of two times, and as noisy as both; below 0 it is lost in the noise.")
    series = {name: [statistics.median(row[key]) * 1e3 for row in rows] for key, name in ACTIVITIES.items()}
    chart = Lines("measured on one machine", "milliseconds", "ranks", args.ranks, series, log_axis=True)
    return Table("Measured, loopback", columns, rows, notes, [chart])


def simulated(args: argparse.Namespace, name: str) -> Table:
    """One model of the catalogue on many ranks."""
    specs = catalogue_specs(name, torch.bfloat16)
    cost_model = MuonCost()
    matrices = [spec for spec in specs if spec.role is Role.MATRIX]
    largest = max(cost_model.step_flops(spec) for spec in matrices)
    rows: list[dict[str, Any]] = []
    for ranks in args.simulate:
        planning = []
        for _ in range(2):
            start = time.process_time()
            plan = plan_specs(specs, ranks, cost_model=cost_model)
            planning.append(time.process_time() - start)
        flops = [load.step_flops for load in plan.loads()]
        moved = sum(2 * unit.gather_bytes + unit.reduce_bytes for unit in unit_traffic(plan))
        rows.append(
            {
                "ranks": ranks,
                "matrices": len(matrices),
                "idle": sum(load.matrices == 0 for load in plan.loads()),
                "step": max(flops) / args.tflops / 1e12,
                "bound": max(sum(flops) / ranks, largest) / args.tflops / 1e12,
                "one_rank": sum(flops) / args.tflops / 1e12,
                "network": moved * (ranks - 1) / ranks / args.gbytes / 1e9,
                "plan": min(planning),
                "plan_noise": max(planning) / min(planning) - 1,
            }
        )
    title = f"{name}, simulated: {args.tflops:g} TFLOP/s and {args.gbytes:g} GB/s a rank"
    noisiest = max(row["plan_noise"] for row in rows)
    notes = [
        "from the plan alone, parameters and gradients in bf16; no plan can be below the bound, which is the mean of "
        "all ranks or the largest matrix; the network is what a rank's link receives in a training step.",
        f"noise: none but in the CPU time of planning, of which two runs differ by up to {noisiest:.0%}.",
    ]
    series = {key: [row[key] * 1e3 for row in rows] for key in ("step", "bound", "one_rank")}
    series = {{"one_rank": "every rank steps all"}.get(key, key): values for key, values in series.items()}
    chart = Lines(f"{name}, simulated step", "milliseconds", "ranks", args.simulate, series, True, True)
    return Table(title, SIMULATED, rows, notes, [chart])


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


SIMULATED = (
    Column("ranks", "ranks", "{:,}".format),
    Column("matrices", "matrices"),
    Column("idle", "ranks without one"),
    Column("step", "step", _short),
    Column("bound", "bound", _short),
    Column("one_rank", "every rank steps all", _short),
    Column("network", "network", _short),
    Column("plan", "planning, CPU", _short),
)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--simulate", type=positive, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--model", nargs="+", choices=model_names(), default=["llama3-8b", "gpt2-124m"])
    parser.add_argument(
        "--tflops", type=positive_number, default=200.0, help="Newton-Schulz of one rank, in 10^12 per second"
    )
    parser.add_argument(
        "--gbytes", type=positive_number, default=25.0, help="network of one rank, in 10^9 bytes per second"
    )
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    if not args.ranks and not args.simulate:
        parser.error("neither --ranks to measure nor ranks to --simulate")
    if is_rank():
        work(args)
        return
    limits = (
        "The measured ranks share this machine's cores: work that is divided among them does not become faster with "
        "more of them than cores, and gathers, which each rank makes, become slower."
    )
    report = Report(args, "Scaling of mfsdp", shape_of(args), limits, RANK_THREADS)
    if args.ranks:
        report.add(measured(args))
    for name in args.model if args.simulate else ():
        report.add(simulated(args, name))


if __name__ == "__main__":
    main()
