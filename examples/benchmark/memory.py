"""Memory of every way to train with Muon on several ranks, measured, and as the planner predicts it.

    python examples/benchmark/memory.py --ranks 2 4 8

All systems train the same GPT, one after the other in the same processes. *Resident* are the storages of all tensors
before a step, with gradients and all state. The peaks are what the CPU allocator had handed out at most during the
optimizer step, and during forward and backward, with what was resident before. The rank with most counts. Resident
bytes are the same in each run; a peak depends a little on when the threads of gloo free what they have used. The
planner predicts resident bytes and the peak in the step; what a model computes in forward and backward it does not
know.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from allocations import peak_memory, resident_memory
from chart import SUFFIX, Bars
from launching import RANK_THREADS, is_rank, launch, world, write_results
from options import benchmark_parser, positive
from report import Column, Report, Table, factor, mib
from systems import AGAIN, OURS, SYSTEMS, add_model_arguments, model_of
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.planning import CostModel, MuonCost, Precision, Role, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.comparison import compare

PREDICTED = {"mfsdp": "mfsdp", "stock": "zero3", "gather-once": "gather-once", "zero1-owner": "zero1-owner"}
"""System -> what the planner calls it."""


def work(args: argparse.Namespace) -> None:
    """One rank."""
    with world() as mesh:
        write_results({name: bytes_of(name, args, mesh) for name in dict.fromkeys([OURS, *args.systems, AGAIN])})


def bytes_of(system: str, args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, int]:
    """Train a little by one system; the bytes of this rank."""
    before = resident_memory()
    setup = SYSTEMS[system.removesuffix(SUFFIX)](model_of(args), mesh)
    tokens = torch.randint(256, (args.batch, args.context + 1))

    def compute() -> None:
        setup.model(tokens[:, :-1], tokens[:, 1:]).backward()

    def each(action: Callable[[torch.optim.Optimizer], object]) -> None:
        for optimizer in setup.optimizers:
            action(optimizer)

    compute()
    each(lambda optimizer: optimizer.step())  # which makes the state
    each(lambda optimizer: optimizer.zero_grad())
    compute()  # for the second time, before which DDP makes its buckets anew
    resident = resident_memory() - before
    stepping = peak_memory(lambda: each(lambda optimizer: optimizer.step()))
    each(lambda optimizer: optimizer.zero_grad())
    kept = resident_memory() - before
    return {"resident": resident, "step": resident + stepping, "compute": kept + peak_memory(compute)}


def predicted(plan: mfsdp.ShardPlan, cost_model: CostModel) -> dict[str, tuple[int, int]]:
    """System -> predicted resident bytes and peak in the step, of the rank with most."""
    schemes = {scheme.name: scheme for scheme in compare(plan, cost_model)}
    return {system: (schemes[name].resident_bytes, schemes[name].peak_bytes) for system, name in PREDICTED.items()}


def measure(args: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """A row for each system, measured and predicted."""
    cost_model = MuonCost()
    model = model_of(args)
    expected = predicted(mfsdp.plan(model, ranks, cost_model=cost_model), cost_model)
    expected["ddp"] = predicted(mfsdp.plan(model, 1, cost_model=cost_model), cost_model)["mfsdp"]
    by_rank = launch(ranks)
    rows = []
    for system in by_rank[0]:
        row: dict[str, Any] = {"system": system}
        row |= {key: max(rank[system][key] for rank in by_rank) for key in ("resident", "step", "compute")}
        if system in expected:
            for key, value in zip(("resident", "step"), expected[system], strict=True):
                row |= {f"{key}_predicted": value, f"{key}_off": value / row[key] - 1}
        rows.append(row)
    ours = next(row for row in rows if row["system"] == OURS)
    for row in rows:
        row["step_ratio"] = row["step"] / ours["step"]
    return rows


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:,.2f} GiB"


def scratch_of(shape: Sequence[int]) -> int:
    """Bytes that a product of matrices of this shape in bf16 takes beside its result."""
    left = torch.zeros(*shape, dtype=torch.bfloat16)
    result = torch.empty(shape[0], shape[0], dtype=torch.bfloat16)
    return peak_memory(lambda: torch.mm(left, left.mT, out=result))


COLUMNS = (
    Column("system", ""),
    Column("resident", "resident", mib),
    Column("resident_predicted", "predicted", mib),
    Column("resident_off", "off by", "{:+.1%}".format),
    Column("step", "peak in the step", mib),
    Column("step_ratio", "over mfsdp", factor),
    Column("step_predicted", "predicted", mib),
    Column("step_off", "off by", "{:+.1%}".format),
    Column("compute", "peak in forward and backward", mib),
)


def notes_of(args: argparse.Namespace, ranks: int, rows: list[dict[str, Any]]) -> list[str]:
    """What the numbers of the model are, and why a prediction is off."""
    specs = [entry.spec for entry in mfsdp.plan(model_of(args), ranks).entries.values()]
    whole = sum(spec.numel for spec in specs) * 4
    gathered = sum(spec.numel for spec in specs if spec.role is Role.MATRIX) * 4
    found = [f"the model's parameters take {mib(whole)} in all, its matrices {mib(gathered)} of them."]
    by_name = {row["system"]: row for row in rows}
    if "gather-once" in by_name:
        row = by_name["gather-once"]
        off = (row["step_predicted"] + gathered) / row["step"] - 1
        found.append(
            f"gather-once: gloo receives a gather into a buffer of its own, {mib(gathered)}, and copies from there, "
            f"which the prediction, made for NCCL, leaves out; with it the prediction is off by {off:+.1%}. Without "
            f"that buffer the peak would be {(row['step'] - gathered) / by_name[OURS]['step']:.2f} times mfsdp's."
        )
    if "stock" in by_name:
        found.append(
            "stock: what gloo's threads free is taken for freed when its place is used again, so that its peak in the "
            "step is overstated, the more so the more ranks exchange small pieces."
        )
    largest = max((spec for spec in specs if spec.role is Role.MATRIX), key=lambda spec: spec.numel)
    found.append(
        f"a product of bf16 matrices takes {mib(scratch_of(largest.shape))} on this CPU beside its result, which "
        f"predictions leave out: a part of every peak that is above them."
    )
    differ = {
        what: abs(by_name[AGAIN][key] / by_name[OURS][key] - 1)
        for what, key in (
            ("resident bytes", "resident"),
            ("the peak in the step", "step"),
            ("the other peak", "compute"),
        )
    }
    found.append(
        f"noise: two runs of mfsdp differ by {', '.join(f'{off:.2%} in {what}' for what, off in differ.items())}."
    )
    return found


def measured_table(args: argparse.Namespace, ranks: int) -> Table:
    rows = measure(args, ranks)
    charts = [
        Bars(
            f"{what}, {ranks} ranks",
            "MiB, of the rank with most",
            {row["system"]: row[key] / 2**20 for row in rows},
            predicted={row["system"]: row[f"{key}_predicted"] / 2**20 for row in rows if f"{key}_predicted" in row},
        )
        for what, key in (("resident", "resident"), ("peak in the step", "step"))
    ]
    return Table(f"{ranks} ranks", COLUMNS, rows, notes_of(args, ranks, rows), charts)


def predictions(models: list[str], ranks: int) -> Table:
    """Of models of the catalogue, parameters and gradients in bf16 with an fp32 master copy."""
    cost_model = MuonCost(precision=Precision(master=torch.float32))
    rows: list[dict[str, Any]] = []
    charts = []
    for name in models:
        plan = plan_specs(catalogue_specs(name, torch.bfloat16), ranks, cost_model=cost_model)
        found = predicted(plan, cost_model)
        for system, (resident, peak) in found.items():
            ratio = peak / found[OURS][1]
            rows.append({"model": name, "system": system, "resident": resident, "step": peak, "step_ratio": ratio})
        title = f"{name} on {ranks} ranks, predicted peak in the step"
        charts.append(Bars(title, "GiB of a rank", {system: peak / 2**30 for system, (_, peak) in found.items()}))
    columns = [
        Column("model", "model"),
        Column("system", "system"),
        Column("resident", "resident", gib),
        Column("step", "peak in the step", gib),
        Column("step_ratio", "over mfsdp", factor),
    ]
    notes = ["by the planner alone: bf16 parameters and gradients, fp32 master copies and momentum; so no noise."]
    return Table(f"Predicted on {ranks} ranks", columns, rows, notes, charts)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, nargs="*", default=[2, 4, 8])
    models = ["qwen3-14b", "qwen3-32b"]
    parser.add_argument("--predict", nargs="*", choices=model_names(), default=models, help="of the catalogue")
    add_model_arguments(parser)
    parser.set_defaults(width=256, layers=16, batch=2, context=32)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    args = parser.parse_args()
    if not args.ranks and not args.predict:
        parser.error("neither --ranks to measure nor models to --predict")
    if is_rank():
        work(args)
        return
    shape = (
        f"GPT of {args.layers} blocks, width {args.width}, fp32, {args.batch} x {args.context} tokens a rank, "
        f"the second training step; each is measured once"
    )
    limits = (
        "Only what torch's allocator hands out is counted, not sockets' buffers or kernels' scratch memory. DDP keeps "
        "its gradients as views of its buckets; without that it needs another copy of them."
    )
    report = Report(args, "Memory of a rank", shape, limits, RANK_THREADS)
    for ranks in args.ranks:
        report.add(measured_table(args, ranks))
    if args.predict:
        report.add(predictions(args.predict, 64))


if __name__ == "__main__":
    main()
