"""The same model made ready by mfsdp, by PyTorch's FSDP2, and by PyTorch's DDP."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from gpt import GPT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import mfsdp
from mfsdp.optim.slow_dtypes import is_slow_at_16_bits
from mfsdp.planning import COST_MODELS


@dataclass
class Setup:
    """A model that is ready to train.

    Attributes:
        model: maps (tokens, targets) to the loss.
        optimizers: all of them are to be stepped.
        plan: who owns what; None for the baselines.
        remark: what the user should know of a choice that was made for them; else empty.
    """

    model: nn.Module
    optimizers: list[Optimizer]
    plan: mfsdp.ShardPlan | None = None
    remark: str = ""


def with_mfsdp(model: GPT, mesh: DeviceMesh, args: argparse.Namespace) -> Setup:
    """This library: plan, shard block by block, one optimizer."""
    plan = mfsdp.plan(model, mesh, cost_model=COST_MODELS[args.optimizer]())
    policy = mixed_precision(args)
    compile_blocks(model, args)
    if args.compile == "graph":
        mfsdp.fully_shard(model, mesh=mesh, plan=plan, mp_policy=policy, style="graph")
        model.compile(fullgraph=True)
    else:
        for block in model.blocks:
            mfsdp.fully_shard(block, mesh=mesh, plan=plan, mp_policy=policy)
        mfsdp.fully_shard(model, mesh=mesh, plan=plan, mp_policy=policy)

    matrix_options, remark = {"lr": args.lr}, ""
    if args.optimizer == "muon":
        matrix_options["ns_dtype"], remark = newton_schulz_dtype(mesh.device_type, args)
    optimizer = mfsdp.optim.build_optimizer(
        model,
        matrix=mfsdp.optim.AdamW if args.optimizer == "adamw" else args.optimizer,
        matrix_kwargs=matrix_options,
        other_kwargs={"lr": args.other_lr},
        overlap="backward" if args.overlap else None,
    )
    return Setup(model, [optimizer], plan, remark)


def with_fsdp2(model: GPT, mesh: DeviceMesh, args: argparse.Namespace) -> Setup:
    """PyTorch's FSDP2, and its Muon, which gathers every matrix in every step."""
    matrices = matrix_names(model, mesh)
    policy = mixed_precision(args)
    compile_blocks(model, args)
    for block in model.blocks:
        fsdp2_fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp2_fully_shard(model, mesh=mesh, mp_policy=policy)
    return Setup(model, torch_optimizers(model, matrices, args))


def with_ddp(model: GPT, mesh: DeviceMesh, args: argparse.Namespace) -> Setup:
    """PyTorch's DDP: everything on every rank, and every rank steps everything."""
    compile_blocks(model, args)
    optimizers = torch_optimizers(model, matrix_names(model, mesh), args)
    return Setup(DistributedDataParallel(model), optimizers)


SETUPS: dict[str, Callable[[GPT, DeviceMesh, argparse.Namespace], Setup]] = {
    "mfsdp": with_mfsdp,
    "fsdp2": with_fsdp2,
    "ddp": with_ddp,
}


def newton_schulz_dtype(device_type: str, args: argparse.Namespace) -> tuple[torch.dtype, str]:
    """In what Muon iterates, and a remark if that is not what torch.optim.Muon does."""
    if args.ns_dtype is not None:
        return {"bf16": torch.bfloat16, "fp32": torch.float32}[args.ns_dtype], ""
    if is_slow_at_16_bits(device_type):
        return torch.float32, "Muon iterates in fp32: bf16 is slow on this processor (--ns-dtype bf16 for it)"
    return torch.bfloat16, ""


def compile_blocks(model: GPT, args: argparse.Namespace) -> None:
    """With ``--compile block``: each block is a graph of its own."""
    if args.compile == "block":
        for block in model.blocks:
            block.compile()


def mixed_precision(args: argparse.Namespace) -> MixedPrecisionPolicy:
    """Compute in ``args.dtype``; reduce gradients in fp32."""
    if args.dtype == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def matrix_names(model: nn.Module, mesh: DeviceMesh) -> set[str]:
    """What the planner takes for a matrix; embeddings and the output head are none."""
    entries = mfsdp.plan(model, mesh).entries
    return {name for name, entry in entries.items() if entry.role is mfsdp.Role.MATRIX}


def torch_optimizers(model: nn.Module, matrices: set[str], args: argparse.Namespace) -> list[Optimizer]:
    """torch.optim.Muon (or AdamW) for the matrices, AdamW for everything else."""
    named = list(model.named_parameters())
    chosen = [param for name, param in named if name in matrices]
    others = [param for name, param in named if name not in matrices]
    first: Optimizer
    if args.optimizer == "muon":
        first = torch.optim.Muon(chosen, lr=args.lr)
    else:
        first = torch.optim.AdamW(chosen, lr=args.lr, foreach=True)
    return [first, torch.optim.AdamW(others, lr=args.other_lr, foreach=True)]
