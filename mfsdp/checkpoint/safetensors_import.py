"""Import of ``.safetensors`` files into any layout: every rank reads what it needs, by the package safetensors."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.misfits import Misfits
from mfsdp.checkpoint.model_targets import ModelTargets
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.reading import read
from mfsdp.checkpoint.safetensors_layout import DTYPES, INDEX

__all__ = ["load_safetensors"]

_DTYPE_OF = {name: dtype for dtype, name in DTYPES.items()}
_MODEL = "model"


def load_safetensors(
    path: str | os.PathLike[str], model: nn.Module, *, process_group: ProcessGroup | None = None
) -> None:
    """Load ``.safetensors`` files into a model; all ranks call it.

    Values are converted to the model's dtypes. Of a tensor that has several names in the model one is enough. What
    all names in the files begin with, and the model's do not, is left out. Everything is read before anything is
    changed; for that each rank needs memory for its share of the parameters once more.

    Args:
        path: a file; or a folder with ``model.safetensors.index.json``, or with one ``.safetensors`` file.
        model: of any sharding, or a plain module; its parameters have their final device.
        process_group: the ranks that hold the model; by default all.

    Raises:
        CheckpointError: on every rank, and nothing was changed: the package safetensors is not installed, a file is
            missing or damaged, or names and shapes are not the model's; all of these are listed.
    """
    ranks = Ranks(process_group)
    source = Path(os.path.realpath(path))
    importing = _Importing(source, model)
    ranks.together(f"loading {source}", importing.read)
    importing.finish()


class _Importing:
    """One rank's part, without communication."""

    def __init__(self, source: Path, model: nn.Module) -> None:
        self._source, self._model = source, model
        self._targets: ModelTargets | None = None
        self._values: dict[str, Any] = {}

    def read(self) -> None:
        """Check that everything fits, and read it.

        Raises:
            CheckpointError: it does not.
            OSError: a file cannot be read.
        """
        contents, misfits = _contents(self._source), Misfits(self._source)
        state = ModelState.of(self._model)
        self._targets = ModelTargets.of(state, contents, misfits)
        prefix = contents.find_model(state.values)
        misfits.unexpected.extend(
            key.removeprefix(f"{_MODEL}.") for key in contents.entries if not key.startswith(f"{prefix}.")
        )
        misfits.raise_if_any()
        self._values = read(contents, self._targets.values, _Reader(self._source))

    def finish(self) -> None:
        """Give the model what was read."""
        assert self._targets is not None
        self._targets.load_into(self._model, self._values)


@dataclass(frozen=True)
class _Place:
    """Where a tensor is."""

    file: Path
    name: str


class _Reader(FileSystemReader):
    """Reads slices of tensors; where DCP's own reader finds what ``torch.save`` wrote."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = defaultdict(list)
        for item in plan.items:
            items[self.storage_data[item.storage_index].file].append(item)
        for file, its in items.items():
            with _opened(file) as opened:
                for item in its:
                    slices = [
                        slice(start, start + size)
                        for start, size in zip(item.storage_offsets, item.lengths, strict=True)
                    ]
                    part = opened.get_slice(self.storage_data[item.storage_index].name)[tuple(slices)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _contents(source: Path) -> Contents:
    """What is in the files, as if it lay under ``_MODEL`` in a checkpoint."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, _Place] = {}
    for file, wanted in _files(source).items():
        with _opened(file) as opened:
            present = set(opened.keys())
            if lacking := sorted(wanted - present):
                raise CheckpointError(f"{file} lacks what {source / INDEX} says is in it: {', '.join(lacking)}.")
            for name in sorted(wanted or present):
                part = opened.get_slice(name)
                shape = torch.Size(part.get_shape())
                chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
                properties = TensorProperties(dtype=_dtype(part.get_dtype(), name, file))
                entries[f"{_MODEL}.{name}"] = TensorStorageMetadata(properties, shape, [chunk])
                places[MetadataIndex(f"{_MODEL}.{name}", chunk.offsets)] = _Place(file, name)
    return Contents(source, Metadata(entries, storage_data=places))


def _files(source: Path) -> dict[Path, set[str]]:
    """The files to read, with the names that are to be in each; where none are, everything in the file is meant."""
    if source.is_file():
        return {source: set()}
    if (source / INDEX).is_file():
        files: defaultdict[Path, set[str]] = defaultdict(set)
        for name, file in _weight_map(source / INDEX).items():
            files[source / file].add(name)
        return dict(files)
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{source} is to be a .safetensors file, or a folder with one such file or with {INDEX}; "
            f"it has {len(found)} such files and no {INDEX}."
        )
    return {found[0]: set()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} is damaged: it is no JSON object with a weight_map.") from error


def _dtype(text: str, name: str, file: Path) -> torch.dtype:
    if text not in _DTYPE_OF:
        raise CheckpointError(f"{name} in {file} has the dtype {text}, which cannot be loaded.")
    return _DTYPE_OF[text]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The file, opened by the package.

    Raises:
        CheckpointError: there is no such package, or the file is damaged.
        OSError: the file cannot be read.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            "reading .safetensors files needs the package safetensors: install mfsdp[safetensors]."
        ) from error
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
