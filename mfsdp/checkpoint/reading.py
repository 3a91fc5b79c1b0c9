"""Reading entries of a checkpoint into tensors, by DCP's planner and reader, without communication."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.extents import Extents
from mfsdp.dtensor import is_local, local_tensor

__all__ = ["Reading", "read"]


def read(contents: Contents, targets: Mapping[str, Any], reader: StorageReader | None = None) -> dict[str, Any]:
    """Read what this rank needs of the entries; the arguments and errors are those of :class:`Reading`.

    Returns:
        ``targets``, with what was read in place of what is no tensor.
    """
    return Reading(contents, targets, reader).finish()


class Reading:
    """What this rank needs of some entries: planned first, then read.

    Args:
        contents: the checkpoint's.
        targets: key of an entry -> the tensor that it is read into, of its full shape: a DTensor of any placement
            or a plain one; anything for an entry that is no tensor.
        reader: knows how the files are to be read; by default DCP's own.

    Raises:
        CheckpointError: the saved pieces of a tensor do not cover it.
        OSError: a file cannot be read.
    """

    def __init__(self, contents: Contents, targets: Mapping[str, Any], reader: StorageReader | None = None) -> None:
        self._values = dict(targets)
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._reader = FileSystemReader(contents.folder) if reader is None else reader
        self._planner.set_up_planner(self._values, contents.metadata, is_coordinator=False)
        self._reader.set_up_storage_reader(contents.metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
        _check_covered(contents, plan, self._values)
        self._plan = self._planner.finish_plan(plan)
        self._extents = Extents(contents.folder)
        if reader is None and contents.is_stored_plainly:
            rest = self._extents.add(contents, self._plan.items, self._planner)
            self._plan = LoadPlan(rest)

    def memory(self, file: str, position: int, count: int) -> memoryview:
        """Where to read some of a file to, for another purpose; what is wanted here is then not read again.

        Positions are those of a contiguous part of the file, in order.

        Args:
            file: its name.
            position: of the first byte.
            count: of bytes, at most.
        """
        return self._extents.memory(file, position, count)

    def finish(self) -> dict[str, Any]:
        """Read the rest; returns the targets, with what was read in place of what is no tensor."""
        self._extents.read_rest()
        self._reader.read_data(self._plan, self._planner).wait()
        return self._values


def _check_covered(contents: Contents, plan: LoadPlan, targets: Mapping[str, Any]) -> None:
    wanted = {
        key: local_tensor(value).numel() if is_local(value) else 0
        for key, value in targets.items()
        if isinstance(value, Tensor) and isinstance(contents.entries[key], TensorStorageMetadata)
    }
    for item in plan.items:
        if item.type is LoadItemType.TENSOR:
            wanted[item.dest_index.fqn] -= prod(item.lengths)
    if lacking := [key for key, count in wanted.items() if count]:
        raise CheckpointError(
            f"the checkpoint {contents.folder} does not have all of {', '.join(lacking)}: the pieces that were saved "
            f"do not cover it."
        )
