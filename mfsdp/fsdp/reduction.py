"""The reduction of one unit's gradients: from the full gradients of all ranks to the owners' ``param.grad``.

::

    full gradients         one flat tensor          owner: sum        divide, cast,
    of this rank    --->   per segment       --->   over all   --->   add to the sharded
    (some may lack)        (or the gradient         ranks             parameters' gradients
                           itself, if alone)
        GradientReduction(...)      launch()             finish(), later, under other units' backward
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

from mfsdp.fsdp.collectives import Pending, Piece, Reduction, ShardGroup, Shipment
from mfsdp.fsdp.owner_param import OwnerParam
from mfsdp.fsdp.segments import Segment, UnitLayout

__all__ = ["GradientReduction", "PartialSum", "ReductionPlan", "Reductions"]


@dataclass
class PartialSum:
    """This rank's segment, summed over the shard dimension only, while all-reduce over replicas is put
    off."""

    layout: UnitLayout | None = None
    total: Tensor | None = None

    def clear(self) -> None:
        """Forget it."""
        self.layout = self.total = None


@dataclass(frozen=True)
class ReductionPlan:
    """How a unit's gradients are reduced in one backward.

    Args:
        what: what to call it in errors.
        strategy: how segments are summed.
        ranks: the shard dimension.
        replicas: the group that all-reduces an owner's segment (HSDP), or None.
        all_reduce: False to keep the sum of this replica, see :class:`PartialSum`.
        hook: the user's, called with this rank's segment once it is summed, or None.
        dtype: dtype of the sum.
        divide_factor: what the sum is divided by; None for the number of ranks.
    """

    what: str
    strategy: Reduction
    ranks: ShardGroup
    replicas: dist.ProcessGroup | None
    all_reduce: bool
    hook: Callable[[Tensor], None] | None
    dtype: torch.dtype
    divide_factor: float | None

    @cached_property
    def factors(self) -> tuple[float | None, float | None]:
        """What to divide by before and after the sum; before only where ``dtype`` could overflow (fp16)."""
        before, after, _, _ = _get_gradient_divide_factors(
            self.ranks.group,
            self.replicas,
            self.dtype,
            factor=self.divide_factor,
            force_sum_reduction_for_comms=True,
        )
        return before, after


class GradientReduction:
    """One unit's reduction under way.

    On construction it takes the full gradients, releasing each as soon as it is copied.

    Args:
        plan: how.
        layout: the parameters that are reduced: always the same on every rank. One that has no gradient on
            a rank counts as zero there.
        params: all parameters of the unit, by the layout's indices.
        partial: where a sum goes that is not all-reduced yet, and comes from when it is.
    """

    def __init__(
        self, plan: ReductionPlan, layout: UnitLayout, params: Sequence[OwnerParam], partial: PartialSum
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._params = params
        self._partial = partial
        self._pieces = [Piece(segment.owner, self._flatten(segment)) for segment in layout.segments]
        self._pending = Pending(plan.what, [])

    @torch.no_grad()
    def _flatten(self, segment: Segment) -> Tensor:
        """The gradients of a segment in one flat tensor."""
        params = [self._params[slot.index] for slot in segment.slots]
        device, dtype = params[0].device, self._plan.dtype
        only_grad = params[0].take_full_grad() if len(params) == 1 else None
        if only_grad is not None:
            flat = only_grad.to(dtype).contiguous().view(-1)
        else:
            flat = torch.empty(segment.numel, dtype=dtype, device=device)
            for slot, param in zip(segment.slots, params, strict=True):
                grad, view = param.take_full_grad(), slot.view(flat)
                view.zero_() if grad is None else view.copy_(grad)
        before, _ = self._plan.factors
        return flat if before is None or before == 1 else flat.div_(before)

    def launch(self) -> None:
        """Start to sum."""
        own = self._plan.ranks.coordinate
        sent = Shipment(tuple(piece for piece in self._pieces if piece.flat.numel()))
        self._pending = self._plan.strategy.start(self._plan.ranks, sent, self._plan.what)
        self._pieces = [piece for piece in self._pieces if piece.owner == own]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, and give the sharded parameters their gradients."""
        self._pending.wait()
        own = self._pieces[0].flat if self._pieces else None
        if self._plan.replicas is not None:
            own = self._add_partial(own)
            if not self._plan.all_reduce:
                return
            if own is not None and own.numel():
                work = dist.all_reduce(own, group=self._plan.replicas, async_op=True)
                Pending(f"all-reduce over replicas of the {self._plan.what}", [work]).wait()
        if own is not None and self._plan.hook is not None:
            self._plan.hook(own)
        _, after = self._plan.factors
        if own is not None and after is not None and after != 1:
            own.div_(after)
        self._assign(own)

    def _add_partial(self, own: Tensor | None) -> Tensor | None:
        partial = self._partial
        if partial.layout not in (None, self._layout):
            raise RuntimeError(
                f"{self._plan.what}: parameters were frozen or unfrozen while gradients wait for their "
                "all-reduce over replicas. Call set_requires_all_reduce(True) for the last backward before "
                "that."
            )
        if own is not None and partial.total is not None:
            own += partial.total
        partial.clear()
        if not self._plan.all_reduce:
            partial.layout, partial.total = self._layout, own
        return own

    def _assign(self, own: Tensor | None) -> None:
        for segment in self._layout.segments:
            mine = segment.owner == self._plan.ranks.coordinate
            if mine and own is not None:
                own = own.to(self._params[segment.slots[0].index].local)  # dtype and, if offloaded, device
            for slot in segment.slots:
                param = self._params[slot.index]
                if mine and own is not None:
                    # .data: torch.compile gives sizes of their own to what it knows to be a view, and loses them
                    param.accumulate_grad(slot.view(own).data)
                else:
                    param.accumulate_nothing()

    def drop(self) -> None:
        """Wait, and throw the result away."""
        self._pending.wait()


class Reductions:
    """The reductions that are under way below one FSDP root, oldest first.

    On a GPU they run on the root's reduce stream, and the current stream waits for one when it is finished.
    """

    _of_root: ClassVar[WeakKeyDictionary[FSDPCommContext, "Reductions"]] = WeakKeyDictionary()

    def __init__(self, device_handle: Any, stream: torch.Stream) -> None:
        self._device_handle = device_handle
        self._stream = stream
        self._under_way: deque[GradientReduction] = deque()

    @classmethod
    def of(cls, root: FSDPCommContext) -> "Reductions":
        """Those of the root whose states share the communication context ``root``."""
        found = cls._of_root.get(root)
        if found is None:
            found = cls._of_root[root] = cls(root.device_handle, root.reduce_scatter_stream)
        return found

    def launch(self, reduction: GradientReduction) -> None:
        """Start ``reduction`` and let it run."""
        self._stream.wait_stream(self._device_handle.current_stream())
        with self._device_handle.stream(self._stream):
            reduction.launch()
        self._under_way.append(reduction)

    def leave_at_most(self, number: int) -> None:
        """Finish the oldest until no more than ``number`` are under way."""
        while len(self._under_way) > number:
            with self._device_handle.stream(self._stream):
                self._under_way.popleft().finish()
            self._device_handle.current_stream().wait_stream(self._stream)

    def drop_all(self) -> None:
        """Wait for all and throw their results away."""
        while self._under_way:
            with self._device_handle.stream(self._stream):
                self._under_way.popleft().drop()
        self._device_handle.current_stream().wait_stream(self._stream)
