"""mfsdp's Muon over owned DTensors against the same step over the plain local tensors, on every rank.

    python examples/benchmark/owned_step.py --ranks 8

Every rank has DTensors for all matrices, and owns its share of them; beside them it has plain tensors like those that
it owns. Both are stepped in turn, many times over. The ranks share this machine's cores, so that what is measured is
the CPU time of each rank's thread, which waiting does not count in. Printed are the rank with the largest ratio of
medians, the median of the ranks, and what the owned steps communicated.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from chart import SUFFIX, Bars
from launching import RANK_THREADS, is_rank, launch, world, write_results
from options import benchmark_parser, positive
from report import Column, Report, Table
from timing import MEDIAN, in_turns, milliseconds, ratio
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import local_tensor

AGAIN = "plain" + SUFFIX


def parameters(args: argparse.Namespace, mesh: DeviceMesh) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """All matrices as owned DTensors, and plain copies of those that this rank owns; all with gradients."""
    generator = torch.Generator().manual_seed(0)
    owned, plain = [], []
    for index in range(args.matrices):
        width = args.width * (1 + index // mesh.size() % 2)
        placement = [mfsdp.OwnerShard(index % mesh.size())]
        weight, grad = (torch.randn(args.width, width, generator=generator) for _ in range(2))
        owned.append(nn.Parameter(mfsdp.distribute_tensor(weight, mesh, placement)))
        owned[-1].grad = mfsdp.distribute_tensor(grad, mesh, placement)
        if index % mesh.size() == mesh.get_local_rank():
            plain.append(nn.Parameter(local_tensor(owned[-1]).detach().clone()))
            plain[-1].grad = grad
    return owned, plain


def cpu_seconds(step: Callable[[], object]) -> float:
    began = time.thread_time()
    step()
    return time.thread_time() - began


def work(args: argparse.Namespace) -> None:
    """One rank: measure both in turn."""
    with world() as mesh:
        owned, plain = parameters(args, mesh)
        calls = {
            "owned": mfsdp.optim.Muon(owned, batched=args.batched).step,
            "plain": mfsdp.optim.Muon(plain, batched=args.batched).step,
            AGAIN: mfsdp.optim.Muon(plain, batched=args.batched).step,
        }
        times = in_turns(calls, args.rounds, warm_up=2, clock=cpu_seconds)
        with CommCounter() as comm:
            calls["owned"]()
        write_results({**times, "collectives": comm.collectives})


def table(args: argparse.Namespace, by_rank: list[dict[str, Any]]) -> Table:
    ranked = sorted(by_rank, key=lambda rank: ratio(rank["owned"], rank["plain"]))
    rows = [
        {
            "which": which,
            "owned": rank["owned"],
            "plain": rank["plain"],
            "ratio": ratio(rank["owned"], rank["plain"]),
            "noise": ratio(rank[AGAIN], rank["plain"]),
        }
        for which, rank in (("median rank", ranked[len(ranked) // 2]), ("worst rank", ranked[-1]))
    ]
    columns = [
        Column("which", ""),
        Column("owned", "owned DTensors", milliseconds),
        Column("plain", "plain tensors", milliseconds),
        Column("ratio", "owned over plain", "{:.3f}".format),
        Column("noise", "plain again over plain", "{:.3f}".format),
    ]
    notes = [
        f"collectives in an owned step, over all ranks: {sum(rank['collectives'] for rank in by_rank)}",
        "the last column is the noise.",
    ]
    values = {
        what: statistics.median(statistics.median(rank[what]) for rank in by_rank) * 1e3
        for what in ("plain", "owned", AGAIN)
    }
    bars = Bars("CPU time of a step, median rank", "milliseconds", values)
    return Table(f"{args.ranks} ranks, {'batched' if args.batched else 'one by one'}", columns, rows, notes, [bars])


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--matrices", type=positive, default=96)
    parser.add_argument("--width", type=positive, default=384, help="matrices are width x width, and width x 2 width")
    parser.add_argument("--batched", action="store_true")
    parser.add_argument("--rounds", type=positive, default=20)
    args = parser.parse_args()
    if args.matrices < args.ranks:
        parser.error(f"every rank needs a matrix, but --matrices {args.matrices} are fewer than --ranks {args.ranks}")
    if is_rank():
        work(args)
        return
    shape = (
        f"{args.matrices} matrices of width {args.width}, fp32, {args.rounds} rounds after 2 to warm up; CPU time of a "
        f"rank's step, {MEDIAN}"
    )
    limits = "Ranks share cores and caches, which CPU time does not leave out."
    report = Report(args, "The step over owned DTensors and over plain tensors", shape, limits, RANK_THREADS)
    report.add(table(args, launch(args.ranks)))


if __name__ == "__main__":
    main()
