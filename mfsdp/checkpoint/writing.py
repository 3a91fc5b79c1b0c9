"""What a rank writes: planned together by DCP's planner, written alone by DCP's writer, summed on the way."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import IOBase
from math import prod
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from mfsdp.checkpoint.checksums import ChecksumStream, FileSum
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.ranks import Ranks

__all__ = ["PlannedSave", "Writer", "Written", "nbytes_of"]

_EXTRA = "extra"

Ties = Mapping[str, tuple[str, ...]]
"""Canonical name of a tied tensor -> its other names."""


class _Planner(DefaultSavePlanner):
    """DCP's planner, for a tree and an object that stays whole; gives tensors without what lies around them."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self._extra = extra

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if is_coordinator and self._extra is not None:
            self.state_dict[_EXTRA] = self._extra
            self.mappings[_EXTRA] = (_EXTRA,)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        object = super().transform_object(write_item, object)
        return object if write_item.type is WriteItemType.BYTE_IO else _alone(object.detach())


def _alone(tensor: Tensor) -> Tensor:
    """``tensor``, contiguous, in memory of its own size: serialization writes all of a tensor's storage.

    A parameter lies in a segment with others; no bytes are copied for that.
    """
    tensor = tensor.contiguous()
    storage = tensor.untyped_storage()
    if not tensor.is_cpu or storage.nbytes() == tensor.nbytes or not tensor.numel():
        return tensor
    start = tensor.storage_offset() * tensor.itemsize
    return tensor.new_empty(0).set_(storage[start : start + tensor.nbytes], 0, tensor.shape, tensor.stride())


@dataclass(frozen=True)
class PlannedSave:
    """What every rank writes, known to all of them.

    Attributes:
        planner: gives the data of this rank's items.
        plans: by rank.
        metadata: DCP's, of all ranks.
        aliases: name of a tensor -> other names that lead to the same bytes.
    """

    planner: DefaultSavePlanner
    plans: list[SavePlan]
    metadata: Metadata
    aliases: Ties

    @classmethod
    def of(cls, collected: Callable[[], tuple[dict[str, Any], Ties]], extra: Any, ranks: Ranks) -> "PlannedSave":
        """Plan it together; one exchange.

        Args:
            collected: gives the tree that this rank has, and the ties in its ``"model"``; may raise.
            extra: what rank 0 adds.
            ranks: all of them.

        Raises:
            CheckpointError: what the ranks have does not make a checkpoint.
        """
        planner = _Planner(extra)

        def plan() -> tuple[SavePlan, Ties]:
            tree, ties = collected()
            planner.set_up_planner(tree, is_coordinator=ranks.rank == 0)
            return planner.create_local_plan(), ties

        local = ranks.together("planning the checkpoint", plan)
        try:
            plans, metadata = planner.create_global_plan([each for each, _ in local])
        except ValueError as error:  # on every rank alike
            raise CheckpointError(f"the ranks' tensors do not fit together: {error}") from error
        plans = FileSystemWriter("").prepare_global_plan(plans)  # names the files
        aliases: dict[str, tuple[str, ...]] = {}
        for name, others in local[0][1].items():
            aliases[f"model.{name}"] = tuple(f"model.{other}" for other in others)
            for other in others:
                metadata.state_dict_metadata[f"model.{other}"] = metadata.state_dict_metadata[f"model.{name}"]
                metadata.planner_data[f"model.{other}"] = ("model", other)
        return cls(planner, plans, metadata, aliases)

    def with_aliases(self, written: Iterable[WriteResult]) -> list[WriteResult]:
        """``written``, and each of it that has other names under these, too."""
        results = list(written)
        for each in list(results):
            for other in self.aliases.get(each.index.fqn, ()):
                index = MetadataIndex(other, each.index.offset, each.index.index)
                results.append(dataclasses.replace(each, index=index))
        return results


def nbytes_of(item: WriteItem) -> int:
    """Bytes of the tensor that an item is; 0 of what is no tensor."""
    if item.tensor_data is None:
        return 0
    chunk = item.tensor_data.chunk
    return prod(chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What one rank has written.

    Attributes:
        results: where each of its items lies.
        sums: of its files, by name.
    """

    results: list[WriteResult]
    sums: dict[str, FileSum]


class _SummingFileSystem(FileSystem):
    """Sums the files that are written."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[IOBase, None, None]:
        with super().create_stream(path, mode) as stream:
            summing = ChecksumStream(cast(Any, stream))
            yield summing
            self.sums[Path(path).name] = summing.sum()


class Writer:
    """Writes one rank's part of a checkpoint into a folder.

    Args:
        folder: where; it exists.
        rank: whose part.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._files = _SummingFileSystem()
        self._writer = FileSystemWriter(folder, overwrite=False)
        self._writer.fs = self._files
        self._writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)

    def write(self, plan: SavePlan, planner: DefaultSavePlanner) -> Written:
        """Write this rank's items to the disk; a rank that has none makes no file.

        Raises:
            OSError: it cannot be written.
        """
        if not plan.items:
            return Written([], {})
        try:
            with _without_crc32():
                results = self._writer.write_data(plan, planner).value()
        except RuntimeError as error:
            raise _cause(error) from error
        return Written(results, dict(self._files.sums))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata of all ranks' files."""
        self._writer.finish(metadata, results)


@contextmanager
def _without_crc32() -> Generator[None, None, None]:
    """Let torch's serialization compute no checksums: files are summed here already, and several times faster."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _cause(error: BaseException) -> BaseException:
    """The error of the operating system that torch's serialization hides behind one of its own, if there is one."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError):
            return found
        found = found.__cause__ or found.__context__
    return error
