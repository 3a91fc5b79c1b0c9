"""One owned parameter, as FSDP2's machinery sees it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, _from_local_no_grad
from torch.distributed.fsdp._fully_shard._fsdp_param import (
    FSDPParam,
    ParamModuleInfo,
    ShardedState,
    _get_orig_param_uid,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor import local_tensor
from mfsdp.fsdp.managed import ManagedParameter

__all__ = ["OwnerParam", "ResidentView"]


@dataclass(frozen=True)
class ResidentView:
    """What this rank keeps of a parameter.

    Args:
        local: a view of the rank's resident segment, of the parameter's shape; empty on other ranks.
        placements: of the sharded parameter, one per mesh dimension.
        changed: called when somebody may have replaced ``local``.
    """

    local: Tensor
    placements: tuple[Placement, ...]
    changed: Callable[[], None]


class OwnerParam(FSDPParam):
    """A parameter that one rank holds whole: the sharded one, the full one, and the switch between them.

    FSDP2's class with another idea of what a shard is. Its memory belongs to the unit, not to the parameter:
    ``sharded_param`` is a view of the resident segment, the full parameter one of the segment's buffer.
    """

    def __init__(
        self,
        managed: ManagedParameter,
        module_info: ParamModuleInfo,
        resident: ResidentView,
        mesh_info: FSDPMeshInfo,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.name = managed.name
        self._resident = resident
        self._empty_grad: DTensor | None = None
        super().__init__(managed.parameter, module_info, mesh_info, None, device, None, mp_policy, offload_policy)

    @torch.no_grad()
    def _init_sharded_param(  # type: ignore[override]
        self, param: nn.Parameter, device: torch.device, shard_placement_fn: None, mesh_info: FSDPMeshInfo
    ) -> None:
        local = self._resident.local
        self.mesh_info = mesh_info
        self.is_dtensor = False
        self.is_spmd_types = False  # torch 2.14's annotations of plain tensors
        self._orig_param_uid = _get_orig_param_uid(param)
        self._unsharded_dtensor_spec = None
        self._orig_size = param.size()
        self._contiguous_orig_stride = make_contiguous_strides_for(self._orig_size)
        self.sharded_size = local.size()
        self._sharding_spec = DTensorSpec(
            mesh_info.mesh,
            self._resident.placements,
            tensor_meta=TensorMeta(self._orig_size, self._contiguous_orig_stride, local.dtype),
        )
        # not DTensor.from_local, which takes the shape () of a 0-d tensor for none at all
        sharded = _from_local_no_grad(local, self._sharding_spec)
        self.sharded_param = nn.Parameter(sharded, requires_grad=param.requires_grad)
        self._setattr_on_modules(self.sharded_param)
        self.sharded_state = ShardedState.SHARDED

    def _init_extensions(self) -> None:
        self._unsharded_inner_tensors = []  # wrapper tensors with gather hooks are not supported

    def reset_sharded_param(self) -> None:
        """Adopt what the module now has registered: ``to_empty``, ``load_state_dict(assign=True)``, ..."""
        info = self._module_info
        current = info.module._parameters[info.param_name]
        if not isinstance(current, DTensor):
            raise TypeError(
                f"{self.name}: fully_shard found a {type(current).__name__} registered where it had put a "
                "sharded parameter. Load a state dict of sharded parameters, or copy into the parameter "
                "instead of replacing it."
            )
        if current is not self.sharded_param:
            self.sharded_param = current
        self._sharding_spec = current._spec
        self._empty_grad = None
        self._resident.changed()

    @property
    def local(self) -> Tensor:
        """What this rank holds of the sharded parameter."""
        return local_tensor(self.sharded_param)

    def place_local(self, view: Tensor) -> None:
        """Make ``view``, of equal values, the local tensor of the sharded parameter."""
        self.sharded_param._local_tensor = view  # type: ignore[attr-defined]

    def set_full(self, view: Tensor) -> None:
        """Make ``view`` the data of the full parameter, a new one."""
        with torch.inference_mode(False):
            self._unsharded_param = nn.Parameter(view, requires_grad=self.sharded_param.requires_grad)

    def drop_full(self) -> None:
        """Forget the full parameter; the next gather makes a new one."""
        if hasattr(self, "_unsharded_param"):
            del self._unsharded_param

    def free_unsharded_param(self) -> None:
        """Nothing: the memory is the unit's, which frees all of it at once."""

    def take_full_grad(self) -> Tensor | None:
        """The gradient that autograd left on the full parameter, handed over; None if there is none."""
        if not hasattr(self, "_unsharded_param"):
            return None
        grad = self.unsharded_accumulated_grad
        if grad is None:
            grad, self._unsharded_param.grad = self._unsharded_param.grad, None
        else:
            self.unsharded_accumulated_grad = None
        return grad

    @property
    def has_full_grad(self) -> bool:
        """Whether :meth:`take_full_grad` would return a gradient."""
        if self.unsharded_accumulated_grad is not None:
            return True
        return hasattr(self, "_unsharded_param") and self._unsharded_param.grad is not None

    def accumulate_grad(self, local: Tensor) -> None:
        """Add ``local``, this rank's part of the reduced gradient, to the sharded parameter's gradient."""
        param = self.sharded_param
        if param.grad is None:
            param.grad = _from_local_no_grad(local, self._sharding_spec)
        else:
            local_tensor(param.grad).add_(local)
        self._run_grad_hooks()

    def accumulate_nothing(self) -> None:
        """As :meth:`accumulate_grad` where nothing is owned: an empty gradient, so that ranks look alike."""
        param = self.sharded_param
        if param.grad is None:
            if self._empty_grad is None:
                self._empty_grad = _from_local_no_grad(torch.empty_like(self.local), self._sharding_spec)
            param.grad = self._empty_grad
        self._run_grad_hooks()

    def _run_grad_hooks(self) -> None:
        for hook in (self.sharded_param._post_accumulate_grad_hooks or {}).values():
            hook(self.sharded_param)

    def __repr__(self) -> str:
        return f"OwnerParam({self.name}, shape={tuple(self._orig_size)}, {self._resident.placements})"
