"""Bytes of tensors, by accounting of their storages rather than by what the system says."""

import gc
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.profiler_util import MEMORY_EVENT_NAME
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


def peak_memory(step: Callable[[], None]) -> int:
    """Most bytes that the CPU allocator had handed out during ``step``, above its level at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == MEMORY_EVENT_NAME)
    level = peak = 0
    for _, change in changes:
        level += change
        peak = max(peak, level)
    return peak


def resident_memory() -> int:
    """Bytes of the storages of all tensors that this process can reach."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if isinstance(found, Tensor):
            local = found.to_local() if isinstance(found, DTensor) else found
            if type(local) in (Tensor, torch.nn.Parameter) and local.device.type == "cpu":
                storage = local.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
