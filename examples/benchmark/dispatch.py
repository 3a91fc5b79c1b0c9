"""What owner placements cost the CPU: skipped ops, and DTensors that have no owner.

    python examples/benchmark/dispatch.py [--ranks 8] [--repeats 7] [--sizes 256 512 1024] [--json FILE]

Two ratios, each with both sides interleaved in one run:

- ``step``: a step of unmodified ``torch.optim.Muon`` over 48 owned DTensors spread over all ranks, against the same
  optimizer over each rank's own matrices as plain tensors. The slowest rank counts.
- ``ordinary``: dispatch of ops on DTensors without an owner, in a process that has imported mfsdp against one that has
  not, in CPU time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

MATRICES = 48


def seconds(function: Callable[[], Any]) -> float:
    """Time of a call that all ranks start together, on the slowest of them."""
    dist.barrier()
    start = time.perf_counter()
    function()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


def interleaved(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> list[float]:
    """Ratios first over second, after one call of each to warm up."""
    first(), second()
    ratios = []
    for turn in range(repeats):
        order = (first, second) if turn % 2 == 0 else (second, first)
        times = {function: seconds(function) for function in order}
        ratios.append(times[first] / times[second])
    return ratios


def matrices(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, columns) for rows in sizes for columns in sizes]
    return [torch.randn(shapes[index % len(shapes)], generator=generator) for index in range(MATRICES)]


def muon_step(mesh: DeviceMesh, sizes: list[int], repeats: int) -> list[float]:
    """Ratios of the step over owned DTensors to the step over this rank's matrices as plain tensors."""
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
    with_placements, without = torch.optim.Muon(owned, lr=1e-3), torch.optim.Muon(local, lr=1e-3)
    return interleaved(with_placements.step, without.step, repeats)


def run(rank: int, folder: str, options: argparse.Namespace) -> None:
    """One rank of the first measurement."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    ratios = muon_step(mesh, options.sizes, options.repeats)
    if rank == 0:
        Path(folder, "step.json").write_text(json.dumps(ratios))
    dist.destroy_process_group()


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
    while connection.recv():
        start = time.process_time()
        for _ in range(300):
            (sharded + sharded).mul_(2)
            sharded @ replicated
            replicated.t().sum(0)
            torch._foreach_add_(others, 1.0)
            sharded.to(torch.bfloat16)
        connection.send(time.process_time() - start)


def ordinary(repeats: int) -> list[float]:
    """Ratios of CPU time with mfsdp imported over without, asked of two processes in turn."""
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for with_mfsdp in (True, False):
        ours, theirs = context.Pipe()
        process = context.Process(target=ordinary_ops, args=(theirs, with_mfsdp), daemon=True)
        process.start()
        connections.append(ours)
        processes.append(process)

    def ask(connection: Connection) -> float:
        connection.send(True)
        return connection.recv()

    for connection in connections:
        ask(connection)  # warm up
    ratios = []
    for turn in range(repeats):
        first, second = connections if turn % 2 == 0 else reversed(connections)
        times = {first: ask(first), second: ask(second)}
        ratios.append(times[connections[0]] / times[connections[1]])
    for connection, process in zip(connections, processes, strict=True):
        connection.send(False)
        process.join()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--json", type=Path, help="write the ratios to this file")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (folder, options), nprocs=options.ranks)
        results = {
            "step": json.loads(Path(folder, "step.json").read_text()),
            "ordinary": ordinary(3 * options.repeats),
        }
    print(f"torch {torch.__version__}, {options.ranks} ranks, {MATRICES} matrices of {options.sizes}")
    for name, ratios in results.items():
        print(f"{name:<10} median {statistics.median(ratios):.3f}   from {min(ratios):.3f} to {max(ratios):.3f}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
