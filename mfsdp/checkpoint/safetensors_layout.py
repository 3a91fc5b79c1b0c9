"""What lies where in ``.safetensors`` files: known before anything is written, so that all ranks can write at once.

A file is the length of its header (8 bytes, little-endian), the header (JSON, padded with spaces to a multiple of
8 bytes), and the tensors' bytes one after the other, without gaps. The header says of each tensor its dtype, its shape
and which bytes after the header are its own (https://huggingface.co/docs/safetensors, "Format").
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod

import torch

from mfsdp.checkpoint.errors import CheckpointError

__all__ = ["INDEX", "Layout", "TensorEntry", "TensorFile"]

INDEX = "model.safetensors.index.json"
"""The file that says which tensor is in which file."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls each dtype that it knows."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFile:
    """One ``.safetensors`` file.

    Attributes:
        name: of the file.
        entries: what is in it, in the order of its bytes.
        aliases: other name of a tensor -> its name here; of those in this file.
    """

    name: str
    entries: tuple[TensorEntry, ...]
    aliases: Mapping[str, str]

    @cached_property
    def header(self) -> bytes:
        """All that comes before the tensors' bytes."""
        # what other programs expect to be told, and what safetensors.torch.save_model says of tied tensors
        fields: dict[str, object] = {"__metadata__": {"format": "pt", **self.aliases}}
        for entry, start in zip(self.entries, self._starts(), strict=True):
            fields[entry.name] = {
                "dtype": DTYPES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [start, start + entry.nbytes],
            }
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Name of a tensor -> where its bytes begin, from the beginning of the file."""
        return {entry.name: len(self.header) + start for entry, start in zip(self.entries, self._starts(), strict=True)}

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries)

    def _starts(self) -> Iterator[int]:
        return accumulate((entry.nbytes for entry in self.entries[:-1]), initial=0) if self.entries else iter(())


@dataclass(frozen=True)
class Layout:
    """The files of one export."""

    files: tuple[TensorFile, ...]

    @classmethod
    def of(cls, entries: Sequence[TensorEntry], aliases: Mapping[str, str], max_file_bytes: int) -> "Layout":
        """Put ``entries`` into files, in their order.

        Args:
            entries: each tensor once.
            aliases: other name of a tensor -> its name in ``entries``.
            max_file_bytes: of the tensors in a file; a tensor that is larger gets a file of its own.

        Raises:
            CheckpointError: there is no tensor, or one of a dtype that the format does not know.
        """
        if unknown := [f"{entry.name} ({entry.dtype})" for entry in entries if entry.dtype not in DTYPES]:
            raise CheckpointError(f".safetensors files cannot hold the dtypes of {', '.join(unknown)}.")
        if not entries:
            raise CheckpointError("there is no tensor to write into a .safetensors file.")
        parts = list(_parts(entries, max_file_bytes))
        names = (
            ["model.safetensors"] if len(parts) == 1 else [_numbered(part, len(parts)) for part in range(len(parts))]
        )
        return cls(tuple(_file(name, part, aliases) for name, part in zip(names, parts, strict=True)))

    def index(self) -> str:
        """The text of the file ``INDEX``."""
        total = sum(entry.nbytes for file in self.files for entry in file.entries)
        weight_map = {entry.name: file.name for file in self.files for entry in file.entries}
        return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"


def _parts(entries: Iterable[TensorEntry], max_bytes: int) -> Iterator[list[TensorEntry]]:
    part: list[TensorEntry] = []
    size = 0
    for entry in entries:
        if part and size + entry.nbytes > max_bytes:
            yield part
            part, size = [], 0
        part.append(entry)
        size += entry.nbytes
    yield part


def _file(name: str, entries: Sequence[TensorEntry], aliases: Mapping[str, str]) -> TensorFile:
    # the widest elements first: then all tensors lie at multiples of their element's size
    ordered = tuple(sorted(entries, key=lambda entry: -entry.dtype.itemsize))
    here = {entry.name for entry in entries}
    return TensorFile(name, ordered, {other: first for other, first in aliases.items() if first in here})


def _numbered(part: int, parts: int) -> str:
    return f"model-{part + 1:05}-of-{parts:05}.safetensors"
