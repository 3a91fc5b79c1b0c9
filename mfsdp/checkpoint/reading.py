"""Reading entries of a checkpoint into tensors, by DCP's planner and reader, without communication."""

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, StorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.direct_reader import DirectReader
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.dtensor import is_local, local_tensor

__all__ = ["read"]


def read(contents: Contents, targets: Mapping[str, Any], reader: StorageReader | None = None) -> dict[str, Any]:
    """Read what this rank needs of the entries.

    Args:
        contents: the checkpoint's.
        targets: key of an entry -> the tensor that it is read into, of its full shape: a DTensor of any placement
            or a plain one; anything for an entry that is no tensor.
        reader: knows how the files are to be read; by default DCP's own.

    Returns:
        ``targets``, with what was read in place of what is no tensor.

    Raises:
        CheckpointError: the saved pieces of a tensor do not cover it.
        OSError: a file cannot be read.
    """
    values = dict(targets)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if reader is None:
        reader = DirectReader(contents) if contents.is_stored_plainly else FileSystemReader(contents.folder)
    planner.set_up_planner(values, contents.metadata, is_coordinator=False)
    reader.set_up_storage_reader(contents.metadata, is_coordinator=False)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    _check_covered(contents, plan, values)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return values


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
