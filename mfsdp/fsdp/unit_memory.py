"""The full parameters of a unit: where each lies in the buffers, and how the unit is made ready for a gather.

::

    segment by segment               buffer 0     | buffer of rank 0's segment     |   PINNED to the resident
    (broadcasts, chain)              buffer 1     | ... of rank 2's |                  segment on its owner
                                     buffer 2     | ... of rank 3's   |

    contiguous                       buffer 0     | rank 0's segment | rank 2's | rank 3's |
    (re-split and all-gather)
"""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from mfsdp.fsdp.buffers import FullBuffer
from mfsdp.fsdp.collectives import Piece, Shipment
from mfsdp.fsdp.segments import UnitLayout

__all__ = ["UnitMemory"]


class UnitMemory:
    """The buffers of one unit on one rank.

    Args:
        layout: the unit's.
        resident: this rank's segment, 1-D, on ``device`` or (offloaded) on the CPU.
        coordinate: this rank's on the shard dimension.
        dtype: what parameters are computed with.
        device: where they are computed with.
        contiguous: whether the whole unit must lie in one buffer.
    """

    def __init__(
        self,
        layout: UnitLayout,
        resident: Tensor,
        coordinate: int,
        dtype: torch.dtype,
        device: torch.device,
        contiguous: bool,
    ) -> None:
        self._layout = layout
        self._resident = resident
        self._coordinate = coordinate
        self._contiguous = contiguous
        pin = not contiguous and resident.dtype == dtype and resident.device == device
        if contiguous:
            self.buffers = [FullBuffer(layout.numel, dtype, device)]
        else:
            self.buffers = [
                FullBuffer.pinned_to(resident)
                if pin and segment.owner == coordinate
                else FullBuffer(segment.numel, dtype, device)
                for segment in layout.segments
            ]

    @property
    def nbytes(self) -> int:
        """Bytes that the full parameters take now, beyond the resident segment."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def _flats(self) -> list[Tensor]:
        """The segments, as 1-D views of the buffers."""
        if not self._contiguous:
            return [buffer.flat for buffer in self.buffers]
        whole = self.buffers[0].flat
        return [
            whole.narrow(0, offset, segment.numel)
            for offset, segment in zip(self._layout.offsets, self._layout.segments, strict=True)
        ]

    @torch.no_grad()
    def open(self) -> Shipment:
        """Make the buffers ready to be gathered into from the owners, with this rank's segment in place."""
        for buffer in self.buffers:
            buffer.open()
        flats = self._flats()
        for segment, flat in zip(self._layout.segments, flats, strict=True):
            if segment.owner == self._coordinate and flat.data_ptr() != self._resident.data_ptr():
                with torch.autograd._unsafe_preserve_version_counter(flat):
                    flat.copy_(self._resident, non_blocking=True)
        return self._ship([segment.owner for segment in self._layout.segments])

    def open_rest(self, keepers: Sequence[int]) -> Shipment:
        """Make those buffers ready that :meth:`free_all_but` has freed, to be gathered into from ``keepers``."""
        for buffer in self.buffers:
            buffer.open()
        return self._ship(keepers)

    def _ship(self, sources: Sequence[int]) -> Shipment:
        pieces = [Piece(source, flat) for source, flat in zip(sources, self._flats(), strict=True) if flat.numel()]
        return Shipment(tuple(pieces), self.buffers[0].flat if self._contiguous else None)

    def use_on(self, stream: torch.Stream) -> None:
        """Tell the allocator that the memory, allocated on a gather stream, is used on ``stream`` as well."""
        for buffer in self.buffers:
            if not buffer.is_pinned and buffer.flat.device.type != "cpu":
                buffer.flat.record_stream(stream)

    def close(self) -> None:
        """The gather is complete."""
        for buffer in self.buffers:
            buffer.close()

    def free(self) -> None:
        """Give the memory back; what was saved of the parameters stays valid for the next gather."""
        for buffer in self.buffers:
            buffer.free()

    def free_all_but(self, kept: Collection[int]) -> None:
        """As :meth:`free`, but keep the segments at the positions ``kept``."""
        for position, buffer in enumerate(self.buffers):
            if position not in kept:
                buffer.free()

    def parameters(self) -> Iterator[tuple[int, Tensor]]:
        """(index, full parameter) of the unit's parameters, as views."""
        with torch.inference_mode(False):
            for segment, flat in zip(self._layout.segments, self._flats(), strict=True):
                for slot in segment.slots:
                    yield slot.index, slot.view(flat)
