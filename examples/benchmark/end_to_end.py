"""Seconds of a training step, and tokens per second, at several sequence lengths and batch sizes.

    python examples/benchmark/end_to_end.py --ranks 4

The more tokens there are in a step, the more of it is forward and backward, and the less it matters how the optimizer
steps: the gain shrinks. Where forward and backward gather from several owners it does not end at 1, but at what
``runtime.py`` shows.
"""

import statistics
from typing import Any

from chart import Lines
from comparison import CORES, STOCK, Result, add_comparison_arguments, measure, noise_notes, work
from launching import RANK_THREADS, is_rank
from options import BatchShape, benchmark_parser, positive
from report import Column, Report, Table, factor
from systems import OURS, shape_of
from timing import milliseconds, ratio

SYSTEMS = ["stock", "all-to-all", "adamw"]


def rows_of(results: list[Result], ranks: int, shape: BatchShape) -> list[dict[str, Any]]:
    """One row for each system at one shape of the batch."""
    tokens = ranks * shape.batch * shape.context
    return [
        {
            "shape": f"{shape.batch} x {shape.context}",
            "tokens": tokens,
            "system": result.system,
            "whole": result.whole,
            "rate": tokens / statistics.median(result.whole),
            "share": ratio(result.step, result.whole),
            "ratio": ratio(result.whole, results[0].whole),
        }
        for result in results
    ]


COLUMNS = (
    Column("shape", "batch x context of a rank"),
    Column("tokens", "tokens in a step", "{:,}".format),
    Column("system", "system"),
    Column("whole", "training step", milliseconds),
    Column("rate", "tokens/s", "{:,.0f}".format),
    Column("share", "optimizer step in it", "{:.0%}".format),
    Column("ratio", "over mfsdp", factor),
)


def chart_of(rows: list[dict[str, Any]]) -> list[Lines]:
    at = sorted({row["tokens"] for row in rows})

    def series(key: str) -> dict[str, list[float | None]]:
        found: dict[str, list[float | None]] = {}
        for system in dict.fromkeys(row["system"] for row in rows):
            by_tokens = {row["tokens"]: row[key] for row in rows if row["system"] == system}
            found[system] = [by_tokens.get(tokens) for tokens in at]
        return found

    others = {name: values for name, values in series("ratio").items() if name != OURS}
    return [
        Lines("tokens per second", "tokens/s", "tokens in a step, all ranks", at, series("rate"), log_axis=True),
        Lines("training step over mfsdp's", "times mfsdp's", "tokens in a step, all ranks", at, others, log_axis=True),
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=4)
    shapes = [BatchShape(1, 64), BatchShape(4, 64), BatchShape(4, 256), BatchShape(8, 512)]
    parser.add_argument(
        "--shapes", nargs="+", type=BatchShape.parse, default=shapes, metavar="BATCHxCONTEXT", help="of a rank"
    )
    add_comparison_arguments(parser, rounds=5)
    parser.set_defaults(systems=SYSTEMS)
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    measured = shape_of(args).replace(f"{args.batch} x {args.context} tokens a rank", "tokens as the rows say")
    limits = f"{CORES}; their network is loopback. {STOCK}"
    report = Report(args, "Training at several sequence lengths and batch sizes", measured, limits, RANK_THREADS)
    rows: list[dict[str, Any]] = []
    notes = []
    for shape in args.shapes:
        given = ["--batch", str(shape.batch), "--context", str(shape.context)]
        results = measure(args.ranks, arguments=[*given, "--systems", *args.systems])
        rows += rows_of(results, args.ranks, shape)
        notes.append(f"{shape}: {noise_notes(results)[1]}")
    report.add(Table(f"{args.ranks} ranks, loopback", COLUMNS, rows, notes, chart_of(rows)))


if __name__ == "__main__":
    main()
