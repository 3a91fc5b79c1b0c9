"""Reading large tensors straight into place, where DCP's reader would copy them twice on the way."""

import ctypes
import io
import os
import struct
import zipfile
from math import prod

from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from mfsdp.checkpoint.contents import Contents

__all__ = ["DirectReader"]

_LARGE = 1 << 14
"""Bytes from which on it pays to find where a tensor's data lies in the file."""


class DirectReader(FileSystemReader):
    """DCP's reader of files, for checkpoints in which every tensor is stored contiguous, in this machine's byte order.

    What is wanted of a stored tensor is often a range of its bytes: the whole of it, or some of its rows. These are
    read from the file to where they belong; anything else is left to DCP.
    """

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents.folder)
        self._contents = contents

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read the items of ``plan`` to where ``planner`` wants them."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        rest: list[ReadItem] = []
        for name, items in by_file.items():
            with (self._contents.folder / name).open("rb", buffering=0) as file:
                rest += [item for item in items if not self._read(file, item, planner)]
        return super().read_data(LoadPlan(rest), planner)

    def _read(self, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> bool:
        """Read ``item`` directly, if that can be done."""
        if item.type is not LoadItemType.TENSOR:
            return False
        entry = self._contents.entries[item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        itemsize = entry.properties.dtype.itemsize
        if prod(item.lengths) * itemsize < _LARGE:
            return False
        chunk = next(each for each in entry.chunks if each.offsets == item.storage_index.offset)
        target = planner.resolve_tensor(item).detach()
        first = _first_element(item, chunk)
        if first is None or target.dtype != entry.properties.dtype or not target.is_cpu or not target.is_contiguous():
            return False
        info = self.storage_data[item.storage_index]
        start = _start_of_data(file, info.offset, info.length, prod(chunk.sizes) * itemsize)
        if start is None:
            return False
        _read_into(target, file, start + first * itemsize)
        planner.commit_tensor(item, target)
        return True


def _first_element(item: ReadItem, chunk: ChunkStorageMetadata) -> int | None:
    """Where in the stored chunk the wanted elements begin, if they lie there one after another."""
    if item.lengths[1:] != chunk.sizes[1:]:
        return None
    return item.storage_offsets[0] * prod(chunk.sizes[1:]) if item.lengths else 0


def _start_of_data(file: io.FileIO, offset: int, length: int, nbytes: int) -> int | None:
    """Where in ``file`` the ``nbytes`` of a tensor lie that torch's serialization, a ZIP archive, has put there.

    Args:
        file: of the checkpoint.
        offset: of the archive in the file.
        length: of the archive.
        nbytes: of the tensor; if it was stored with more, or compressed, the answer is None.
    """
    with zipfile.ZipFile(_Part(file, offset, length)) as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
    if record.compress_type != zipfile.ZIP_STORED or record.file_size != nbytes:
        return None
    header = offset + record.header_offset
    name, extra = struct.unpack("<HH", os.pread(file.fileno(), 4, header + 26))
    return header + 30 + name + extra


def _read_into(target: Tensor, file: io.FileIO, position: int) -> None:
    memory = memoryview((ctypes.c_char * target.nbytes).from_address(target.data_ptr())).cast("B")
    while memory:
        count = os.preadv(file.fileno(), [memory], position)
        if not count:
            raise OSError(f"{file.name} ends in the middle of a tensor")
        memory, position = memory[count:], position + count


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        wanted = memoryview(buffer)[: max(0, self._length - self._position)]
        count = os.preadv(self._file.fileno(), [wanted], self._offset + self._position)
        self._position += count
        return count
