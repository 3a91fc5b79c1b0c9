"""Export to ``.safetensors`` files: every rank writes what it owns, at the place in the file that it belongs to.

Nothing is gathered. A matrix is written by its owner, rows by the ranks that have them, what is replicated by one
of the ranks that have it; a rank holds no more than its shard and a copy of one piece of it.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from mfsdp.checkpoint import directory
from mfsdp.checkpoint.contents import Contents, open_checkpoint
from mfsdp.checkpoint.durable import write_file
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.memory import memory_of
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.reading import read
from mfsdp.checkpoint.safetensors_layout import INDEX, Layout, TensorEntry
from mfsdp.checkpoint.writing import PlannedSave

__all__ = ["checkpoint_to_safetensors", "save_safetensors"]

_MODEL = "model"
_AT_ONCE = 1 << 26
"""Bytes that are handed to the operating system in one call; more than 2 GiB it does not take."""


@dataclass(frozen=True)
class _Piece:
    """A rectangular piece of a tensor.

    Attributes:
        name: the tensor's.
        offsets: where the piece begins in the tensor.
        value: the piece.
    """

    name: str
    offsets: tuple[int, ...]
    value: Tensor


Pieces = Callable[[], Iterable[_Piece]]
"""Gives, one by one, the pieces that this rank is to write."""


def save_safetensors(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_file_bytes: int = 5_000_000_000,
    process_group: ProcessGroup | None = None,
) -> Path:
    """Write a model's tensors, whole and by unsharded names, into ``.safetensors`` files; all ranks call it.

    The files are those that Hugging Face's libraries read: ``model.safetensors``, or
    ``model-00001-of-00003.safetensors`` and so on, and ``model.safetensors.index.json``. Of a tensor with several
    names one is written; the other names are in the file's metadata. The folder appears when all is written.

    Args:
        folder: to be made, on a file system that all ranks share; it does not exist or is empty.
        model: sharded by ``mfsdp.fully_shard`` or by FSDP2, wrapped by DDP, or a plain module of one process.
        max_file_bytes: of the tensors in one file; a larger tensor gets a file of its own.
        process_group: the ranks that hold the model; by default all.

    Returns:
        The folder, an absolute path.

    Raises:
        CheckpointError: on every rank, if it cannot be written, or an entry of the model's state is no tensor.
    """
    ranks = Ranks(process_group)

    def collected() -> tuple[dict[str, dict[str, Tensor]], dict[str, tuple[str, ...]]]:
        state = ModelState.of(model)
        canonical = state.canonical
        return {_MODEL: {k: v for k, v in state.values.items() if canonical.get(k, k) == k}}, state.ties

    planned = PlannedSave.of(collected, None, ranks)
    entries = {key: planned.metadata.state_dict_metadata[key] for key in planned.planner.state_dict}
    aliases = {other: first for first, others in planned.aliases.items() for other in others}

    def pieces() -> Iterator[_Piece]:
        for item in planned.plans[ranks.rank].items:
            assert item.tensor_data is not None  # what is no tensor was refused
            value = planned.planner.resolve_data(item)
            assert isinstance(value, Tensor)
            yield _Piece(_plain(item.index.fqn, _MODEL), tuple(item.tensor_data.chunk.offsets), value)

    return _export(folder, _layout(entries, aliases, _MODEL, max_file_bytes), pieces, ranks)


def checkpoint_to_safetensors(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    max_file_bytes: int = 5_000_000_000,
    prefix: str = _MODEL,
    process_group: ProcessGroup | None = None,
) -> Path:
    """Write the model's tensors in a saved checkpoint into ``.safetensors`` files, tensor by tensor.

    It needs no model and no ranks: one process does it all. If there are several, all call it and share the work.

    Args:
        checkpoint: the folder of a checkpoint, by :func:`save` or by ``torch.distributed.checkpoint.save``.
        folder: to be made; as for :func:`save_safetensors`.
        max_file_bytes: likewise.
        prefix: the key under which the model lies in a checkpoint that mfsdp has not written; ``""`` for the top.
        process_group: the ranks that share the work; by default all.

    Returns:
        The folder, an absolute path.

    Raises:
        CheckpointError: on every rank, if the checkpoint is damaged or has no model, or if it cannot be written.
    """
    ranks = Ranks(process_group)
    contents = open_checkpoint(directory.resolve(checkpoint), ranks)
    prefix = _MODEL if contents.is_own else prefix
    keys = [f"{prefix}.{name}" if prefix else name for name in contents.below(prefix)]
    if not keys:
        raise CheckpointError(f"the checkpoint {contents.folder} has nothing under {prefix!r}; pass prefix=.")
    aliases = _aliases(contents, keys)
    entries = {key: contents.entries[key] for key in keys if key not in aliases}

    def pieces() -> Iterator[_Piece]:
        for key in list(entries)[ranks.rank :: ranks.size]:
            entry = entries[key]
            assert isinstance(entry, TensorStorageMetadata)  # what is no tensor was refused
            target = torch.empty(entry.size, dtype=entry.properties.dtype)
            yield _Piece(_plain(key, prefix), (0,) * target.dim(), read(contents, {key: target})[key])

    return _export(folder, _layout(entries, aliases, prefix, max_file_bytes), pieces, ranks)


def _aliases(contents: Contents, keys: Sequence[str]) -> dict[str, str]:
    """Key of a tensor that lies at the same bytes as an earlier one -> that one's key."""
    places: defaultdict[str, list[object]] = defaultdict(list)
    for index, info in contents.metadata.storage_data.items():
        places[index.fqn].append((tuple(index.offset or ()), info.relative_path, info.offset))
    first: dict[frozenset[object], str] = {}
    for key in keys:
        first.setdefault(frozenset(places[key]), key)
    return {key: first[frozenset(places[key])] for key in keys if first[frozenset(places[key])] != key}


def _plain(key: str, prefix: str) -> str:
    return key.removeprefix(f"{prefix}.") if prefix else key


def _layout(
    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    aliases: Mapping[str, str],
    prefix: str,
    max_file_bytes: int,
) -> Layout:
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, but is {max_file_bytes}.")
    tensors, others = [], []
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            tensors.append(TensorEntry(_plain(key, prefix), entry.properties.dtype, tuple(entry.size)))
        else:
            others.append(_plain(key, prefix))
    if others:
        raise CheckpointError(
            f".safetensors files hold tensors only, and these entries are none: {', '.join(others)}. Save a "
            f"checkpoint instead."
        )
    plain_aliases = {_plain(other, prefix): _plain(first, prefix) for other, first in aliases.items()}
    return Layout.of(tensors, plain_aliases, max_file_bytes)


def _export(folder: str | os.PathLike[str], layout: Layout, pieces: Pieces, ranks: Ranks) -> Path:
    path = Path(os.path.realpath(folder))
    doing = f"exporting to {path}"
    temporary = ranks.on_first(doing, lambda: _begin(path, layout))
    try:
        ranks.together(doing, lambda: _write_pieces(temporary, layout, pieces()))
        ranks.on_first(doing, lambda: _finish(temporary, path, layout))
    finally:
        if ranks.rank == 0:
            directory.discard(temporary)
    return path


def _begin(path: Path, layout: Layout) -> Path:
    """Make the files, with headers and without the tensors' bytes, in a temporary folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise CheckpointError(f"{path} exists, and is no empty folder; export to another path, or remove it.")
    temporary = directory.begin(path)
    for file in layout.files:
        with (temporary / file.name).open("wb") as stream:
            stream.write(file.header)
            stream.truncate(file.size)
    return temporary


def _finish(temporary: Path, path: Path, layout: Layout) -> None:
    write_file(temporary / INDEX, layout.index().encode())
    directory.commit(temporary, path)


def _write_pieces(folder: Path, layout: Layout, pieces: Iterable[_Piece]) -> None:
    places = {entry.name: (file, entry) for file in layout.files for entry in file.entries}
    handles: dict[str, int] = {}
    try:
        for piece in pieces:
            file, entry = places[piece.name]
            if file.name not in handles:
                handles[file.name] = os.open(folder / file.name, os.O_WRONLY)
            _write_piece(handles[file.name], file.offsets[piece.name], entry.shape, piece)
        for handle in handles.values():
            os.fsync(handle)
    finally:
        for handle in handles.values():
            os.close(handle)


def _write_piece(handle: int, beginning: int, shape: tuple[int, ...], piece: _Piece) -> None:
    value = piece.value.detach().cpu().resolve_conj().contiguous()
    data = memory_of(value)
    for there, here, count in _runs(shape, piece.offsets, tuple(value.shape)):
        run = data[here * value.itemsize : (here + count) * value.itemsize]
        position = beginning + there * value.itemsize
        while run:
            written = os.pwrite(handle, run[:_AT_ONCE], position)
            run, position = run[written:], position + written


def _runs(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """The parts of a piece that are contiguous in the whole tensor, too.

    Yields (where it begins in the tensor, where in the piece, how long it is), in elements.
    """
    if not prod(sizes):
        return
    inner = len(shape)
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)  # from this dimension on, the piece is contiguous in the tensor
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    count = prod(sizes[outer:])
    for number, index in enumerate(product(*map(range, sizes[:outer]))):
        there = first + sum(each * stride for each, stride in zip(index, strides[:outer], strict=True))
        yield there, number * count, count
