"""The order in which a tensor's elements travel: dense strides, so that any memory format is one flat block."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor


@dataclass(frozen=True)
class WireLayout:
    """A shape and strides that fill one block of memory.

    Sender and receivers derive it from the same spec, so a transposed weight arrives transposed and nothing is
    copied on either side when the local tensor has these strides already.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int], global_shape: Sequence[int], global_stride: Sequence[int]) -> "WireLayout":
        """The global strides where they are dense and the shape is the global one, else contiguous."""
        if tuple(shape) == tuple(global_shape) and _is_dense(shape, global_stride):
            return WireLayout(tuple(shape), tuple(global_stride))
        return WireLayout(tuple(shape), torch.empty(tuple(shape), device="meta").stride())

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def empty(self, like: Tensor) -> Tensor:
        """An uninitialised tensor of this layout, with dtype and device of ``like``."""
        return like.new_empty_strided(self.shape, self.stride)

    def flatten(self, local: Tensor) -> Tensor:
        """The elements of ``local`` as one contiguous 1-D tensor; a view where its strides fit."""
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        local = local.resolve_conj().resolve_neg()
        if local.stride() != self.stride:
            local = self.empty(local).copy_(local)
        return local.as_strided((self.numel,), (1,))

    def unflatten(self, flat: Tensor) -> Tensor:
        """The inverse of :meth:`flatten`, as a view."""
        return flat.as_strided(self.shape, self.stride)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda pair: (pair[1], pair[0])):
        if size == 1:
            continue
        if step != expected:
            return False
        expected *= size
    return True
