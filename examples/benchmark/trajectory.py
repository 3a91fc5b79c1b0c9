"""Losses of training by mfsdp, by DDP and by FSDP2 with torch.optim.Muon, on the same data, side by side.

    python examples/benchmark/trajectory.py --ranks 4 --rounds 50

DDP with full matrices on every rank is the reference. On two ranks mfsdp's losses are the same to the bit. On more,
the sums of gradients are added up in another order, which Newton-Schulz in bfloat16 amplifies; DTensors under stock
Muon add up partial products in bfloat16 besides.
"""

from typing import Any

from chart import Lines
from comparison import Result, add_comparison_arguments, measure, work
from launching import RANK_THREADS, is_rank
from options import benchmark_parser, positive
from report import Column, Report, Table
from systems import AGAIN, OURS, shape_of

REFERENCE = "ddp"
SYSTEMS = [OURS, REFERENCE, "stock"]


def table(results: dict[str, Result], ranks: int, every: int) -> Table:
    """Losses by step."""
    reference = results[REFERENCE].losses
    systems = [name for name in results if name != AGAIN]
    others = [name for name in systems if name != REFERENCE]
    apart = {name: [abs(a - b) for a, b in zip(results[name].losses, reference, strict=True)] for name in others}
    again = max(abs(a - b) for a, b in zip(results[OURS].losses, results[AGAIN].losses, strict=True))
    rows: list[dict[str, Any]] = []
    for step in range(len(reference)):
        losses = {name: results[name].losses[step] for name in systems}
        rows.append({"step": step, **losses, **{f"{name} apart": apart[name][step] for name in others}})
    columns = [
        Column("step", "step"),
        *(Column(name, name, "{:.4f}".format) for name in systems),
        *(Column(f"{name} apart", f"{name} from {REFERENCE}", "{:.1e}".format) for name in others),
    ]
    notes = [
        f"largest difference from {REFERENCE} in {len(reference)} steps: "
        + ", ".join(f"{name} {max(apart[name]):.1e} nats" for name in others),
        f"noise: the losses of two runs of {OURS} are at most {again:.1e} nats apart.",
    ]
    at = list(range(len(reference)))
    charts = [
        Lines("loss", "nats per byte", "step", at, {name: results[name].losses for name in systems}),
        Lines(f"difference from {REFERENCE}", "nats per byte", "step", at, apart),
    ]
    shown = [row for row in rows if row["step"] % every == 0 or row["step"] == len(rows) - 1]
    return Table(
        f"{ranks} ranks, every {every} steps" if every > 1 else f"{ranks} ranks", columns, shown, notes, charts
    )


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=4)
    parser.add_argument("--every", type=positive, default=5, help="steps between two rows")
    add_comparison_arguments(parser, rounds=50)
    parser.set_defaults(systems=SYSTEMS, width=128, layers=4, batch=4)
    args = parser.parse_args()
    args.systems = [REFERENCE, *args.systems]
    if is_rank():
        work(args)
        return
    limits = "A short run of a small model: it shows that the systems compute the same, not how well they train."
    report = Report(args, "Losses on the same data", shape_of(args), limits, RANK_THREADS)
    results = {result.system: result for result in measure(args.ranks)}
    report.add(table(results, args.ranks, args.every))


if __name__ == "__main__":
    main()
