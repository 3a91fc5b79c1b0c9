"""Where tensors lie in the files of a checkpoint, so that their bytes go straight to where they belong.

DCP's reader copies them twice on the way, and takes no part in checking the files.
"""

import io
import os
import struct
import zipfile
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from mfsdp.checkpoint.checksums import Scratch
from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.memory import memory_of, prefer_huge_pages

__all__ = ["Extents"]


@dataclass(frozen=True)
class _Extent:
    """Bytes of a file, and the memory that they belong into.

    Attributes:
        start: position of the first in the file.
        target: has the memory.
    """

    start: int
    target: Tensor

    @property
    def end(self) -> int:
        return self.start + self.target.nbytes

    def memory(self) -> memoryview:
        """As bytes; valid as long as the tensor is."""
        return memory_of(self.target)


class Extents:
    """All that one rank wants to read directly, by file.

    Args:
        folder: where the files are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of_file: dict[str, list[_Extent]] = {}
        self._taken: dict[str, tuple[int, int]] = {}
        self._scratch = Scratch()

    def add(self, contents: Contents, items: Iterable[ReadItem], planner: LoadPlanner) -> list[ReadItem]:
        """Find the extents of ``items``, in a checkpoint that is stored plainly.

        What is wanted of a stored tensor is often a range of its bytes: the whole of it, or some of its rows.

        Returns:
            The items that are none: to be read in another way.

        Raises:
            OSError, zipfile.BadZipFile: a file cannot be read, or has other bytes than were written.
        """
        by_file: dict[str, list[ReadItem]] = {}
        rest: list[ReadItem] = []
        for item in items:
            if item.type is LoadItemType.TENSOR and _wanted_bytes(contents, item):
                info = contents.metadata.storage_data[item.storage_index]
                by_file.setdefault(info.relative_path, []).append(item)
            else:
                rest.append(item)
        for name, its in by_file.items():
            found: list[_Extent] = []
            with (self._folder / name).open("rb", buffering=0) as file:
                for item in its:
                    extent = _extent(contents, file, item, planner)
                    if extent is None:
                        rest.append(item)
                    else:
                        prefer_huge_pages(extent.target)
                        found.append(extent)
            found.sort(key=lambda extent: extent.start)
            assert all(one.end <= other.start for one, other in pairwise(found)), "bytes are wanted twice"
            self._of_file[name] = found
        return rest

    def memory(self, file: str, position: int, count: int) -> memoryview:
        """Where the ``count`` bytes from ``position`` of ``file`` on, or the first few of them, are to be read to.

        That is where they belong, or memory that is used again if no tensor wants them. They are taken for read
        afterwards. The positions asked for must be neighbours, in order.
        """
        self._taken[file] = (self._taken.get(file, (position, 0))[0], position + count)
        extents = self._of_file.get(file, [])
        next_one = bisect_right(extents, position, key=lambda extent: extent.end)
        if next_one == len(extents):
            return self._scratch.memory(position, count)
        extent = extents[next_one]
        if position < extent.start:
            return self._scratch.memory(position, min(count, extent.start - position))
        return extent.memory()[position - extent.start : position - extent.start + count]

    def read_rest(self) -> None:
        """Read what was not taken.

        Raises:
            OSError: a file cannot be read, or ends too early.
        """
        for name, extents in self._of_file.items():
            taken_from, taken_to = self._taken.get(name, (0, 0))
            with (self._folder / name).open("rb", buffering=0) as file:
                for extent in extents:
                    _read(file, extent, extent.start, min(extent.end, taken_from))
                    _read(file, extent, max(extent.start, taken_to), extent.end)


def _read(file: io.FileIO, extent: _Extent, start: int, end: int) -> None:
    memory = extent.memory()
    while start < end:
        count = os.preadv(file.fileno(), [memory[start - extent.start : end - extent.start]], start)
        if not count:
            raise OSError(f"{file.name} ends in the middle of a tensor")
        start += count


def _wanted_bytes(contents: Contents, item: ReadItem) -> int:
    entry = contents.entries[item.storage_index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return prod(item.lengths) * entry.properties.dtype.itemsize


def _extent(contents: Contents, file: io.FileIO, item: ReadItem, planner: LoadPlanner) -> _Extent | None:
    """Where what ``item`` wants lies, if it lies there as its target has it."""
    entry = contents.entries[item.storage_index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    dtype = entry.properties.dtype
    chunk = next(each for each in entry.chunks if each.offsets == item.storage_index.offset)
    target = planner.resolve_tensor(item).detach()
    first = _first_element(item, chunk)
    if first is None or target.dtype != dtype or not target.is_cpu or not target.is_contiguous():
        return None
    info = contents.metadata.storage_data[item.storage_index]
    start = _start_of_data(file, info.offset, info.length, prod(chunk.sizes) * dtype.itemsize)
    return None if start is None else _Extent(start + first * dtype.itemsize, target)


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
