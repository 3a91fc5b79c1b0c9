"""The optimizer step on the owner: mfsdp's Muon against torch.optim.Muon on the same plain tensors, one process.

    python examples/benchmark/optimizer_step.py [--compile] [--threads 1]
    python examples/benchmark/optimizer_step.py --device cuda     # compiled too, a layer of llama3-8b; under 5 minutes

48 matrices in 4 shapes of 256 to 1,024, or those of a layer of a model of the planner's catalogue. Each variant is
timed in turn, many times over, so that other load on the machine hits all alike. Printed are medians, the spread, and
torch's time over the variant's: the median over rounds, and that of the least times, which other load on the machine
disturbs least.

``share of matmul`` is the time that plain matrix products in bfloat16 of the shapes of the Newton-Schulz iterations
take, over that of the step. ``torch's products`` are the iterations of torch.optim.Muon alone, as it does them: what
remains of its step is all that can be saved without faster products.

On a GPU there is also the batched step captured in a CUDA graph, ``mfsdp, replayed``. That part has not run on one yet.

Says so and ends where ``--device cuda`` finds no GPU.
"""

import statistics
from collections.abc import Callable, Sequence

import torch
from chart import SUFFIX, Bars
from options import benchmark_parser, positive
from report import Column, Report, Table
from timing import MEDIAN, in_turns, milliseconds, noise, ratio
from torch import nn

import mfsdp
from mfsdp.optim.newton_schulz import QUINTIC
from mfsdp.planning import Role
from mfsdp.planning.catalogue import catalogue_specs, model_names

TORCH = "torch.optim.Muon"
SMALL = [(256, 256), (512, 512), (256, 1024), (1024, 256)] * 12
STEPS = 5
WARM_UP = 3


def shapes_of(name: str) -> list[tuple[int, ...]]:
    """The matrices of the small set, of a tiny one for tests, or of the first layer of a model of the catalogue."""
    if name in ("small", "tiny"):
        return list(SMALL) if name == "small" else [(8, 8), (8, 16), (16, 8)] * 2
    specs = catalogue_specs(name)
    first = next(spec.unit for spec in specs if spec.role is Role.MATRIX)
    return [spec.shape for spec in specs if spec.role is Role.MATRIX and spec.unit == first]


def matrices(shapes: Sequence[tuple[int, ...]], device: str) -> list[nn.Parameter]:
    """Parameters with gradients, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(device)
    return params


def newton_schulz_flops(shapes: Sequence[tuple[int, ...]]) -> float:
    """Multiplications and additions of the iterations: per step ``4 m^2 n + 2 m^3`` for m <= n."""
    return float(sum(STEPS * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes))


def plain_products(shapes: Sequence[tuple[int, ...]], device: str) -> Callable[[], None]:
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


def torch_products(shapes: Sequence[tuple[int, ...]], device: str) -> Callable[[], None]:
    """The products of torch.optim.Muon: one matrix at a time, the additions in them."""
    a, b, c = QUINTIC
    wide = [torch.randn(min(s), max(s), device=device, dtype=torch.bfloat16) / max(s) for s in shapes]

    def run() -> None:
        for x in wide:
            for _ in range(STEPS):
                gram = x @ x.T
                x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)

    return run


def synchronised(call: Callable[[], object]) -> Callable[[], None]:
    """The call, and waiting for a GPU to have done it."""

    def run() -> None:
        call()
        torch.accelerator.synchronize()

    return run


def replayed(shapes: Sequence[tuple[int, ...]], device: str) -> Callable[[], None]:
    """A batched step that was captured in a CUDA graph once."""
    lr = torch.tensor(1e-3, device=device)
    optimizer = mfsdp.optim.Muon(matrices(shapes, device), lr=lr, batched=True, capturable=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # the state is made before the capture
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    return graph.replay


def variants(shapes: Sequence[tuple[int, ...]], device: str, compile: bool) -> dict[str, Callable[[], object]]:
    """Name to one optimizer step; and the products."""
    steps: dict[str, Callable[[], object]] = {
        TORCH: torch.optim.Muon(matrices(shapes, device)).step,
        "mfsdp, one by one": mfsdp.optim.Muon(matrices(shapes, device)).step,
        "mfsdp, batched": mfsdp.optim.Muon(matrices(shapes, device), batched=True).step,
    }
    if compile:
        steps["mfsdp, compiled"] = mfsdp.optim.Muon(matrices(shapes, device), batched=True, compile=True).step
    steps[TORCH + SUFFIX] = torch.optim.Muon(matrices(shapes, device)).step
    if device == "cuda":
        steps["mfsdp, replayed"] = replayed(shapes, device)
    steps["torch's products"] = torch_products(shapes, device)
    steps["plain products"] = plain_products(shapes, device)
    return steps


def table(title: str, times: dict[str, list[float]], flops: float) -> Table:
    products, theirs = times["plain products"], times[TORCH]
    rows = [
        {
            "name": name,
            "times": taken,
            "rate": flops / statistics.median(taken) / 1e12,
            "faster": statistics.median(a / b for a, b in zip(theirs, taken, strict=True)),
            "least": min(theirs) / min(taken),
            "share": ratio(products, taken),
        }
        for name, taken in times.items()
    ]
    columns = [
        Column("name", ""),
        Column("times", "step", milliseconds),
        Column("rate", "TFLOP/s", "{:.3f}".format),
        Column("faster", "times as fast as torch", "{:.2f}x".format),
        Column("least", "by least times", "{:.2f}x".format),
        Column("share", "share of matmul", "{:.0%}".format),
    ]
    bars = Bars("a step", "milliseconds", {name: statistics.median(taken) * 1e3 for name, taken in times.items()})
    return Table(title, columns, rows, [noise(TORCH, theirs, times[TORCH + SUFFIX])], [bars])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--compile", action="store_true", help="also the compiled step (always on a GPU)")
    parser.add_argument("--shapes", choices=["small", "tiny", *model_names()], help="by device: small, or llama3-8b")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=positive, default=15)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing was measured")
        return
    torch.set_num_threads(args.threads)
    on_gpu = args.device == "cuda"
    name = args.shapes or ("llama3-8b" if on_gpu else "small")
    shapes = shapes_of(name)
    where = torch.cuda.get_device_name() if on_gpu else f"cpu, {args.threads} threads"
    shape = f"{len(shapes)} matrices, {name}, fp32, {where}, {args.rounds} rounds after {WARM_UP} to warm up; {MEDIAN}"
    limits = "Nearly all of a step are products of bfloat16 matrices, which are the same in all variants."
    report = Report(args, "Steps of local matrices", shape, limits)
    steps = variants(shapes, args.device, args.compile or on_gpu)
    calls = {name: synchronised(step) for name, step in steps.items()} if on_gpu else steps
    report.add(table(where, in_turns(calls, args.rounds, WARM_UP), newton_schulz_flops(shapes)))


if __name__ == "__main__":
    main()
