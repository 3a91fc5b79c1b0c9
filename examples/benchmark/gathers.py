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
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from launching import is_rank, launch, slowest, write_results
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mfsdp.fsdp.collectives import BroadcastGather, Gather, Piece, ShardGroup, Shipment
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from mfsdp.fsdp.segments import UnitLayout
from mfsdp.fsdp.strategy import choose_gather

STRATEGIES = {BroadcastGather: "broadcast", ChainGather: "chain", ResplitGather: "re-split"}
FSDP2 = "all-gather"


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


def work(options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ranks = ShardGroup.of(mesh, 0)
    results = []
    for size in options.kib:
        for owners, held in owners_of(ranks.size, size * 1024 // 4).items():
            calls, chosen = gather_calls(ranks, held)
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(options.rounds):
                for name, call in calls.items():
                    dist.barrier()
                    start = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - start)
            results.append({"kib": size, "owners": owners, "rule": chosen, "times": times})
    write_results(results)
    dist.barrier()
    dist.destroy_process_group()


def cell(seconds: list[float], chosen: bool) -> str:
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [seconds[0]] * 3
    spread = 50 * (quartiles[2] - quartiles[0]) / quartiles[1]
    return f"{quartiles[1] * 1e3:.1f} ({spread:.0f} %){' *' if chosen else ''}"


def report(options: argparse.Namespace, by_rank: list[list[dict]]) -> None:
    network = f"{options.nodes} emulated nodes, {options.rate}" if options.nodes else "loopback"
    print(f"gather of a unit, {options.ranks} ranks, {network}, {options.rounds} rounds, torch {torch.__version__}\n")
    names = [*STRATEGIES.values(), FSDP2]
    print(f"| unit | owners | {' | '.join(names)} |")
    print(f"|---:|---|{'---:|' * len(names)}")
    for case in zip(*by_rank, strict=True):
        first = case[0]
        cells = [cell(slowest(rank["times"][name] for rank in case), name == first["rule"]) for name in names]
        print(f"| {first['kib']:,} KiB | {first['owners']} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--nodes", type=int, default=0, help="emulated nodes; 0 is loopback")
    parser.add_argument("--rate", default="1gbit", help="egress of an emulated node")
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 256, 1024, 4096, 16384], help="sizes of units")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if options.ranks < 3:
        parser.error("three owners need at least 3 ranks (on 2, broadcasts are always used)")
    if is_rank():
        work(options)
    else:
        report(options, launch(options.ranks, options.nodes, options.rate))


if __name__ == "__main__":
    main()
