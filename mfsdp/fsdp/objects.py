"""Python objects of all ranks, gathered without NumPy, which ``torch.distributed.all_gather_object`` needs."""

import pickle
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

__all__ = ["all_gather_object"]

_T = TypeVar("_T")


def all_gather_object(mine: _T, group: ProcessGroup | None = None) -> list[_T]:
    """``mine`` of every rank of ``group`` (by default of all), in the order of its ranks.

    Args:
        mine: anything that can be pickled.
        group: who takes part.
    """
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.accelerator.current_accelerator()
    packed = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8).to(device)
    size = torch.tensor([packed.numel()], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    padded = packed.new_zeros(longest)
    padded[: packed.numel()] = packed
    everyone = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded, group=group)
    return [_unpacked(each[: int(size)]) for each, size in zip(everyone, sizes, strict=True)]


def _unpacked(packed: torch.Tensor) -> Any:
    buffer = bytearray(packed.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(packed)
    return pickle.loads(buffer)
