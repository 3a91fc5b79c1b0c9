"""AdamW over many small tensors: does laying them out as one flat tensor pay?

    python examples/benchmark/tails.py [--tails 200] [--elements 768]

Each way is timed in turn, many times over; medians, and the least. ``flat`` is the step of one tensor of the same size,
the bound of any layout. Parameters and gradients are where the model and ``fully_shard`` put them, so that a flat
step over them also has to gather both and to scatter the parameters: ``flat, with its copies``. That is to be
compared with ``fused``, which visits the tensors where they are, in one call.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from chart import SUFFIX, Bars
from options import benchmark_parser, positive
from report import Column, Report, Table, factor
from timing import MEDIAN, in_turns, milliseconds, noise, ratio
from torch import nn

from mfsdp.optim import AdamW


def parameters(tails: int, elements: int) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(elements)) for _ in range(tails)]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def stepping(tails: int, elements: int, **options: Any) -> Callable[[], object]:
    return AdamW(parameters(tails, elements), **options).step


def flat_with_copies(tails: int, elements: int) -> Callable[[], object]:
    params = parameters(tails, elements)
    (flat,) = parameters(1, tails * elements)
    optimizer = AdamW([flat], fused=True)
    assert flat.grad is not None
    values, gradients = list(flat.detach().split(elements)), list(flat.grad.split(elements))

    @torch.no_grad()
    def step() -> None:
        torch._foreach_copy_(values, params)
        torch._foreach_copy_(gradients, [param.grad for param in params])
        optimizer.step()
        torch._foreach_copy_(params, values)

    return step


COLUMNS = (
    Column("name", ""),
    Column("times", "step", milliseconds),
    Column("least", "least", lambda least: f"{least * 1e3:.3f} ms"),
    Column("ratio", "over fused", factor),
)


def table(times: dict[str, list[float]]) -> Table:
    rows = [
        {"name": name, "times": taken, "least": min(taken), "ratio": ratio(taken, times["fused"])}
        for name, taken in times.items()
    ]
    bars = Bars("a step", "milliseconds", {name: statistics.median(taken) * 1e3 for name, taken in times.items()})
    return Table("Steps", COLUMNS, rows, [noise("fused", times["fused"], times["fused" + SUFFIX])], [bars])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tails", type=positive, default=200)
    parser.add_argument("--elements", type=positive, default=768)
    parser.add_argument("--rounds", type=positive, default=50)
    args = parser.parse_args()
    shape = (
        f"{args.tails} tensors of {args.elements} elements, fp32, {torch.get_num_threads()} threads, "
        f"{args.rounds} rounds after 3 to warm up; {MEDIAN}"
    )
    limits = "So small a step is mostly calls; other work on the machine shows in it."
    report = Report(args, "AdamW over many small tensors", shape, limits)
    size = args.tails, args.elements
    ways = {
        "fused": stepping(*size, fused=True),
        "one by one": stepping(*size, foreach=False),
        "foreach": stepping(*size, foreach=True),
        "flat, with its copies": flat_with_copies(*size),
        "flat": stepping(1, args.tails * args.elements, fused=True),
        "fused" + SUFFIX: stepping(*size, fused=True),
    }
    report.add(table(in_turns(ways, args.rounds, warm_up=3)))


if __name__ == "__main__":
    main()
