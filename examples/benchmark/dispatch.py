"""What owner placements cost the CPU: skipped ops, and DTensors that have no owner.

    python examples/benchmark/dispatch.py --ranks 8

Three comparisons, each with both sides in turns in one run:

- a step of unmodified ``torch.optim.Muon`` over 48 owned DTensors spread over all ranks, against the same optimizer
  over each rank's own matrices as plain tensors; time of the slowest rank;
- what of that is skipping: the same optimizer over the matrices that a rank does not own, whose ops it skips, against
  as many small ordinary (replicated) DTensors, on which it computes next to nothing; CPU time;
- dispatch of ops on DTensors without an owner, in a process that has imported mfsdp against one that has not; CPU time.

The second run of the plain side shows the noise.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from chart import SUFFIX, Bars
from launching import RANK_THREADS, is_rank, launch, world, write_results
from options import at_least, benchmark_parser, positive
from report import Column, Report, Table
from timing import MEDIAN, in_turns, milliseconds, noise, slowest_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

MATRICES = 48
OWNED, PLAIN = "owned DTensors", "plain tensors"
SKIPPED, ORDINARY = "skipped ops", "ops on ordinary DTensors"
WITH, WITHOUT = "mfsdp imported", "not imported"


def matrices(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, columns) for rows in sizes for columns in sizes]
    return [torch.randn(shapes[index % len(shapes)], generator=generator) for index in range(MATRICES)]


def muon_steps(mesh: DeviceMesh, sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """Times of the step over owned DTensors, and of the step over this rank's matrices as plain tensors."""
    import mfsdp  # here, and not above: one of the processes of `ordinary` must do without

    full = matrices(sizes)
    order = sorted(range(MATRICES), key=lambda index: full[index].numel())
    owners = {index: place % mesh.size() for place, index in enumerate(order)}
    owned, local = [], []
    for index, tensor in enumerate(full):
        parameter = nn.Parameter(mfsdp.distribute_tensor(tensor, mesh, [mfsdp.OwnerShard(owners[index])]))
        parameter.grad = mfsdp.distribute_tensor(tensor, mesh, [mfsdp.OwnerShard(owners[index])])
        owned.append(parameter)
        if owners[index] == mesh.get_local_rank():
            plain = nn.Parameter(tensor.clone())
            plain.grad = tensor.clone()
            local.append(plain)
    return in_turns(
        {
            OWNED: torch.optim.Muon(owned, lr=1e-3).step,
            PLAIN: torch.optim.Muon(local, lr=1e-3).step,
            PLAIN + SUFFIX: torch.optim.Muon(local, lr=1e-3).step,
        },
        rounds,
        clock=slowest_rank,
    )


def skipped_steps(mesh: DeviceMesh, sizes: list[int], rounds: int) -> dict[str, list[float]]:
    """CPU times of the step over matrices that another rank owns, and over as many small ordinary DTensors."""
    import mfsdp

    placement = mfsdp.OwnerShard((mesh.get_local_rank() + 1) % mesh.size())
    others, ordinary = [], []
    for tensor in matrices(sizes):
        small = torch.randn([side // 32 or 1 for side in tensor.shape])  # tall where the other is
        for placed, source, to in ((others, tensor, placement), (ordinary, small, Replicate())):
            parameter = nn.Parameter(mfsdp.distribute_tensor(source, mesh, [to], src_data_rank=None))
            parameter.grad = mfsdp.distribute_tensor(source.clone(), mesh, [to], src_data_rank=None)
            placed.append(parameter)
    return in_turns(
        {
            SKIPPED: torch.optim.Muon(others, lr=1e-3).step,
            ORDINARY: torch.optim.Muon(ordinary, lr=1e-3).step,
            ORDINARY + SUFFIX: torch.optim.Muon(ordinary, lr=1e-3).step,
        },
        rounds,
        clock=cpu_time,
    )


def cpu_time(call: Callable[[], object]) -> float:
    """Seconds of this process's CPU that a call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def ordinary_ops(connection: Connection, with_mfsdp: bool) -> None:
    """A process that times ops on DTensors without an owner each time it is asked to, in CPU seconds."""
    import torch.testing._internal.distributed.fake_pg  # a process group of one process that plays two

    if with_mfsdp:
        import mfsdp  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(8, 8)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    replicated = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
    others = [DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False) for _ in range(8)]

    def ops() -> None:
        for _ in range(300):
            (sharded + sharded).mul_(2)
            sharded @ replicated
            replicated.t().sum(0)
            torch._foreach_add_(others, 1.0)
            sharded.to(torch.bfloat16)

    while connection.recv():
        connection.send(cpu_time(ops))


def ordinary(rounds: int) -> dict[str, list[float]]:
    """CPU time with mfsdp imported and without, of processes that are asked in turn."""
    context = multiprocessing.get_context("spawn")
    connections: dict[str, Connection] = {}
    processes = []
    for name in (WITH, WITHOUT, WITHOUT + SUFFIX):
        connections[name], theirs = context.Pipe()
        processes.append(context.Process(target=ordinary_ops, args=(theirs, name == WITH), daemon=True))
        processes[-1].start()

    def asking(connection: Connection) -> Callable[[], float]:
        def ask() -> float:
            connection.send(True)
            return connection.recv()

        return ask

    asks = {name: asking(connection) for name, connection in connections.items()}
    times = in_turns(asks, rounds, clock=lambda ask: ask())
    for connection, process in zip(connections.values(), processes, strict=True):
        connection.send(False)
        process.join()
    return times


def table(title: str, times: dict[str, list[float]]) -> Table:
    """Both sides; the ratio is the median of those of each round."""
    _, plain, again = times
    rows: list[dict[str, Any]] = []
    for name, taken in times.items():
        ratios = [one / other for one, other in zip(taken, times[plain], strict=True)]
        rows.append({"name": name, "times": taken, "ratio": statistics.median(ratios), "range": _range(ratios)})
    columns = [
        Column("name", ""),
        Column("times", "time", milliseconds),
        Column("ratio", f"over {plain}", "{:.3f}".format),
        Column("range", "from, to"),
    ]
    bars = Bars(title, "milliseconds", {name: statistics.median(taken) * 1e3 for name, taken in times.items()})
    return Table(title, columns, rows, [noise(plain, times[plain], times[again])], [bars])


def _range(ratios: Sequence[float]) -> str:
    return f"{min(ratios):.3f}, {max(ratios):.3f}"


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=at_least(2), default=8)
    parser.add_argument(
        "--rounds", type=positive, default=7, help="of the step; three times as many of the ordinary ops"
    )
    parser.add_argument("--sizes", type=positive, nargs="+", default=[256, 512, 1024])
    args = parser.parse_args()
    if args.ranks > MATRICES:
        parser.error(f"there are {MATRICES} matrices, and every rank needs one: at most {MATRICES} ranks")
    if is_rank():
        with world() as mesh:
            skipped = skipped_steps(mesh, args.sizes, args.rounds)
            write_results({"step": muon_steps(mesh, args.sizes, args.rounds), "skipped": skipped})
        return
    shape = f"{MATRICES} matrices of sides {args.sizes}, fp32, {args.rounds} rounds after 1 to warm up; {MEDIAN}"
    limits = "Ranks share cores; a difference of a percent or two is within what the same process varies by."
    report = Report(args, "What owner placements cost the CPU", shape, limits, RANK_THREADS)
    measured = launch(args.ranks)[0]
    report.add(table(f"A step of torch.optim.Muon, {args.ranks} ranks", measured["step"]))
    report.add(table(f"A step over {MATRICES} matrices of other ranks", measured["skipped"]))
    report.add(table("Ops on DTensors without an owner", ordinary(3 * args.rounds)))


if __name__ == "__main__":
    main()
