"""The ways to gather a unit, timed: what the rule of ``mfsdp/fsdp/strategy.py`` rests on.

    python examples/benchmark/gathers.py --ranks 8                           # loopback
    python examples/benchmark/gathers.py --ranks 8 --nodes 8 --rate 1gbit    # emulated nodes (root)

Units of several sizes, held by one owner, by three (a half, a quarter, a quarter) and by all ranks evenly, are
gathered by each strategy in turn, in one run; beside them stands an all-gather of even slices, which is what FSDP2
does. Milliseconds, medians over the rounds of the slowest rank, with the spread in percent (half of the distance
between the quartiles). A star marks what the library's rule chooses.
"""

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from chart import SUFFIX, Lines
from launching import RANK_THREADS, is_rank, launch, slowest, world, write_results
from options import add_network_arguments, benchmark_parser, network_of, positive
from report import Column, Report, Table, factor
from timing import SLOWEST, in_turns, milliseconds, own_time, ratio
from torch import Tensor

from mfsdp.fsdp.collectives import BroadcastGather, Gather, Piece, ShardGroup, Shipment
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from mfsdp.fsdp.segments import UnitLayout
from mfsdp.fsdp.strategy import choose_gather

STRATEGIES = {BroadcastGather: "broadcast", ChainGather: "chain", ResplitGather: "re-split"}
FSDP2 = "all-gather"
AGAIN = FSDP2 + SUFFIX
LIMITS = (
    "All ranks share this machine's cores: on emulated nodes waiting for the network overlaps with other ranks' "
    "copying, and on loopback a gather is copying alone."
)


def owners_of(ranks: int, elements: int) -> dict[str, list[int]]:
    """Elements that each rank owns, in the cases that are measured."""
    quarter = elements // 4
    return {
        "one owner": [elements],
        "1/2, 1/4, 1/4": [elements - 2 * quarter, quarter, quarter],
        "all evenly": [elements // ranks] * ranks,
    }


def gather_calls(ranks: ShardGroup, held: list[int]) -> tuple[dict[str, Callable[[], object]], str]:
    """What gathers a unit, by strategy, and the strategy that the rule chooses."""
    layout = UnitLayout.of([torch.Size([n]) for n in held if n], [owner for owner, n in enumerate(held) if n])
    whole = torch.empty(layout.numel)
    pieces = [
        Piece(segment.owner, whole.narrow(0, start, segment.numel))
        for start, segment in zip(layout.offsets, layout.segments, strict=True)
    ]
    shipment = Shipment(tuple(pieces), whole)
    gathers: list[Gather] = [BroadcastGather(), ChainGather(Lane.of(ranks)), ResplitGather(Lane.of(ranks))]

    def checked(gather: Gather) -> None:
        whole.zero_()
        for piece in pieces:
            if piece.owner == ranks.coordinate:
                piece.flat.fill_(piece.owner + 1)
        gather.start(ranks, shipment, f"gather by {type(gather).__name__}").wait()
        assert all(bool((piece.flat == piece.owner + 1).all()) for piece in pieces)

    for gather in gathers:
        checked(gather)
    calls: dict[str, Callable[[], object]] = {
        STRATEGIES[type(gather)]: lambda gather=gather: gather.start(ranks, shipment, "gather").wait()
        for gather in gathers
    }
    calls[FSDP2] = all_gather_call(ranks, layout.numel)
    return calls, STRATEGIES[type(choose_gather(ranks, layout, whole.itemsize, whole.device))]


def all_gather_call(ranks: ShardGroup, elements: int) -> Callable[[], object]:
    own = torch.empty(-(-elements // ranks.size))
    full: Tensor = torch.empty(own.numel() * ranks.size)
    return lambda: dist.all_gather_into_tensor(full, own, group=ranks.group)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    with world() as mesh:
        ranks = ShardGroup.of(mesh, 0)
        results = []
        for size in args.kib:
            for owners, held in owners_of(ranks.size, size * 1024 // 4).items():
                calls, chosen = gather_calls(ranks, held)
                calls[AGAIN] = calls[FSDP2]
                times = in_turns(calls, args.rounds, warm_up=0, clock=own_time)
                results.append({"kib": size, "owners": owners, "rule": chosen, "times": times})
        write_results(results)


def table(by_rank: list[list[dict[str, Any]]]) -> Table:
    rows: list[dict[str, Any]] = []
    for case in zip(*by_rank, strict=True):
        times = {name: slowest(rank["times"][name] for rank in case) for name in case[0]["times"]}
        again = ratio(times.pop(AGAIN), times[FSDP2])
        cells = {
            name: f"{milliseconds(taken)}{' *' if name == case[0]['rule'] else ''}" for name, taken in times.items()
        }
        rows.append({"unit": f"{case[0]['kib']:,} KiB", **case[0], "times": times, "again": again, **cells})
    names = [*STRATEGIES.values(), FSDP2]
    columns = [Column("unit", "unit"), Column("owners", "owners"), *(Column(name, name) for name in names)]
    columns.append(Column("again", "all-gather again", factor))
    note = "* is what the library's rule chooses; the last column is the all-gather's second run over its first: noise."
    charts = [
        Lines(
            f"gather of a unit, {owners}",
            "milliseconds",
            "KiB of the unit",
            [row["kib"] for row in rows if row["owners"] == owners],
            {
                name: [statistics.median(row["times"][name]) * 1e3 for row in rows if row["owners"] == owners]
                for name in names
            },
            log=True,
            log_axis=True,
        )
        for owners in dict.fromkeys(row["owners"] for row in rows)
    ]
    return Table("Gathers", columns, rows, [note], charts)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=8)
    add_network_arguments(parser)
    parser.add_argument("--kib", type=positive, nargs="+", default=[64, 256, 1024, 4096, 16384], help="sizes of units")
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args()
    if args.ranks < 3:
        parser.error("three owners need at least 3 ranks (on 2, broadcasts are always used)")
    if is_rank():
        work(args)
        return
    shape = (
        f"units of {min(args.kib)} to {max(args.kib)} KiB, {args.ranks} ranks, {network_of(args)}, "
        f"{args.rounds} rounds; {SLOWEST}"
    )
    report = Report(args, "Ways to gather a unit", shape, LIMITS, RANK_THREADS)
    report.add(table(launch(args.ranks, args.nodes, args.rate)))


if __name__ == "__main__":
    main()
