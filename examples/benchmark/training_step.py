"""The optimizer step, and the whole training step, of every way to train with Muon on several ranks.

    python examples/benchmark/training_step.py --ranks 4                               # loopback
    python examples/benchmark/training_step.py --ranks 8 --nodes 8 --rate matched      # emulated nodes (root)

All systems train the same GPT on the same data, in turns in one run. Times are medians over the rounds of the slowest
rank; the spread is half of the distance between the quartiles; mfsdp runs twice, as ``mfsdp`` and as ``(again)``: what
these two differ by is noise. Collectives and bytes of the step are counted at the process group, for one rank (the one
with most), and at its network interface on emulated nodes.

A *matched* rate makes the emulated links stand to the Newton-Schulz arithmetic of a rank here as those of a GPU cluster
do there: an A100 does about 200 TFLOP/s of it and has 12.5 to 25 GB/s of network, which is 8,000 to 16,000 operations
for a byte; 12,000 is taken. The arithmetic is measured first, with all ranks busy at once.
"""

import argparse
import copy
import json
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launching import bytes_sent, is_rank, launch, slowest, write_results
from systems import SYSTEMS, add_model_arguments, model_of
from torch.distributed.device_mesh import init_device_mesh

import mfsdp
from mfsdp.optim import newton_schulz

FLOP_PER_BYTE = 12_000
AGAIN = "(again)"


@dataclass
class Measured:
    """One rank's numbers for one system.

    Attributes:
        backward: seconds of forward and backward, by round.
        step: seconds of the optimizer step, by round.
        collectives: of one optimizer step.
        counted_bytes: that this rank gave to them.
        wire_bytes: that left the interface in the step; of all ranks together on loopback.
        losses: by round.
    """

    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    collectives: int = 0
    counted_bytes: int = 0
    wire_bytes: int = 0
    losses: list[float] = field(default_factory=list)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if args.measure_rate:
        write_results(newton_schulz_rate(args.width))
        dist.destroy_process_group()
        return
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = model_of(args)
    setups = {name: SYSTEMS[name](copy.deepcopy(model), mesh) for name in args.systems}
    if "mfsdp" in setups:
        setups[AGAIN] = SYSTEMS["mfsdp"](copy.deepcopy(model), mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results = {name: Measured() for name in setups}
    for number in range(args.rounds + 1):  # the first warms up and counts
        tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator)
        for name, setup in setups.items():
            measured = results[name]
            dist.barrier()
            start = time.perf_counter()
            loss = setup.model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            dist.barrier()
            middle, sent = time.perf_counter(), bytes_sent()
            with nullcontext() if number else mfsdp.CommCounter() as counter:
                for optimizer in setup.optimizers:
                    optimizer.step()
            end = time.perf_counter()
            dist.barrier()
            if counter is None:
                measured.backward.append(middle - start)
                measured.step.append(end - middle)
                measured.wire_bytes = bytes_sent() - sent
            else:  # which costs time
                measured.collectives, measured.counted_bytes = counter.collectives, counter.bytes
            measured.losses.append(loss.item())
            for optimizer in setup.optimizers:
                optimizer.zero_grad()
    write_results({name: asdict(measured) for name, measured in results.items()})
    dist.barrier()
    dist.destroy_process_group()


def newton_schulz_rate(width: int) -> float:
    """Operations per second of this rank in Newton-Schulz while the other ranks do the same."""
    matrix = torch.randn(width, width)
    newton_schulz(matrix)
    dist.barrier()
    start, repeats = time.perf_counter(), 10
    for _ in range(repeats):
        newton_schulz(matrix)
    dist.barrier()
    return repeats * 5 * 6 * width**3 / (time.perf_counter() - start)


@dataclass(frozen=True)
class Row:
    """One system's numbers over all ranks."""

    system: str
    step: float
    step_spread: float
    whole: float
    whole_spread: float
    collectives: int
    counted_bytes: int
    wire_bytes: float
    losses: list[float]

    @staticmethod
    def of(system: str, ranks: list[Measured], shared_interface: bool) -> "Row":
        step = slowest(rank.step for rank in ranks)
        backward = slowest(rank.backward for rank in ranks)
        whole = [first + second for first, second in zip(backward, step, strict=True)]
        most = max(ranks, key=lambda rank: rank.counted_bytes)
        wire = statistics.mean(rank.wire_bytes for rank in ranks) / (len(ranks) if shared_interface else 1)
        losses = [statistics.mean(values) for values in zip(*(rank.losses for rank in ranks), strict=True)]
        return Row(
            system,
            statistics.median(step),
            spread(step),
            statistics.median(whole),
            spread(whole),
            most.collectives,
            most.counted_bytes,
            wire,
            losses,
        )


def spread(values: list[float]) -> float:
    """Half of the distance between the quartiles, over the median."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    ours = rows[0]
    lines = [
        "| | optimizer step | over mfsdp | training step | over mfsdp | collectives in a step | bytes given to them "
        "| bytes sent in a step |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.system} | {row.step * 1e3:,.1f} ms ± {row.step_spread:.0%} | {row.step / ours.step:.2f} "
        f"| {row.whole * 1e3:,.0f} ms ± {row.whole_spread:.0%} | {row.whole / ours.whole:.2f} "
        f"| {row.collectives} | {row.counted_bytes / 2**20:.2f} MiB | {row.wire_bytes / 2**20:.2f} MiB |"
        for row in rows
    ]
    return "\n".join(lines)


def matched_rate(args: argparse.Namespace) -> str:
    """The rate of a link in ``tc``'s terms."""
    rates = launch(args.ranks, arguments=["--measure-rate"])
    rate = statistics.mean(rates)
    bits = rate / FLOP_PER_BYTE * 8
    print(f"Newton-Schulz: {rate / 1e9:.1f} GFLOP/s a rank; a matched link has {bits / 1e6:.1f} Mbit/s")
    return f"{bits / 1e3:.0f}kbit"


def report(args: argparse.Namespace) -> None:
    rate = matched_rate(args) if args.nodes and args.rate == "matched" else args.rate
    by_rank: list[dict[str, Any]] = launch(args.ranks, args.nodes, rate)
    names = list(by_rank[0])
    rows = [Row.of(name, [Measured(**rank[name]) for rank in by_rank], not args.nodes) for name in names]
    network = f"{args.nodes} emulated nodes of {rate}" if args.nodes else "loopback"
    print(
        f"GPT of {args.layers} blocks, width {args.width}, {args.batch} x {args.context} tokens a rank, {args.ranks} "
        f"ranks, {network}, {args.rounds} rounds, torch {torch.__version__}\n"
    )
    print(table(rows))
    reference = next((row for row in rows if row.system == "ddp"), rows[0])
    for row in rows:
        if row.system not in (reference.system, "adamw"):
            worst = max(abs(a - b) for a, b in zip(row.losses, reference.losses, strict=True))
            print(f"largest difference of a loss, {row.system} and {reference.system}: {worst:.1e}")
    if args.json:
        args.json.write_text(json.dumps({"network": network, "rows": [asdict(row) for row in rows]}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=0, help="emulated nodes; 0 is loopback")
    parser.add_argument("--rate", default="matched", help="egress of an emulated node, such as 1gbit; or matched")
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--measure-rate", action="store_true", help=argparse.SUPPRESS)  # of a rank
    args = parser.parse_args()
    if is_rank():
        work(args)
    else:
        report(args)


if __name__ == "__main__":
    main()
