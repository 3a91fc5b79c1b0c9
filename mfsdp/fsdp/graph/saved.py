"""What autograd saves of full parameters when nothing is compiled: where they lay, and not their values.

Inside of a unit's forward, saved-tensor hooks replace every view of the unit's full tensor by its place there. The
full tensor is then freed when forward is over. The first of these places that backward asks for gathers the unit
again, and the others use the same full tensor, until the gradients of all of the unit's parameters are complete. A
parameter that this rank owns itself is asked for in the same way, so that all ranks gather at the same point.

Other people's hooks (activation checkpointing, offloading) come first: where some are active, ours are not installed,
and they decide what becomes of parameters, too. In a compiled graph the partitioner recomputes the gather instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedParameters"]


@dataclass(frozen=True)
class _Place:
    """A view of a full tensor, of whatever dtype.

    Args:
        unit: which.
        dtype: the view's.
        size, stride, offset: its geometry, in elements of that dtype.
        conj, neg: whether it is conjugated and negated when it is read.
    """

    unit: "SavedParameters"
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @classmethod
    def of(cls, unit: "SavedParameters", view: Tensor) -> "_Place":
        offset = int(view.storage_offset())
        return cls(unit, view.dtype, view.size(), view.stride(), offset, view.is_conj(), view.is_neg())

    def restore(self) -> Tensor:
        full = self.unit.full()
        with torch.no_grad():
            view = full.new_empty(0, dtype=self.dtype)
            view.set_(full.untyped_storage(), self.offset, self.size, self.stride)
        if self.conj:
            view = view.conj()
        return torch._neg_view(view) if self.neg else view


@dataclass(frozen=True)
class _Value:
    """Any other tensor, with the check that autograd makes where there are no hooks.

    Args:
        unit: the unit of which it is a parameter that this rank owns, if it is one.
    """

    tensor: Tensor
    version: int
    unit: "SavedParameters | None" = None

    def restore(self) -> Tensor:
        if self.unit is not None:
            self.unit.full()
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(self.tensor.shape)} is at version {self.tensor._version}, expected version "
                f"{self.version} instead."
            )
        return self.tensor


@dataclass(frozen=True)
class _Watched:
    """A storage that parameters are views of; held, so that no other one comes to lie at its address.

    Args:
        storage: that of the full tensor, or of a parameter that this rank owns.
        is_full: whether it is the full tensor's.
    """

    storage: torch.UntypedStorage
    is_full: bool


class SavedParameters:
    """The full tensor of a unit as one forward has seen it.

    Args:
        gather: gathers it again.
    """

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        self._gather = gather
        self._full: Tensor | None = None
        self._watched: dict[int, _Watched] = {}
        self._outer: SavedParameters | None = None

    def full(self) -> Tensor:
        """The full tensor, gathered if it is not there."""
        if self._full is None:
            with torch.no_grad():
                self._full = self._gather()
        return self._full

    def release(self) -> None:
        """Free the full tensor."""
        self._full = None

    def watch(self, flat: Tensor, own: Sequence[Tensor]) -> None:
        """Tell what the forward that begins has: the full tensor, and beside it what this rank owns."""
        for tensor in (flat, *own):
            storage = tensor.untyped_storage()
            self._watched[storage._cdata] = _Watched(storage, tensor is flat)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """While a forward runs: save places instead of views of the full tensor.

        Does nothing where autograd saves nothing, in a recomputation, and where hooks of others are active.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        outer = _unit_of(top[0]) if top is not None else None
        in_backward = torch._C._current_graph_task_id() != -1
        try:
            if not torch.is_grad_enabled() or in_backward or (top is not None and outer is None):
                yield
                return
            self._outer = outer
            with saved_tensors_hooks(self._pack, _restore):
                yield
        finally:
            self._watched.clear()
            self._outer = None

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided:  # it has no storage that a parameter could be in
            return _Value(tensor, tensor._version)
        watched = self._watched.get(tensor.untyped_storage()._cdata)
        if watched is not None:
            return _Place.of(self, tensor) if watched.is_full else _Value(tensor, tensor._version, self)
        if self._outer is not None:
            return self._outer._pack(tensor)
        return _Value(tensor, tensor._version)


def _unit_of(pack: Any) -> SavedParameters | None:
    """The unit whose hook ``pack`` is, if it is one of ours."""
    if isinstance(pack, MethodType) and isinstance(pack.__self__, SavedParameters):
        return pack.__self__
    return None


def _restore(packed: _Place | _Value) -> Tensor:
    return packed.restore()
