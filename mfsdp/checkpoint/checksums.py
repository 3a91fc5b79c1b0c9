"""Checksums of files: CRC-32 of each block, so that several ranks can share the checking of one file.

They are computed by the package zlib-ng if it is installed, several times as fast as by Python's zlib.
"""

import io
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["BLOCK", "ChecksumStream", "FileSum", "Scratch", "checksum_of_block", "checksum_of_file"]

BLOCK = 1 << 25
"""Bytes of a block: large enough that a terabyte has only some ten thousand of them."""

_PIECE = 1 << 19
"""Bytes that are summed and then written while they are still in the processor's cache."""


@dataclass(frozen=True)
class FileSum:
    """What a file should be.

    Attributes:
        size: in bytes.
        checksums: CRC-32 of each of its blocks of ``BLOCK`` bytes, the last of which may be shorter.
    """

    size: int
    checksums: tuple[int, ...]

    def __post_init__(self) -> None:
        blocks = -(-self.size // BLOCK)
        if self.size < 0 or len(self.checksums) != blocks:
            raise ValueError(
                f"a file of {self.size} bytes has {blocks} blocks of {BLOCK} bytes, not {len(self.checksums)}."
            )
        if not all(0 <= checksum < 1 << 32 for checksum in self.checksums):
            raise ValueError(f"a CRC-32 has 32 bits, but these checksums are {list(self.checksums)}.")


class _Summing:
    """The checksums of bytes that arrive piece by piece."""

    def __init__(self) -> None:
        self._size = 0
        self._sums: list[int] = []

    def add(self, piece: memoryview) -> None:
        while piece:
            within = self._size % BLOCK
            if within == 0:
                self._sums.append(0)
            now, piece = piece[: BLOCK - within], piece[BLOCK - within :]
            self._sums[-1] = crc32(now, self._sums[-1])
            self._size += len(now)

    def result(self) -> FileSum:
        return FileSum(self._size, tuple(self._sums))


class ChecksumStream(io.RawIOBase):
    """Writes to ``stream`` and sums what it writes.

    Args:
        stream: open for writing, buffered, at its beginning; nothing else may write to it. Closing is left to its
            owner.
    """

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream
        self._summing = _Summing()

    def sum(self) -> FileSum:
        """Of what has been written so far."""
        return self._summing.result()

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._summing.add(piece)
            self._stream.write(piece)
        return len(view)

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._stream.tell()

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def checksum_of_file(path: Path) -> FileSum:
    """The size and checksums of the file at ``path``.

    Raises:
        OSError: it cannot be read.
    """
    summing = _Summing()
    with path.open("rb", buffering=0) as file:
        for piece in _pieces(file):
            summing.add(piece)
    return summing.result()


def checksum_of_block(path: Path, block: int, memory: Callable[[int, int], memoryview] | None = None) -> int:
    """CRC-32 of block number ``block`` of the file at ``path``; 0 if the file ends before it.

    Args:
        path: of the file.
        block: which block.
        memory: (position in the file, number of bytes) -> where the bytes from that position on are to be read to:
            not more than that number, at least one. By default they are read and forgotten.

    Raises:
        OSError: it cannot be read.
    """
    memory = Scratch().memory if memory is None else memory
    checksum, position, end = 0, block * BLOCK, (block + 1) * BLOCK
    with path.open("rb", buffering=0) as file:
        while position < end:
            piece = memory(position, min(_PIECE, end - position))
            count = os.preadv(file.fileno(), [piece], position)
            if not count:
                break
            checksum = crc32(piece[:count], checksum)
            position += count
    return checksum


class Scratch:
    """Where bytes are read to that nobody wants to keep."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray(_PIECE))

    def memory(self, position: int, count: int) -> memoryview:
        """For ``count`` bytes or fewer, wherever they come from; the same memory each time."""
        return self._bytes[:count]


def _pieces(file: io.FileIO) -> Iterable[memoryview]:
    buffer = memoryview(bytearray(_PIECE))
    while count := file.readinto(buffer):
        yield buffer[:count]
