"""Memory of every way to train with Muon on several ranks, measured, and as the planner predicts it.

    python examples/benchmark/memory.py --ranks 2 4 8
    python examples/benchmark/memory.py --predict qwen3-14b qwen3-32b

Each system trains the same GPT alone in its processes. *Resident* are the storages of all tensors after a step, before
gradients are dropped; the peaks are what the CPU allocator had handed out at most during the optimizer step, and during
forward and backward, with what was resident before. The rank with most counts. The planner predicts resident bytes and
the peak in the step; what a model computes in forward and backward it does not know.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from allocations import peak_memory, resident_memory
from launching import is_rank, launch, write_results
from systems import SYSTEMS, add_model_arguments, model_of
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.planning import CostModel, MuonCost, Precision, plan_specs
from mfsdp.planning.catalogue import catalogue_specs
from mfsdp.planning.comparison import compare

PREDICTED = {"mfsdp": "mfsdp", "stock": "zero3", "gather-once": "gather-once", "zero1-owner": "zero1-owner"}
"""System -> what the planner calls it."""


def work(args: argparse.Namespace) -> None:
    """One rank, with one system."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    before = resident_memory()
    setup = SYSTEMS[args.system](model_of(args), mesh)
    tokens = torch.randint(256, (args.batch, args.context + 1))

    def compute() -> None:
        setup.model(tokens[:, :-1], tokens[:, 1:]).backward()

    def step() -> None:
        for optimizer in setup.optimizers:
            optimizer.step()

    def drop() -> None:
        for optimizer in setup.optimizers:
            optimizer.zero_grad()

    for _ in range(2):  # after two steps all state and all buffers are there
        drop()
        compute()
        step()
    resident = resident_memory() - before
    stepping = peak_memory(step)
    drop()
    kept = resident_memory() - before
    computing = peak_memory(compute)
    write_results({"resident": resident, "step": resident + stepping, "compute": kept + computing})
    dist.barrier()
    dist.destroy_process_group()


def predicted(plan: mfsdp.ShardPlan, cost_model: CostModel) -> dict[str, tuple[int, int]]:
    """System -> predicted resident bytes and peak in the step, of the rank with most."""
    schemes = {scheme.name: scheme for scheme in compare(plan, cost_model)}
    return {system: (schemes[name].resident_bytes, schemes[name].peak_bytes) for system, name in PREDICTED.items()}


def measure(args: argparse.Namespace, ranks: int) -> dict[str, dict[str, Any]]:
    """System -> its bytes, measured and predicted."""
    cost_model = MuonCost()
    expected = predicted(mfsdp.plan(model_of(args), ranks, cost_model=cost_model), cost_model)
    rows: dict[str, dict[str, Any]] = {}
    for system in args.systems:
        by_rank = launch(ranks, arguments=["--system", system])
        rows[system] = {key: max(rank[key] for rank in by_rank) for key in by_rank[0]}
        rows[system]["predicted"] = expected.get(system)
    return rows


def table(rows: dict[str, dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| | resident | predicted | peak in the step | predicted | peak in forward and backward |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for system, row in rows.items():
        resident, peak = (against(row, index) for index in range(2))
        lines.append(
            f"| {system} | {mib(row['resident'])} | {resident} | {mib(row['step'])} | {peak} | {mib(row['compute'])} |"
        )
    return "\n".join(lines)


def against(row: dict[str, Any], index: int) -> str:
    """What was predicted, and its difference from what was measured."""
    if row["predicted"] is None:
        return ""
    value, measured = row["predicted"][index], row[("resident", "step")[index]]
    return f"{mib(value)} ({value / measured - 1:+.1%})"


def mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def predictions(models: list[str], ranks: int) -> str:
    """Of models of the catalogue, parameters and gradients in bf16 with an fp32 master copy, as Markdown."""
    cost_model = MuonCost(precision=Precision(master=torch.float32))
    lines = [f"| on {ranks} ranks | resident | peak in the step |", "|---|---:|---:|"]
    for name in models:
        plan = plan_specs(catalogue_specs(name, torch.bfloat16), ranks, cost_model=cost_model)
        for system, (resident, peak) in predicted(plan, cost_model).items():
            lines.append(f"| {name}, {system} | {resident / 2**30:.2f} GiB | {peak / 2**30:.2f} GiB |")
    return "\n".join(lines)


def report(args: argparse.Namespace) -> None:
    results = {}
    for ranks in args.ranks:
        results[ranks] = measure(args, ranks)
        print(
            f"GPT of {args.layers} blocks, width {args.width}, {args.batch} x {args.context} tokens a rank, "
            f"{ranks} ranks, torch {torch.__version__}\n\n{table(results[ranks])}\n"
        )
    if args.predict:
        print(f"Predictions, parameters and gradients in bf16, fp32 master copy\n\n{predictions(args.predict, 64)}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--predict", nargs="*", default=["qwen3-14b", "qwen3-32b"], help="models of the catalogue")
    add_model_arguments(parser)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write the bytes to this file")
    parser.add_argument("--system", help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if is_rank():
        work(args)
    else:
        report(args)


if __name__ == "__main__":
    main()
