"""The runtime on one GPU, in one command: right streams, and no needless synchronisation.

    python examples/benchmark/gpu_runtime.py

1. Two ranks share the GPU over gloo, with CUDA tensors: their losses are those of two CPU ranks, step by
   step. A gather or a reduction that a stream does not wait for would show here.
2. One rank over NCCL: the step runs, and a profile of it has no more synchronisations of CPU and GPU than
   FSDP2's step of the same model.

Says so and ends where there is no GPU.
"""

import copy
import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.profiler import ProfilerActivity, profile

import mfsdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpt import GPT

STEPS = 10
TOLERANCE = 1e-3
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def shard(model: nn.Module, device: str, world_size: int, with_mfsdp: bool = True) -> nn.Module:
    mesh = init_device_mesh(device, (world_size,))
    model = model.to(device)
    plan = mfsdp.plan(model, mesh)
    for module in (*model.blocks, model):
        if with_mfsdp:
            mfsdp.fully_shard(module, mesh=mesh, plan=plan)
        else:
            fsdp2_fully_shard(module, mesh=mesh)
    return model


def join(rank: int, world_size: int, port: int, backend: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(width=256, layers=6, heads=4, context=64)


def losses(rank: int, port: int, device: str, results: str) -> None:
    """One of two ranks: train a little, and write the losses down."""
    join(rank, 2, port, "gloo")
    model = shard(gpt(), device, 2)
    optimizer = mfsdp.optim.build_optimizer(model, matrix_kwargs={"lr": 0.002}, other_kwargs={"lr": 3e-4})
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(STEPS):
        tokens = torch.randint(256, (4, 65), generator=generator).to(device)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    Path(results, f"{device}.{rank}").write_text(" ".join(map(repr, seen)))
    dist.destroy_process_group()


def compare_losses(folder: str) -> None:
    for device in ("cpu", "cuda"):
        mp.spawn(losses, args=(free_port(), device, folder), nprocs=2)
    for rank in range(2):
        on = {
            device: [float(text) for text in Path(folder, f"{device}.{rank}").read_text().split()]
            for device in ("cpu", "cuda")
        }
        apart = max(abs(a - b) / b for a, b in zip(on["cuda"], on["cpu"], strict=True))
        print(f"rank {rank}: losses on GPU and CPU are {apart:.1e} apart (at most {TOLERANCE:.0e})")
        if apart > TOLERANCE:
            raise SystemExit("the losses differ: a stream does not wait for what it needs")


def synchronisations(model: nn.Module) -> int:
    """How often a step of ``model`` makes the CPU wait for the GPU."""
    tokens = torch.randint(256, (4, 65), device="cuda")
    for _ in range(3):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return sum(event.count for event in profiler.key_averages() if event.key in SYNCHRONISATIONS)


def count_synchronisations() -> None:
    join(0, 1, free_port(), "nccl")
    model = gpt()
    counts = {
        name: synchronisations(shard(copy.deepcopy(model), "cuda", 1, with_mfsdp=name == "mfsdp"))
        for name in ("fsdp2", "mfsdp")
    }
    dist.destroy_process_group()
    print(f"synchronisations of CPU and GPU in a step: {counts['mfsdp']}, FSDP2's {counts['fsdp2']}")
    if counts["mfsdp"] > counts["fsdp2"]:
        raise SystemExit("the step synchronises more often than FSDP2's")


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: nothing was checked")
        return
    with tempfile.TemporaryDirectory() as folder:
        compare_losses(folder)
    count_synchronisations()


if __name__ == "__main__":
    main()
