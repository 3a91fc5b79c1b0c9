"""AdamW over many small tensors: does laying them out as one flat tensor pay?

    python examples/benchmark/tails.py [--tails 200] [--elements 768]

Each way is timed in turn, many times over; medians, and the least. ``flat`` is the step of one tensor of the same size,
the bound of any layout. Parameters and gradients are where the model and ``fully_shard`` put them, so that a flat
step over them also has to gather both and to scatter the parameters: ``flat, with its copies``. That is to be
compared with ``fused``, which visits the tensors where they are, in one call.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tails", type=int, default=200)
    parser.add_argument("--elements", type=int, default=768)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    size = args.tails, args.elements
    ways = {
        "one by one": stepping(*size, foreach=False),
        "foreach": stepping(*size, foreach=True),
        "fused": stepping(*size, fused=True),
        "flat, with its copies": flat_with_copies(*size),
        "flat": stepping(1, args.tails * args.elements, fused=True),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.repeats + 3):
        for name, step in ways.items():
            began = time.perf_counter()
            step()
            if turn >= 3:
                times[name].append(time.perf_counter() - began)
    print(f"{args.tails} tails of {args.elements} elements, {torch.get_num_threads()} threads")
    for name, taken in times.items():
        print(f"{name:22} {statistics.median(taken) * 1e3:7.3f} ms, least {min(taken) * 1e3:7.3f} ms")


if __name__ == "__main__":
    main()
