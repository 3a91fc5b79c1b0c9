"""What torch's distributed checkpoints ask of an owned DTensor: ranks that hold nothing of it write and read nothing.

To DCP an unknown placement looks replicated, and an empty local tensor like a shard of the tensor: of a 0-d one it
would claim the very chunk that the owner writes.
"""

from typing import Any

from torch.distributed.tensor import DTensor

from mfsdp.dtensor.local import is_local

_torch_create_write_items = DTensor.__create_write_items__
_torch_create_chunk_list = DTensor.__create_chunk_list__


def create_write_items(tensor: DTensor, fqn: str, object: Any) -> list[Any]:
    """torch's write items of a DTensor; none where this rank holds nothing of an owned one."""
    return _torch_create_write_items(tensor, fqn, object) if is_local(tensor) else []


def create_chunk_list(tensor: DTensor) -> list[Any]:
    """torch's chunks of a DTensor; none where this rank holds nothing of an owned one."""
    return _torch_create_chunk_list(tensor) if is_local(tensor) else []
