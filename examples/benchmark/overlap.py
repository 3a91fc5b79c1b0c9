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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from chart import SUFFIX, Bars
from launching import RANK_THREADS, is_rank, launch, world, write_results
from options import benchmark_parser, positive
from report import Column, Report, Table, mib
from systems import add_model_arguments, shape_of
from timing import in_order, milliseconds, noise, slowest_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.dtensor import local_tensor
from mfsdp.optim import RoutedOptimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

AFTER, IN = "step after backward", "steps in backward"
WAYS = {AFTER: None, IN: "backward", AFTER + SUFFIX: None}


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


def work(args: argparse.Namespace) -> None:
    """One rank: train both ways in turn, the first twice."""
    with world() as mesh:
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
            for way in in_order(WAYS, turn):
                loss = models[way](tokens[:, :-1], tokens[:, 1:])
                taken = {"backward": slowest_rank(loss.backward), "step": slowest_rank(optimizers[way].step)}
                optimizers[way].zero_grad()
                if turn:
                    for what, value in taken.items():
                        times[way][what].append(value)
        write_results({"unit": unit, "times": times, "peaks": {way: memory[way].peak for way in WAYS}})


def table(args: argparse.Namespace, by_rank: list[dict[str, Any]]) -> Table:
    rows = [
        {"way": way, "peak": max(rank["peaks"][way] for rank in by_rank), **by_rank[0]["times"][way]} for way in WAYS
    ]
    columns = [
        Column("way", ""),
        Column("peak", "gradients at most", mib),
        Column("backward", "backward", milliseconds),
        Column("step", "step after it", milliseconds),
    ]
    first, again = rows[0], rows[-1]
    notes = [
        f"a block's gradients, over all ranks: {mib(by_rank[0]['unit'])}.",
        noise("the step after backward", first["step"], again["step"]),
        noise("the backward before it", first["backward"], again["backward"]),
    ]
    charts = [
        Bars("gradients at most", "MiB", {row["way"]: row["peak"] / 2**20 for row in rows}),
        Bars(
            "backward and step",
            "milliseconds",
            {row["way"]: (statistics.median(row["backward"]) + statistics.median(row["step"])) * 1e3 for row in rows},
        ),
    ]
    return Table(f"{args.ranks} ranks, loopback", columns, rows, notes, charts)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--ranks", type=positive, default=2)
    add_model_arguments(parser)
    parser.set_defaults(width=256, layers=12, batch=4)
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args()
    if is_rank():
        work(args)
        return
    limits = "On loopback backward waits for no network, so that a step in it gains no time."
    report = Report(args, "Optimizer steps during backward", shape_of(args), limits, RANK_THREADS)
    report.add(table(args, launch(args.ranks)))


if __name__ == "__main__":
    main()
