"""Optimizer steps during backward: what they do to the memory of gradients, and to the time of the step.

    python examples/benchmark/overlap.py --ranks 2

The same GPT under ``fully_shard``, with ``build_optimizer(overlap="backward")`` and without, in turns in one run.
Gradient memory is the most bytes that gradients held at once: of their storages, each counted once, looked at
whenever a gradient has arrived; beside it stands what the gradients of the largest unit take. Times are medians over
rounds of the slowest rank.
"""

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from launching import is_rank, launch, write_results
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from mfsdp.dtensor import local_tensor
from mfsdp.optim import RoutedOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

WAYS = {"step after backward": None, "steps in backward": "backward"}


class GradientMemory:
    """The most bytes that the gradients of some parameters held at once."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self.peak = 0
        for param in self._params:
            param.register_post_accumulate_grad_hook(self._look)

    def held(self) -> int:
        storages = [local_tensor(p.grad).untyped_storage() for p in self._params if p.grad is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def _look(self, param: Tensor) -> None:
        self.peak = max(self.peak, self.held())


def shard(model: GPT, mesh: DeviceMesh) -> GPT:
    plan = mfsdp.plan(model, mesh)
    for module in (*model.blocks, model):
        mfsdp.fully_shard(module, mesh=mesh, plan=plan)
    return model


def timed(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def work(args: argparse.Namespace) -> None:
    """One rank: train both ways in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT(args.width, args.layers, heads=4, context=args.context)
    unit = sum(param.numel() * param.element_size() for param in model.blocks[0].parameters())
    models = {way: shard(copy.deepcopy(model), mesh) for way in WAYS}
    memory = {way: GradientMemory(models[way].parameters()) for way in WAYS}  # looks before a step frees anything
    optimizers: dict[str, RoutedOptimizer] = {
        way: mfsdp.optim.build_optimizer(models[way], matrix_kwargs={"lr": 0.02}, overlap=overlap)
        for way, overlap in WAYS.items()
    }
    times: dict[str, dict[str, list[float]]] = {way: {"backward": [], "step": []} for way in WAYS}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(args.rounds + 1):
        tokens = torch.randint(256, (args.batch, args.context + 1), generator=generator)
        for way in WAYS:
            loss = models[way](tokens[:, :-1], tokens[:, 1:])
            taken = {"backward": timed(loss.backward), "step": timed(optimizers[way].step)}
            optimizers[way].zero_grad()
            if turn:
                for what, value in taken.items():
                    times[way][what].append(value)
    medians = {way: {what: statistics.median(all_) for what, all_ in times[way].items()} for way in WAYS}
    write_results({"unit": unit, "times": medians, "peaks": {way: memory[way].peak for way in WAYS}})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    results = launch(args.ranks)
    print(
        f"GPT, width {args.width}, {args.layers} layers, {args.ranks} ranks; a block's gradients, over all ranks:",
        end=" ",
    )
    print(f"{results[0]['unit'] / 2**20:.2f} MiB")
    print(f"{'':20} {'gradients at most':>18} {'backward':>12} {'step after it':>14}")
    for way in WAYS:
        peak = max(result["peaks"][way] for result in results) / 2**20
        times = results[0]["times"][way]
        print(f"{way:20} {peak:14.2f} MiB {times['backward'] * 1e3:9.1f} ms {times['step'] * 1e3:11.2f} ms")


if __name__ == "__main__":
    main()
