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
from torch import Tensor, nn
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
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, _get_param_module_infos
from torch.distributed.tensor import Replicate
from torch.profiler import record_function

from mfsdp.fsdp.collectives import Gather, Pending, ShardGroup
from mfsdp.fsdp.managed import ManagedParameter
from mfsdp.fsdp.owner_param import OwnerParam, ResidentView
from mfsdp.fsdp.reduction import GradientReduction, PartialSum, ReductionPlan, Reductions
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


class OwnerParamGroup(FSDPParamGroup):
    """The owned parameters of one unit that are stored in one dtype.

    Args:
        managed: the parameters; every one has an owner.
        modules: the modules of the ``fully_shard`` call.
        mesh_info, post_forward_mesh_info: FSDP2's records of the mesh and of what is kept after forward.
        device: device of this rank.
        mp_policy: dtypes of computation and reduction.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParameter],
        modules: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
    ) -> None:
        super().__init__([], modules, mesh_info, post_forward_mesh_info, device, None, mp_policy, OffloadPolicy())
        # matrices first: the tails of a segment then lie together at its end
        managed = sorted(managed, key=lambda parameter: parameter.entry.role is not Role.MATRIX)
        shapes = [parameter.parameter.size() for parameter in managed]
        owners = [parameter.placement.owner for parameter in managed]
        self._layout = UnitLayout.of(shapes, owners)
        self._ranks = ShardGroup.of(mesh_info.mesh, mesh_info.shard_mesh_dim or 0)
        self._own = self._layout.owned_by(self._ranks.coordinate)
        self._resident = self._take(managed)
        self._must_repack = False
        self._memory: UnitMemory | None = None
        itemsize = (mp_policy.param_dtype or self._resident.dtype).itemsize
        self._gather = choose_gather(self._ranks, self._layout, itemsize, device)
        self._gathering: Pending | None = None
        self._reduction = choose_reduction()
        self._partial = PartialSum()
        self._uses_to_come = 0
        self._took_part = False
        self.fsdp_params: list[OwnerParam] = self._shard(managed, mesh_info)  # type: ignore[assignment]

    # What a rank keeps #
    @torch.no_grad()
    def _take(self, managed: Sequence[ManagedParameter]) -> Tensor:
        """A new resident segment with the values of the parameters that this rank owns."""
        first = managed[0].parameter
        resident = torch.empty(self._own.numel, dtype=first.dtype, device=first.device)
        if not resident.is_meta:
            for slot in self._own.slots:
                slot.view(resident).copy_(managed[slot.index].parameter)
        return resident

    def _shard(self, managed: Sequence[ManagedParameter], mesh_info: FSDPMeshInfo) -> list[OwnerParam]:
        own = {slot.index: slot.view(self._resident) for slot in self._own.slots}
        infos = _get_param_module_infos([parameter.parameter for parameter in managed], self.modules)
        replicas = (Replicate(),) * (mesh_info.mesh.ndim - 1)
        params = []
        for index, (parameter, info) in enumerate(zip(managed, infos, strict=True)):
            shape = parameter.parameter.shape
            nothing = self._resident.new_empty((0, *shape[1:]))
            view = ResidentView(own.get(index, nothing), (*replicas, parameter.placement), self._mark_repack)
            params.append(OwnerParam(parameter, info, view, mesh_info, self.device, self.mp_policy))
        return params

    def _mark_repack(self) -> None:
        self._must_repack = True

    @torch.no_grad()
    def _repack(self) -> None:
        """Bring local tensors that somebody replaced back into one contiguous segment."""
        self._must_repack = False
        if any(param.local.is_meta for param in self.fsdp_params):
            return  # lazy_init refuses them, unless they are materialised before
        dtypes = {param.local.dtype: param.name for param in self.fsdp_params}
        if len(dtypes) > 1:
            described = ", ".join(f"{name} is {dtype}" for dtype, name in dtypes.items())
            raise ValueError(
                f"the parameters of a unit that were sharded in one dtype no longer have one: {described}. "
                "Convert the whole module, or none of it."
            )
        dtype, device = self.fsdp_params[0].local.dtype, self.fsdp_params[0].local.device
        if (self._resident.dtype, self._resident.device) != (dtype, device):
            self._resident = torch.empty(self._own.numel, dtype=dtype, device=device)
            self._drop_memory()
        for slot in self._own.slots:
            param, view = self.fsdp_params[slot.index], slot.view(self._resident)
            if param.local.data_ptr() != view.data_ptr():
                view.copy_(param.local)
                param.place_local(view)

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
            self._gathering = self._gather.start(self._ranks, self._memory.open(), self._what("gather"))

    def _new_memory(self) -> UnitMemory:
        return UnitMemory(
            self._layout,
            self._resident,
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
            gathering.wait()
        self._memory.close()
        if not hasattr(self.fsdp_params[0], "_unsharded_param"):
            for index, view in self._memory.parameters():
                self.fsdp_params[index].set_full(view)
        self._to_unsharded()

    def _to_sharded(self) -> None:
        super()._to_sharded()
        if self._gathering is None:
            self._free_memory()

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
        trainable = [i for i, param in enumerate(self.fsdp_params) if param.sharded_param.requires_grad]
        if not trainable:
            return
        reductions = Reductions.of(self.comm_ctx)
        with record_function(self._with_fqn("FSDP::reduce")):
            reductions.leave_at_most(self.comm_ctx.reduce_scatter_max_input_buffers - 1)
            layout = self._layout.only(trainable)
            reductions.launch(GradientReduction(self._reduction_plan(), layout, self.fsdp_params, self._partial))

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
            gathering.wait()
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
