"""Copies of what a rank is to write, so that training may change the originals."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from mfsdp.checkpoint.writing import PlannedSave, nbytes_of

__all__ = ["Layout", "StagedPlanner", "copied", "copied_to_shared_memory"]

_ALIGNMENT = 64
_SHARED_MEMORY = Path("/dev/shm")

Data = Tensor | BytesIO


class StagedPlanner(DefaultSavePlanner):
    """Gives a writer data that is there already.

    Args:
        data: by the index of the item to be written.
    """

    def __init__(self, data: Mapping[MetadataIndex, Data]) -> None:
        super().__init__()
        self._data = data

    def resolve_data(self, write_item: WriteItem) -> Data:
        return self._data[write_item.index]


def copied(planned: PlannedSave, rank: int) -> StagedPlanner:
    """Copies, in memory of this process, of what ``rank``, this one, is to write."""
    return StagedPlanner(
        {
            index: data.to("cpu", copy=True) if isinstance(data, Tensor) else data
            for index, data in _resolved(planned, rank)
        }
    )


def _resolved(planned: PlannedSave, rank: int) -> Iterator[tuple[MetadataIndex, Data]]:
    return ((item.index, planned.planner.resolve_data(item)) for item in planned.plans[rank].items)


@dataclass(frozen=True)
class Layout:
    """What lies where in shared memory.

    Attributes:
        size: of the memory, in bytes.
        tensors: where each tensor begins, with its dtype and shape.
        objects: what is no tensor, as it is to be written; not in the memory.
    """

    size: int
    tensors: dict[MetadataIndex, tuple[int, torch.dtype, torch.Size]]
    objects: dict[MetadataIndex, bytes]

    def planner(self, file: int) -> StagedPlanner:
        """What gives a writer this data, where ``file`` is the memory."""
        memory = mmap.mmap(file, max(1, self.size))
        data: dict[MetadataIndex, Data] = {index: BytesIO(content) for index, content in self.objects.items()}
        return StagedPlanner(data | {index: _view(memory, *place) for index, place in self.tensors.items()})


def copied_to_shared_memory(planned: PlannedSave, rank: int) -> tuple[BinaryIO, Layout]:
    """Copies of what ``rank``, this one, is to write, in memory that another process can be given.

    Returns:
        The memory, as a file without a name, so that it is gone when all have closed it, however they end; and
        what lies where in it.
    """
    size = sum(_room(nbytes_of(item)) for item in planned.plans[rank].items)
    file = tempfile.TemporaryFile(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None)  # noqa: SIM115 (returned)
    os.ftruncate(file.fileno(), max(1, size))
    if size:
        os.posix_fallocate(file.fileno(), 0, size)  # fails here, where a write to the mapped memory would kill
    memory = mmap.mmap(file.fileno(), max(1, size))
    layout = Layout(size, {}, {})
    position = 0
    for index, data in _resolved(planned, rank):
        if isinstance(data, Tensor):
            layout.tensors[index] = (position, data.dtype, data.shape)
            _view(memory, position, data.dtype, data.shape).copy_(data)
            position += _room(data.nbytes)
        else:
            layout.objects[index] = data.getvalue()
    return file, layout


def _room(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _view(memory: mmap.mmap, position: int, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not shape.numel():
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel(), offset=position).view(shape)
