"""How mfsdp scales: measured on 1 to 8 ranks here, and from the cost model on 64 to 1,024 ranks of a cluster.

    python examples/benchmark/scaling.py --ranks 1 2 4 8
    python examples/benchmark/scaling.py --model llama3-8b --simulate 64 128 256 512 1024

Measured are the optimizer step, the gather of all units one after the other, the reduction of all gradients (backward
with it less backward without), and planning; medians of the slowest rank, with ranks that share the cores of one
machine. Simulated are the busiest rank's step and the time that a rank's link needs for all gathers and reductions of
one training step, from the plan alone: ``--tflops`` a rank of Newton-Schulz and ``--gbytes`` per second of network are
an A100 cluster's by default. With fewer matrices than ranks the step cannot become shorter than the largest matrix's.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import is_rank, launch, slowest, write_results
from systems import SYSTEMS, add_model_arguments, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import mfsdp
from mfsdp.planning import MuonCost, Role, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.traffic import unit_traffic


def seconds(action: Callable[[], object]) -> float:
    """Time of an action that all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def work(args: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    planned = model_of(args)
    planning = [seconds(lambda: mfsdp.plan(planned, mesh, cost_model=MuonCost())) for _ in range(args.rounds)]
    setup = SYSTEMS["mfsdp"](model_of(args), mesh)
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
        return seconds(loss.backward)

    def step() -> None:
        for optimizer in setup.optimizers:
            optimizer.step()

    found: dict[str, list[float]] = {"step": [], "gather": [], "reduce": [], "plan": planning}
    for number in range(args.rounds + 1):  # the first is a warm-up
        alone = backward(synchronised=False)
        together = backward(synchronised=True)
        times = {"step": seconds(step), "gather": seconds(gather), "reduce": together - alone}
        for optimizer in setup.optimizers:
            optimizer.zero_grad()
        if number:
            for name, elapsed in times.items():
                found[name].append(elapsed)
    write_results(found)
    dist.barrier()
    dist.destroy_process_group()


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for ranks in args.ranks:
        by_rank = launch(ranks)
        row: dict[str, Any] = {"ranks": ranks}
        for name in by_rank[0]:
            row[name] = statistics.median(slowest(rank[name] for rank in by_rank))
        rows.append(row)
    return rows


def simulate(args: argparse.Namespace) -> list[dict[str, Any]]:
    specs = catalogue_specs(args.model, torch.bfloat16)
    cost_model = MuonCost()
    matrices = [spec for spec in specs if spec.role is Role.MATRIX]
    largest = max(cost_model.step_flops(spec) for spec in matrices)
    rows = []
    for ranks in args.simulate:
        start = time.process_time()
        plan = plan_specs(specs, ranks, cost_model=cost_model)
        planning = time.process_time() - start
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
                "plan": planning,
            }
        )
    return rows


def tables(args: argparse.Namespace, measured: list[dict[str, Any]], simulated: list[dict[str, Any]]) -> str:
    lines = []
    if measured:
        lines.append(f"GPT of {args.layers} blocks, width {args.width}, torch {torch.__version__}, one thread a rank\n")
        lines.append("| ranks | optimizer step | gather of all units | reduction of all gradients | planning |")
        lines.append("|---:|---:|---:|---:|---:|")
        lines += [
            f"| {row['ranks']} | {row['step'] * 1e3:.0f} ms | {row['gather'] * 1e3:.0f} ms "
            f"| {row['reduce'] * 1e3:.0f} ms | {row['plan'] * 1e3:.1f} ms |"
            for row in measured
        ]
        lines.append("")
    if simulated:
        lines.append(
            f"{args.model}, {args.tflops:g} TFLOP/s and {args.gbytes:g} GB/s a rank, parameters and gradients in bf16\n"
        )
        lines.append("| ranks | matrices | idle ranks | step | no plan below | one rank alone | network | planning |")
        lines.append("|---:|---:|---:|---:|---:|---:|---:|---:|")
        lines += [
            f"| {row['ranks']:,} | {row['matrices']} | {row['idle']} | {row['step'] * 1e3:.2f} ms "
            f"| {row['bound'] * 1e3:.2f} ms | {row['one_rank'] * 1e3:,.0f} ms | {row['network'] * 1e3:,.0f} ms "
            f"| {row['plan'] * 1e3:.0f} ms |"
            for row in simulated
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--simulate", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--model", choices=model_names(), default="llama3-8b")
    parser.add_argument("--tflops", type=float, default=200.0, help="Newton-Schulz of one rank, in 10^12 per second")
    parser.add_argument("--gbytes", type=float, default=25.0, help="network of one rank, in 10^9 bytes per second")
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    measured, simulated = measure(args), simulate(args)
    print(tables(args, measured, simulated))
    if args.json:
        args.json.write_text(json.dumps({"measured": measured, "simulated": simulated}, indent=1))


if __name__ == "__main__":
    main()
