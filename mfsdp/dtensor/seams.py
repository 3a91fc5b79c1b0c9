"""The places where DTensor is taught the owner placements: all of them, installed once at import.

===================================================  =====================================================
seam in torch                                        what it does for owner placements
===================================================  =====================================================
``OpDispatcher._propagate_op_sharding_dispatch_      answers the dispatcher for ops with owned operands
slow_path`` (on the dispatcher instance)             (:mod:`mfsdp.dtensor.propagation`)
``OpDispatcher._dispatch_get_local_results_          makes empty outputs for skipped ops
slow_path`` (on the instance)
``OpDispatcher._unwrap_to_op_info_impl``             puts unwrapping off until someone looks
(on the instance)
``OpDispatcher.wrap`` (on the instance)              makes the DTensor of a result, more cheaply
``OpDispatcher._custom_op_handlers``                 owned operands go to :mod:`mfsdp.dtensor.execution`
``redistribute_local_tensor`` (in the modules that   the transitions (:mod:`mfsdp.dtensor.redistribute`)
import it by name)
``_utils._compute_local_shape_and_global_offset``    local shapes and checkpoint offsets of owned tensors
``_api.compute_global_tensor_info``                  ``DTensor.from_local`` without a shape is refused
``_ToTorchTensor.backward``                          gradients of ``to_local()`` get the spec of the tensor
``DTensor._stable_hash_for_caching``                 compile caches tell owners from others
``DTensor.__create_write_items__``,                  checkpoints: who holds nothing writes nothing
``DTensor.__create_chunk_list__``
``distribute_tensor`` (its code object)              :mod:`mfsdp.dtensor.distribute`
===================================================  =====================================================

Tensors without an owner placement take torch's own path: the C++ dispatcher's cache does not come here at all.
"""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute, _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo

from mfsdp.dtensor import caching, checkpointing, distribute, gradients, lists, shapes
from mfsdp.dtensor.execution import execute
from mfsdp.dtensor.propagation import (
    DeferredInfo,
    SkippedOutputSharding,
    has_owned_operand,
    owners_present,
    propagate,
)
from mfsdp.dtensor.redistribute import redistribute_local_tensor

SUPPORTED = ((2, 13), (2, 15))
"""First supported version of torch, and the first that is not."""

# They look at shapes and flags only and are right as they are.
_METADATA_HANDLERS = {torch.ops.aten.is_same_size.default, torch.ops.aten.is_pinned.default}

_installed = False


def check_version(version: str) -> None:
    """Raise ImportError, naming the versions that work, unless ``version`` is a supported torch version."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    first, end = SUPPORTED
    if not first <= found < end:
        raise ImportError(
            f"mfsdp works with torch >= {first[0]}.{first[1]} and < {end[0]}.{end[1]}, and found torch {version}. It "
            f"extends internals of DTensor that differ between versions: install a supported torch, or an mfsdp "
            f"release made for yours."
        )


def install() -> None:
    """Install every seam. Calling it again does nothing.

    Raises:
        ImportError: the torch at hand is not supported.
    """
    global _installed
    if _installed:
        return
    check_version(torch.__version__)
    _install_dispatch(DTensor._op_dispatcher)
    for module in (_redistribute, _dispatch, _api):
        module.redistribute_local_tensor = redistribute_local_tensor  # type: ignore[attr-defined]
    _utils._compute_local_shape_and_global_offset = shapes.compute_local_shape_and_global_offset  # type: ignore[assignment]
    _api.compute_global_tensor_info = shapes.compute_global_tensor_info
    _api._ToTorchTensor.backward = staticmethod(gradients.to_local_backward)  # type: ignore[method-assign]
    DTensor._stable_hash_for_caching = caching.stable_hash_for_caching  # type: ignore[method-assign, assignment]
    DTensor.__create_write_items__ = checkpointing.create_write_items  # type: ignore[method-assign, assignment]
    DTensor.__create_chunk_list__ = checkpointing.create_chunk_list  # type: ignore[method-assign]
    distribute.redirect_torch()
    _installed = True


def _install_dispatch(dispatcher: _dispatch.OpDispatcher) -> None:
    torch_propagate = dispatcher._propagate_op_sharding_dispatch_slow_path
    torch_local_results = dispatcher._dispatch_get_local_results_slow_path

    @wraps(torch_propagate)
    def propagate_op(
        op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], info: OpInfo, try_cache: bool
    ) -> object:
        if has_owned_operand(info):
            return propagate(op, args, kwargs, info, try_cache)
        return torch_propagate(op, args, kwargs, info, try_cache)

    @wraps(torch_local_results)
    def local_results(op: OpOverload, args: tuple[object, ...], info: OpInfo) -> object:
        sharding = info.output_sharding
        if type(sharding) is SkippedOutputSharding:
            return sharding.make_outputs(args)
        if type(info) is DeferredInfo:
            info = info.unwrapped()
        return torch_local_results(op, args, info)

    torch_unwrap = dispatcher._unwrap_to_op_info_impl

    @wraps(torch_unwrap)
    def unwrap(
        op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], create_schema: bool
    ) -> OpInfo | DeferredInfo:
        if create_schema:
            return torch_unwrap(op, args, kwargs, create_schema)
        return DeferredInfo(torch_unwrap, op, args, kwargs)

    def wrap(res: object, spec: Any) -> object:
        if type(res) is Tensor and type(spec) is DTensorSpec:
            # DTensor's constructor does this, inside a wrapper for the compiler that costs more than the rest
            return Tensor._dtensor__new__(DTensor, res, spec, requires_grad=res.requires_grad)
        return _dispatch.OpDispatcher.wrap(res, spec)

    dispatcher.wrap = wrap  # type: ignore[method-assign]
    dispatcher._unwrap_to_op_info_impl = unwrap  # type: ignore[method-assign, assignment]
    dispatcher._propagate_op_sharding_dispatch_slow_path = propagate_op  # type: ignore[method-assign, assignment]
    dispatcher._dispatch_get_local_results_slow_path = local_results  # type: ignore[method-assign, assignment]
    for op, handler in dispatcher._custom_op_handlers.items():
        if op not in _METADATA_HANDLERS:
            dispatcher._custom_op_handlers[op] = _owner_aware(handler)


def _owner_aware(handler: Callable[..., object]) -> Callable[..., object]:
    @wraps(handler)
    def handle(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        if not owners_present(args):
            return handler(op, args, kwargs)
        if op is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            lists.unscale_gradients(op, args, kwargs)
            return None
        return execute(op, args, kwargs)

    return handle
