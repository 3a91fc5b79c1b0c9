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

import torch
import torch.distributed as dist
from launching import is_rank, launch, write_results
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import local_tensor


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
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    owned, plain = parameters(args, mesh)
    steps = {
        "owned": mfsdp.optim.Muon(owned, batched=args.batched).step,
        "plain": mfsdp.optim.Muon(plain, batched=args.batched).step,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.rounds + 2):
        for name in ("owned", "plain") if turn % 2 else ("plain", "owned"):
            taken = cpu_seconds(steps[name])
            if turn >= 2:
                times[name].append(taken)
    with CommCounter() as comm:
        steps["owned"]()
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    write_results({**medians, "collectives": comm.collectives})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--matrices", type=int, default=96)
    parser.add_argument("--width", type=int, default=384, help="matrices are width x width, and width x 2 width")
    parser.add_argument("--batched", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    results = launch(args.ranks)
    results.sort(key=lambda result: result["owned"] / result["plain"])
    how = "batched" if args.batched else "one by one"
    print(f"{args.matrices} matrices of width {args.width} on {args.ranks} ranks, {how}; CPU time of a rank's step")
    for label, result in (("median rank", results[len(results) // 2]), ("worst rank", results[-1])):
        owned, plain = result["owned"], result["plain"]
        print(f"{label:12} owned {owned * 1e3:.2f} ms, plain {plain * 1e3:.2f} ms, ratio {owned / plain:.3f}")
    print(f"collectives in an owned step, over all ranks: {sum(result['collectives'] for result in results)}")


if __name__ == "__main__":
    main()
