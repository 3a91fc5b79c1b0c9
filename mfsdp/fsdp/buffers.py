"""The memory that full parameters live in, and its life cycle.

Every segment of a unit has one buffer on every rank, a 1-D tensor that the full parameters are views of; or,
where the gather needs it, one buffer holds all segments of the unit. A buffer is in one of five states::

                    open()              close()
      +---------+  allocates  +-----------+      +------+
      | SHARDED | ----------> | GATHERING | ---> | FULL |
      +---------+             +-----------+      +------+
           |                     ^                   |
           |      open() revives |                   | free()
           |      the same       |     +-------+     |
           | pin()  storage      +---- | FREED | <---+
           v                           +-------+
      +---------+
      | PINNED  |   open(), close() and free() leave it as it is
      +---------+

SHARDED
    No memory. Nothing was gathered yet.
GATHERING
    There is memory, and a gather is writing to it.
FULL
    The parameters can be used.
FREED
    "Freed but alive": the storage object is still there and has no bytes. Autograd may have saved the full
    parameters, transposes or other views of them; they all share the storage object, so they keep no memory
    alive, and are valid again once the next gather has revived it.
PINNED
    The buffer is the owner's resident segment itself: no second copy, nothing to gather, never freed. This
    is so on the owner where parameters are computed with in the dtype they are stored in, and where the
    gather moves segment by segment.

Writing to a buffer does not advance version counters: what autograd saved from it is *meant* to be
rewritten, with equal values.
"""

from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["BufferState", "FullBuffer"]


class BufferState(StrEnum):
    """Where a :class:`FullBuffer` is in its life cycle; see the module's docstring."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    FREED = "freed"
    PINNED = "pinned"


class FullBuffer:
    """The memory of one segment's (or one unit's) full parameters on one rank.

    Args:
        numel: its size in elements.
        dtype: dtype that the full parameters are computed with.
        device: where they live.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._flat: Tensor | None = None
        self.state = BufferState.SHARDED

    @classmethod
    def pinned_to(cls, resident: Tensor) -> "FullBuffer":
        """A buffer that is ``resident``, a 1-D tensor, itself."""
        buffer = cls(resident.numel(), resident.dtype, resident.device)
        # `.data` has a version counter of its own. With a shared one, an optimizer step between a forward
        # and its backward would be an error on the owner and none on the other ranks.
        buffer._flat = resident.data
        buffer.state = BufferState.PINNED
        return buffer

    @property
    def flat(self) -> Tensor:
        """The 1-D tensor, the same object through all states but SHARDED."""
        if self._flat is None:
            raise RuntimeError("nothing was gathered yet, there are no full parameters")
        return self._flat

    @property
    def is_pinned(self) -> bool:
        """Whether this is the owner's resident segment itself."""
        return self.state is BufferState.PINNED

    @property
    def nbytes(self) -> int:
        """Bytes that this buffer takes now, beyond the resident segment."""
        if self._flat is None or self.is_pinned:
            return 0
        return self._flat.untyped_storage().nbytes()

    def open(self) -> Tensor:
        """Make the memory ready to be gathered into, and return it."""
        if self.state in (BufferState.SHARDED, BufferState.FREED):
            if self._flat is None:
                # not an inference tensor, even if the first forward is one of inference
                with torch.inference_mode(False):
                    self._flat = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            else:
                self._flat.untyped_storage().resize_(self._numel * self._dtype.itemsize)
            self.state = BufferState.GATHERING
        return self.flat

    def close(self) -> None:
        """The gather is complete."""
        if self.state is BufferState.GATHERING:
            self.state = BufferState.FULL

    def free(self) -> None:
        """Give the memory back and keep the storage object."""
        if self.state in (BufferState.GATHERING, BufferState.FULL):
            self.flat.untyped_storage().resize_(0)
            self.state = BufferState.FREED

    def __repr__(self) -> str:
        return f"FullBuffer(numel={self._numel}, dtype={self._dtype}, state={self.state})"
