"""The optimizer step on the owner: mfsdp's Muon against torch.optim.Muon on the same plain tensors, one process.

    python examples/benchmark/optimizer_step.py [--device cuda] [--compile] [--shapes small | llama3-8b]

48 matrices in 4 shapes of 256 to 1,024 (or one layer of llama3-8b's), each variant timed in turn, several times over,
so that other load on the machine hits all alike; medians, and their ratios. ``share of matmul`` is the rate of
floating-point operations of the step's Newton-Schulz iterations over that of plain matrix products in bfloat16 of the
same shapes.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

import mfsdp

SHAPES = {
    "small": [(256, 256), (512, 512), (256, 1024), (1024, 256)] * 12,
    "llama3-8b": [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)],
}
STEPS = 5


def matrices(shapes: Sequence[tuple[int, int]], device: str) -> list[nn.Parameter]:
    """Parameters with gradients, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(device)
    return params


def newton_schulz_flops(shapes: Sequence[tuple[int, int]]) -> float:
    """Multiplications and additions of the iterations: per step ``4 m^2 n + 2 m^3`` for m <= n."""
    return float(sum(STEPS * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes))


def plain_products(shapes: Sequence[tuple[int, int]], device: str) -> Callable[[], None]:
    """The products of the iterations alone, without anything between them."""
    sides = sorted({(min(shape), max(shape)) for shape in shapes})
    wide = {s: torch.randn(s, device=device, dtype=torch.bfloat16) for s in sides}
    square = {s: torch.randn(s[0], s[0], device=device, dtype=torch.bfloat16) for s in sides}
    order = [(min(shape), max(shape)) for shape in shapes]

    def run() -> None:
        for side in order:
            for _ in range(STEPS):
                wide[side] @ wide[side].T
                square[side] @ square[side]
                square[side] @ wide[side]

    return run


def seconds(call: Callable[[], object], device: str) -> float:
    if device != "cpu":
        torch.accelerator.synchronize()
    began = time.perf_counter()
    call()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - began


def variants(shapes: Sequence[tuple[int, int]], device: str, compile: bool) -> dict[str, Callable[[], object]]:
    """Name to one optimizer step; and the plain products."""
    steps: dict[str, Callable[[], object]] = {
        "torch.optim.Muon": torch.optim.Muon(matrices(shapes, device)).step,
        "mfsdp, one by one": mfsdp.optim.Muon(matrices(shapes, device)).step,
        "mfsdp, batched": mfsdp.optim.Muon(matrices(shapes, device), batched=True).step,
    }
    if compile:
        steps["mfsdp, compiled"] = mfsdp.optim.Muon(matrices(shapes, device), batched=True, compile=True).step
    steps["plain products"] = plain_products(shapes, device)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--shapes", choices=list(SHAPES), default="small")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", help="also write the medians to this file, in seconds")
    args = parser.parse_args()
    shapes = SHAPES[args.shapes]
    steps = variants(shapes, args.device, args.compile)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.repeats + 2):
        for name, step in steps.items():
            taken = seconds(step, args.device)
            if turn >= 2:  # the first two allocate, compile and warm up
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    flops = newton_schulz_flops(shapes)
    print(f"{len(shapes)} matrices, {args.shapes}, {args.device}, {torch.get_num_threads()} threads")
    print(f"{'':20} {'step':>10} {'TFLOP/s':>8} {'against torch':>14} {'share of matmul':>16}")
    for name, median in medians.items():
        print(
            f"{name:20} {median * 1e3:7.1f} ms {flops / median / 1e12:8.3f} "
            f"{medians['torch.optim.Muon'] / median:13.2f}x {medians['plain products'] / median:15.0%}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(medians, file, indent=2)


if __name__ == "__main__":
    main()
