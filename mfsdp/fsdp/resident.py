"""What a rank keeps of a unit between steps: its segment, in one piece."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from mfsdp.fsdp.managed import ManagedParameter
from mfsdp.fsdp.owner_param import OwnerParam
from mfsdp.fsdp.segments import Segment, Slot

__all__ = ["ResidentSegment"]


class ResidentSegment:
    """The values of the parameters that this rank owns; the sharded parameters are views of it.

    Args:
        own: the rank's segment.
        managed: all parameters of the unit, before sharding; of one dtype and device.
        offload: whether to keep it in CPU memory, and pinned.
    """

    def __init__(self, own: Segment, managed: Sequence[ManagedParameter], offload: OffloadPolicy) -> None:
        self._own = own
        self._offload = offload
        first = managed[0].parameter
        self.flat = self._allocate(first.dtype, first.device)
        if not self.flat.is_meta:
            with torch.no_grad():
                for slot in own.slots:
                    slot.view(self.flat).copy_(managed[slot.index].parameter)

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        pin = False
        if isinstance(self._offload, CPUOffloadPolicy) and device.type != "meta":
            device, pin = torch.device("cpu"), self._offload.pin_memory
        return torch.empty(self._own.numel, dtype=dtype, device=device, pin_memory=pin)

    def view(self, index: int, shape: torch.Size) -> Tensor:
        """The local tensor of the unit's parameter ``index``: a view, or empty if this rank does not own it."""
        for slot in self._own.slots:
            if slot.index == index:
                return self._local(slot)
        return self.flat.new_empty((0, *shape[1:]))

    def _local(self, slot: Slot) -> Tensor:
        """The slot's memory as a tensor whose storage starts there and ends with it.

        A view of the whole segment would do for computing. But a DTensor takes over its local tensor's storage
        offset, and torch's saving and copying then mistake the DTensor for a tensor with memory of its own; and what
        is saved of a view is all of its storage.
        """
        if self.flat.is_meta:
            return self.flat.new_empty(slot.shape)
        start, size = slot.offset * self.flat.itemsize, slot.numel * self.flat.itemsize
        storage = self.flat.untyped_storage()[start : start + size]
        like = slot.view(self.flat)
        return self.flat.new_empty(0).set_(storage, 0, like.shape, like.stride())

    @torch.no_grad()
    def repack(self, params: Sequence[OwnerParam]) -> bool:
        """Bring local tensors that somebody replaced back into one piece.

        Args:
            params: all parameters of the unit.

        Returns:
            Whether the segment is now another tensor, because dtype or device have changed.

        Raises:
            ValueError: the parameters no longer have one dtype.
        """
        if any(param.local.is_meta for param in params):
            return False  # FSDP2 refuses them, unless they are materialised before
        dtypes = {param.local.dtype: param.name for param in params}
        if len(dtypes) > 1:
            described = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise ValueError(
                f"the parameters of a unit that were sharded in one dtype no longer have one: {described}. "
                f"Convert the whole module, or none of it."
            )
        dtype, device = params[0].local.dtype, params[0].local.device
        moved = (self.flat.dtype, self.flat.device) != (dtype, device)
        if moved:
            self.flat = self._allocate(dtype, device)
        for slot in self._own.slots:
            param, view = params[slot.index], self._local(slot)
            if param.local.data_ptr() != view.data_ptr():
                view.copy_(param.local)
                param.place_local(view)
        return moved
