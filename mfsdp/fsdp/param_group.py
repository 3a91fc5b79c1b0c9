"""The owner group: what FSDP2's state drives for the owned parameters of a unit.

FSDP2 keeps a state for every ``fully_shard`` module, whose hooks call its parameter groups::

    forward pre-hook     pre_forward     unshard, wait_for_unshard
    forward hook         post_forward    reshard (unless kept until backward)
    output's grad hook   pre_backward    unshard, wait_for_unshard, prefetch of the previous unit
    input's grad         post_backward   reshard, start to reduce the gradients
    end of backward      finalize_backward

:class:`OwnerParamGroup` is such a group with other collectives and another idea of memory. Hook order,
prefetching, activation checkpointing and the methods of ``FSDPModule`` are FSDP2's, unchanged. The unit's
``ROWS`` parameters are in FSDP2's own group beside it.

Which gradients are reduced is decided alike on all ranks, by what the unit's modules did and not by which
parameters happened to get a gradient: all that require one, zeros standing in for those that got none. So
ranks may use different parameters of a unit. What they must agree on, as in FSDP2, is which *units* run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    TrainingState,
    _disable_functorch_if_active,
    is_bw,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, _get_param_module_infos
from torch.distributed.tensor import Replicate
from torch.profiler import record_function

from mfsdp.fsdp.collectives import BroadcastGather, Gather, Pending, ShardGroup
from mfsdp.fsdp.managed import ManagedParameter
from mfsdp.fsdp.owner_param import OwnerParam, ResidentView
from mfsdp.fsdp.post_forward import PostForward
from mfsdp.fsdp.reduction import GradientReduction, PartialSum, ReductionPlan, Reductions
from mfsdp.fsdp.resident import ResidentSegment
from mfsdp.fsdp.segments import UnitLayout
from mfsdp.fsdp.strategy import choose_gather, choose_reduction
from mfsdp.fsdp.unit_memory import UnitMemory
from mfsdp.planning import Role

__all__ = ["OwnerParamGroup"]


@dataclass
class _Use:
    """One forward of the unit, seen from its backward: called when the gradient of its inputs is complete.

    Stands in for the group in FSDP2's autograd function, which only calls ``post_backward``.
    """

    group: "OwnerParamGroup"
    counted: bool = False

    def post_backward(self) -> None:
        self.group.post_backward_of(self)


@dataclass(frozen=True)
class _Gathering:
    """A gather under way: its collectives, and the event after what else its stream was given (on a GPU)."""

    pending: Pending
    event: torch.Event | None

    def wait(self, stream: torch.Stream) -> None:
        """Wait on the CPU, or make ``stream``, the current one, wait."""
        self.pending.wait()
        if self.event is not None:
            stream.wait_event(self.event)


class OwnerParamGroup(FSDPParamGroup):
    """The owned parameters of one unit that are stored in one dtype.

    Args:
        managed: the parameters; every one has an owner.
        modules: the modules of the ``fully_shard`` call.
        mesh_info, post_forward_mesh_info: FSDP2's records of the mesh and of what is kept after forward.
        device: device of this rank.
        mp_policy: dtypes of computation and reduction.
        offload_policy: where the sharded parameters are kept.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        modules: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        super().__init__([], modules, mesh_info, post_forward_mesh_info, device, None, mp_policy, offload_policy)
        # matrices first: the tails of a segment then lie together at its end
        managed = sorted(managed, key=lambda parameter: parameter.entry.role is not Role.MATRIX)
        shapes = [parameter.parameter.size() for parameter in managed]
        owners = [parameter.placement.owner for parameter in managed]
        self._layout = UnitLayout.of(shapes, owners)
        self._ranks = ShardGroup.of(mesh_info.mesh, mesh_info.shard_mesh_dim or 0)
        own = self._layout.owned_by(self._ranks.coordinate)
        self._resident = ResidentSegment(own, managed, offload_policy)
        self._must_repack = False
        self._memory: UnitMemory | None = None
        itemsize = (mp_policy.param_dtype or self._resident.flat.dtype).itemsize
        self._gather = choose_gather(self._ranks, self._layout, itemsize, device)
        self._gathering: _Gathering | None = None
        self._reduction = choose_reduction()
        self._partial = PartialSum()
        self._uses_to_come = 0
        self._took_part = False
        self.fsdp_params: list[OwnerParam] = self._shard(managed, mesh_info)  # type: ignore[assignment]

    def _shard(self, managed: Sequence[ManagedParameter], mesh_info: FSDPMeshInfo) -> list[OwnerParam]:
        infos = _get_param_module_infos([parameter.parameter for parameter in managed], self.modules)
        replicas = (Replicate(),) * (mesh_info.mesh.ndim - 1)
        params = []
        for index, (parameter, info) in enumerate(zip(managed, infos, strict=True)):
            local = self._resident.view(index, parameter.parameter.shape)
            view = ResidentView(local, (*replicas, parameter.placement), self._mark_repack)
            params.append(
                OwnerParam(parameter, info, view, mesh_info, self.device, self.mp_policy, self.offload_policy)
            )
        return params

    def _mark_repack(self) -> None:
        self._must_repack = True

    def _repack(self) -> None:
        self._must_repack = False
        if self._resident.repack(self.fsdp_params):
            self._init_mp_dtypes()
            self._drop_memory()

    def lazy_init(self) -> None:
        super().lazy_init()
        if self._must_repack and self.is_sharded:
            self._repack()

    @property
    def _full_dtype(self) -> torch.dtype:
        """What parameters are gathered and computed with."""
        first = self.fsdp_params[0]
        return first.param_dtype or first.orig_dtype

    # Gather #
    @_disable_functorch_if_active
    def unshard(self, async_op: bool = False) -> None:
        if self._gathering is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self._training_state == TrainingState.PRE_BACKWARD:
            return
        if self._must_repack:
            self._repack()
        if self._memory is None:
            self._memory = self._new_memory()
        stream = self.comm_ctx.get_all_gather_streams(async_op, self._training_state)[-1]
        with record_function(self._with_fqn("FSDP::gather")), self.device_handle.stream(stream):
            self._gathering = _Gathering(self._start_gather(self._memory), stream.record_event())

    def _start_gather(self, memory: UnitMemory) -> Pending:
        kept = self._post_forward
        if self.is_sharded_post_forward and kept is not None:
            rest = memory.open_rest(kept.keepers)
            return BroadcastGather().start(kept.ranks, rest, self._what("gather in backward"))
        return self._gather.start(self._ranks, memory.open(), self._what("gather"))

    @property
    def _post_forward(self) -> PostForward | None:
        """What is kept between forward and backward, if neither everything nor nothing."""
        info = self.post_forward_mesh_info
        if info is None or not self._use_post_forward_mesh:
            return None
        return PostForward.of(self._layout, self._ranks, info)

    def _new_memory(self) -> UnitMemory:
        return UnitMemory(
            self._layout,
            self._resident.flat,
            self._ranks.coordinate,
            self._full_dtype,
            self.device,
            self._gather.contiguous,
        )

    def use_gather(self, gather: Gather) -> None:
        """Gather in another way from now on; the same on every rank, between iterations."""
        self._gather = gather
        self._drop_memory()

    def _drop_memory(self) -> None:
        """Forget the full parameters; the next gather makes new ones."""
        self._memory = None
        for param in self.fsdp_params:
            param.drop_full()

    @_disable_functorch_if_active
    def wait_for_unshard(self) -> None:
        if self._gathering is None or self._memory is None:
            return
        with record_function(self._with_fqn("FSDP::wait_for_gather")):
            gathering, self._gathering = self._gathering, None
            gathering.wait(self.device_handle.current_stream())
        self._memory.use_on(self.device_handle.current_stream())
        self._memory.close()
        if not hasattr(self.fsdp_params[0], "_unsharded_param"):
            for index, view in self._memory.parameters():
                self.fsdp_params[index].set_full(view)
        self._to_unsharded()

    def _to_sharded(self) -> None:
        super()._to_sharded()
        if self._gathering is None:
            self._free_memory()

    def _to_sharded_post_forward(self) -> None:
        kept = self._post_forward
        if self.is_sharded_post_forward or kept is None or self._memory is None:
            return
        for param in self.fsdp_params:
            param.to_sharded()
        self._memory.free_all_but(kept.kept_here)
        self._sharded_state = ShardedState.SHARDED_POST_FORWARD

    def _free_memory(self) -> None:
        if self._memory is not None:
            self._memory.free()

    # Backward #
    def _register_post_backward_hook(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        use = _Use(self)
        new_args, new_kwargs = FSDPParamGroup._register_post_backward_hook(use, args, kwargs)  # type: ignore[arg-type]
        # The recomputation of a checkpointed forward may never be differentiated itself.
        if (new_args is not args or new_kwargs is not kwargs) and not is_bw():
            use.counted = True
            self._uses_to_come += 1
        return new_args, new_kwargs

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        self._took_part = True
        super().pre_backward(default_prefetch, *unused)

    def post_backward_of(self, use: _Use) -> None:
        """One use of the unit is complete. The parameters' gradients are, when it is the last one."""
        self._took_part = True
        if use.counted and self._uses_to_come:
            self._uses_to_come -= 1
        if self._uses_to_come:
            self._end_use()
            # so that the end of backward calls again, should the other uses belong to another backward
            self._training_state = TrainingState.IDLE
        else:
            self.post_backward()

    def post_backward(self, *unused: Any) -> None:
        """Reshard and start to reduce. FSDP2 calls it at the end of backward if no last use has."""
        self._training_state = TrainingState.POST_BACKWARD
        self._end_use()
        if not self.reduce_grads:
            for param in self.fsdp_params:
                param.to_accumulated_grad_if_needed()
        elif self._took_part or any(param.has_full_grad for param in self.fsdp_params):
            self._took_part = False
            self._start_reduction()

    def _end_use(self) -> None:
        for param in self.fsdp_params:
            param.accumulate_unsharded_grad_if_needed()
        if self.reshard_after_backward:
            self.reshard()

    def _start_reduction(self) -> None:
        layout = self._trainable_layout()
        if not layout.segments:
            return
        reductions = Reductions.of(self.comm_ctx)
        with record_function(self._with_fqn("FSDP::reduce")):
            reductions.leave_at_most(self.comm_ctx.reduce_scatter_max_input_buffers - 1)
            reductions.launch(GradientReduction(self._reduction_plan(), layout, self.fsdp_params, self._partial))

    def _trainable_layout(self) -> UnitLayout:
        trainable = [i for i, param in enumerate(self.fsdp_params) if param.sharded_param.requires_grad]
        if len(trainable) == len(self.fsdp_params):
            return self._layout
        return self._layout.only(trainable)

    def _reduction_plan(self) -> ReductionPlan:
        mesh_info = self.mesh_info
        hsdp = isinstance(mesh_info, DDPMeshInfo)
        return ReductionPlan(
            what=self._what("reduction"),
            strategy=self._reduction,
            ranks=replace(self._ranks, group=self._reduce_scatter_process_group),
            replicas=self._all_reduce_process_group if hsdp else None,
            all_reduce=self.all_reduce_grads,
            hook=self._all_reduce_hook,
            dtype=self._reduce_dtype or self._full_dtype,
            divide_factor=self.gradient_divide_factor,
        )

    def finalize_backward(self) -> None:
        Reductions.of(self.comm_ctx).leave_at_most(0)
        self._abandon_gather()  # a prefetch of a unit that was not needed
        self._post_forward_indices.clear()
        self._uses_to_come = 0

    def _reset_iter_state(self) -> None:
        Reductions.of(self.comm_ctx).drop_all()
        self._abandon_gather()
        for param in self.fsdp_params:
            param.take_full_grad()
        self._partial.clear()
        self._post_forward_indices.clear()
        self._uses_to_come = 0
        self._took_part = False
        self._training_state = TrainingState.IDLE
        self._to_sharded()

    def _abandon_gather(self) -> None:
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            gathering.wait(self.device_handle.current_stream())
            self._free_memory()

    def _what(self, collective: str) -> str:
        return f"{collective} of unit {self._module_fqn or '(root)'}"

    # What FSDP2 lets users replace in its own groups #
    @property
    def _all_gather_comm(self) -> AllGather:
        return DefaultAllGather()

    @_all_gather_comm.setter
    def _all_gather_comm(self, comm: AllGather) -> None:
        _refuse_custom(comm, DefaultAllGather)

    @property
    def _reduce_scatter_comm(self) -> ReduceScatter:
        return DefaultReduceScatter()

    @_reduce_scatter_comm.setter
    def _reduce_scatter_comm(self, comm: ReduceScatter) -> None:
        _refuse_custom(comm, DefaultReduceScatter)


def _refuse_custom(comm: object, default: type) -> None:
    if not isinstance(comm, default):
        raise NotImplementedError(
            f"{type(comm).__name__}: owned parameters are gathered by broadcasts and reduced to their "
            "owners, which a custom all-gather or reduce-scatter, or its allocator, cannot replace. Apply "
            "it to modules whose parameters are all ROWS."
        )
