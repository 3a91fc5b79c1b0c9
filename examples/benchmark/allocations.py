"""Bytes of tensors, by accounting of their storages rather than by what the system says."""

import gc
import json
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile


class LiveBlocks:
    """The blocks of memory that are allocated at a time.

    A block may be freed where the profiler does not look, which is in the threads of gloo: then it is taken for freed
    when its place is used again.

    Attributes:
        level: bytes of all blocks.
        peak: the most that ``level`` was.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}
        self.level = self.peak = 0

    def allocate(self, start: int, size: int) -> None:
        first = bisect_left(self._starts, start)
        if first and self._starts[first - 1] + self._sizes[self._starts[first - 1]] > start:
            first -= 1
        for other in self._starts[first : bisect_left(self._starts, start + size)]:
            self.free(other)
        insort(self._starts, start)
        self._sizes[start] = size
        self.level += size
        self.peak = max(self.peak, self.level)

    def free(self, start: int) -> None:
        """Free the block that starts here, if there is one."""
        if start in self._sizes:
            self._starts.pop(bisect_left(self._starts, start))
            self.level -= self._sizes.pop(start)


def peak_memory(step: Callable[[], None]) -> int:
    """Most bytes that the CPU allocator had handed out during ``step``, beside what it had before.

    What was there before counts as kept, even if the step frees it: the profiler does not see that.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    blocks = LiveBlocks()
    for start, change in _changes(profiler):
        if change > 0:
            blocks.allocate(start, change)
        else:
            blocks.free(start)
    return blocks.peak


def _changes(profiler: profile) -> list[tuple[int, int]]:
    """Address and bytes (less than 0 where freed) of each block of the CPU's, in the order of time.

    Read from the trace that the profiler writes: its events in Python have no addresses, without which a block that was
    freed unseen would count for ever.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_bytes())["traceEvents"]
    on_cpu = [e for e in events if e["name"] == "[memory]" and e["args"]["Device Id"] == -1]
    return [(e["args"]["Addr"], e["args"]["Bytes"]) for e in sorted(on_cpu, key=lambda e: e["ts"])]


def resident_memory() -> int:
    """Bytes of the storages of all tensors that this process can reach, and of their gradients."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), Tensor):  # isinstance asks objects for their class, and some warn
            # a gradient that nothing in Python has looked at is not among the objects; a view has none of its own, and
            # one whose base was changed since refuses to say whether it is a leaf
            for tensor in (found, found.grad if not found._is_view() and found.is_leaf else None):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                if type(local) in (Tensor, torch.nn.Parameter) and local.device.type == "cpu":
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
