"""Real text without a download: the Python standard library's own sources, or a file or folder of yours."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor

ENOUGH = 8_000_000
"""Bytes after which no more files are read: a short run sees only a fraction of them."""

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, split by file.

    Attributes:
        train: shape ``(n,)``, uint8.
        validation: shape ``(m,)``, uint8; from other files than ``train``.
        source: where it comes from.
    """

    train: Tensor
    validation: Tensor
    source: str

    def batch(self, split: Tensor, sequences: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """``sequences`` random pieces as (tokens, targets), each of shape ``(sequences, length)``, int64."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(split) - length, (sequences,), generator=generator)
        pieces = torch.stack([split[start : start + length + 1] for start in starts.tolist()]).long()
        return pieces[:, :-1], pieces[:, 1:]


def load(path: str | None, length: int) -> Corpus:
    """Read the text at ``path``, a file or a folder, or by default the standard library's sources.

    One file in ten is for validation, chosen by its name, so that the split is the same everywhere; of a
    single file it is the last tenth.

    Raises:
        ValueError: there is no such path, or not enough text in it for sequences of ``length``.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    if root.is_file():
        text = root.read_bytes()
        train, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    elif root.is_dir():
        train, validation = _read_folder(root, "*.py" if path is None else "*")
    else:
        raise ValueError(f"--data {path}: there is no such file or folder.")
    for name, text in (("training", train), ("validation", validation)):
        if len(text) <= length + 1:
            raise ValueError(
                f"--data {root}: {len(text)} bytes of {name} text are too few for {length} bytes at a time. "
                f"Give it more text (in a folder, more files) or a smaller --context."
            )
    return Corpus(
        train=torch.frombuffer(bytearray(train), dtype=torch.uint8),
        validation=torch.frombuffer(bytearray(validation), dtype=torch.uint8),
        source="the standard library's sources" if path is None else str(root),
    )


def _read_folder(root: Path, pattern: str) -> tuple[bytes, bytes]:
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for file in _files(root, pattern):
        for_validation = zlib.crc32(file.relative_to(root).as_posix().encode()) % 10 == 0
        text = file.read_bytes()
        parts[for_validation].append(text)
        size += len(text)
        if size > ENOUGH:
            break
    return b"".join(parts[0]), b"".join(parts[1])


def _files(root: Path, pattern: str) -> Iterator[Path]:
    """The files of a folder in a fixed order, without hidden ones, installed packages and tests."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED and not name.startswith("."))
        for name in sorted(files):
            if fnmatch(name, pattern) and not name.startswith("."):
                yield Path(folder, name)
