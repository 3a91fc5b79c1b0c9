"""The ways to train that the benchmarks compare, each as a model and its optimizers."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from baselines import AllToAllMuon, GatherOnceMuon, zero1_owner_muon
from chart import SUFFIX
from gpt import GPT
from options import multiple_of, positive
from setups import Setup, matrix_names, with_fsdp2, with_mfsdp
from timing import SLOWEST

OURS = "mfsdp"
AGAIN = OURS + SUFFIX
"""Its second run, which shows the noise."""
LR, OTHER_LR = 0.02, 3e-3
HEADS = 8


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The sizes of the model, and of what it is given."""
    parser.add_argument("--width", type=multiple_of(HEADS), default=384)
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--batch", type=positive, default=2)
    parser.add_argument("--context", type=positive, default=64)


def model_of(args: argparse.Namespace) -> GPT:
    """The model of these sizes, the same on every rank."""
    torch.manual_seed(0)
    return GPT(args.width, args.layers, heads=HEADS, context=args.context)


def shape_of(args: argparse.Namespace, warm_up: int = 1) -> str:
    """The model, the batch and the repeats, as a report states them."""
    return (
        f"GPT of {args.layers} blocks, width {args.width}, fp32, {args.batch} x {args.context} tokens a rank, "
        f"{args.rounds} rounds after {warm_up} to warm up; {SLOWEST}"
    )


MatrixOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def example_options(optimizer: str = "muon") -> argparse.Namespace:
    """What the example's set-ups want to know."""
    return argparse.Namespace(
        optimizer=optimizer, lr=LR, ns_dtype="bf16", other_lr=OTHER_LR, dtype="fp32", compile="none", overlap=False
    )


def _split(model: GPT, mesh: DeviceMesh) -> tuple[list[str], list[str]]:
    matrices = matrix_names(model, mesh)
    names = [name for name, _ in model.named_parameters()]
    return [name for name in names if name in matrices], [name for name in names if name not in matrices]


def _on_fsdp2(matrix_optimizer: MatrixOptimizer, model: GPT, mesh: DeviceMesh) -> Setup:
    chosen, others = _split(model, mesh)
    for module in (*model.blocks, model):
        fsdp2_fully_shard(module, mesh=mesh)
    return _setup(model, model, chosen, others, matrix_optimizer)


def _on_ddp(matrix_optimizer: MatrixOptimizer, model: GPT, mesh: DeviceMesh) -> Setup:
    chosen, others = _split(model, mesh)
    # gradients are views of what is reduced, rather than copies of it
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _setup(wrapped, model, chosen, others, matrix_optimizer)


def _setup(
    wrapped: nn.Module, model: GPT, chosen: list[str], others: list[str], matrix_optimizer: MatrixOptimizer
) -> Setup:
    params = dict(model.named_parameters())
    rest = torch.optim.AdamW([params[name] for name in others], lr=OTHER_LR, foreach=True)
    return Setup(wrapped, [matrix_optimizer([params[name] for name in chosen]), rest])


SYSTEMS: dict[str, Callable[[GPT, DeviceMesh], Setup]] = {
    OURS: lambda model, mesh: with_mfsdp(model, mesh, example_options()),
    "stock": lambda model, mesh: with_fsdp2(model, mesh, example_options()),
    "gather-once": lambda model, mesh: _on_fsdp2(lambda params: GatherOnceMuon(params, lr=LR), model, mesh),
    "all-to-all": lambda model, mesh: _on_fsdp2(lambda params: AllToAllMuon(params, lr=LR), model, mesh),
    "zero1-owner": lambda model, mesh: _on_ddp(lambda params: zero1_owner_muon(params, lr=LR), model, mesh),
    "ddp": lambda model, mesh: _on_ddp(lambda params: torch.optim.Muon(params, lr=LR), model, mesh),
    "adamw": lambda model, mesh: with_fsdp2(model, mesh, example_options("adamw")),
}
"""Name -> what makes a model ready; FSDP2 lies under stock, gather-once, all-to-all and adamw."""
