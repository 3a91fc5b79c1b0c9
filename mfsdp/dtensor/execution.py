"""Owner-local execution: the owner runs the op on its local tensors, every other rank makes empty outputs.

:func:`execute` is the complete path and is right for every op. The dispatcher's cache (see
:mod:`mfsdp.dtensor.propagation`) is a shortcut around it for the common ones.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import _random as random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import return_and_correct_aliasing

from mfsdp.dtensor import lists, values
from mfsdp.dtensor.alignment import CONCATENATIONS, Operand, align
from mfsdp.dtensor.metadata import OutputMeta, Outputs, ValueDependentError, output_metadata
from mfsdp.dtensor.moving import moved, replicated_together
from mfsdp.dtensor.schema import argument, operands, traits
from mfsdp.dtensor.specs import Owners, dim_name, holds, is_whole, output_spec, with_owners, without_owners
from mfsdp.placements import is_owner


def execute(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op that has an owned DTensor among its arguments.

    Raises:
        NotImplementedError: the operands cannot be brought together, or the op cannot run on them; on every rank.
        RuntimeError, ValueError, ...: what the op itself raises for the shapes and dtypes given, on every rank. What
            it raises for the *values* (a singular matrix, an index out of range) only the owner can know, and nothing
            is sent, so the owner raises alone.
    """
    if traits(op).is_list:
        return lists.execute(op, args, kwargs)
    found = list(operands(op, args, kwargs))
    alignment = align(op, [Operand(tensor._spec, written) for tensor, written in found])
    if alignment.moves:
        if op in CONCATENATIONS and alignment.replicates_owned([tensor._spec for tensor, _ in found]):
            together = iter(replicated_together([tensor for tensor, _ in found]))
            args, kwargs = _map_dtensors(lambda _: next(together), args, kwargs)
        targets = iter(alignment.placements)
        args, kwargs = _map_dtensors(lambda tensor: moved(tensor, next(targets)), args, kwargs)
        return op(*args, **kwargs)
    mesh = found[0][0].device_mesh
    whole = all(is_whole(tensor._spec, alignment.owners) for tensor, _ in found)
    if not whole and traits(op).is_value:
        # a Python value is the same on every rank: of the whole tensors, not of a shard or a partial sum
        args, kwargs = _map_dtensors(lambda tensor: moved(tensor, _whole(tensor)), args, kwargs)
    if whole or traits(op).is_value:
        return _execute_plain(op, args, kwargs, mesh, alignment.owners)
    return execute_sharded(op, args, kwargs, mesh, alignment.owners)


def _map_dtensors(
    function: Callable[[DTensor], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace every DTensor among the arguments, in the order of :func:`operands`."""

    def replace(value: Any) -> Any:
        if isinstance(value, DTensor):
            return function(value)
        if isinstance(value, list | tuple):
            return type(value)(function(item) if isinstance(item, DTensor) else item for item in value)
        return value

    return tuple(replace(value) for value in args), {name: replace(value) for name, value in kwargs.items()}


def _whole(tensor: DTensor) -> list[Placement]:
    return [placement if is_owner(placement) else Replicate() for placement in tensor.placements]


def _first(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    return next(tensor for tensor, _ in operands(op, args, kwargs))


def _to_local(tensor: DTensor) -> Tensor:
    return tensor._local_tensor


# Whole tensors on the owner #


def _execute_plain(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, owners: Owners
) -> Any:
    """Every operand is whole at the owner's coordinate: run the op there on plain tensors."""
    run = holds(mesh, owners)
    local_args, local_kwargs = _map_dtensors(_to_local, args, kwargs)
    here = (lambda: op(*local_args, **local_kwargs)) if run else None
    first = _first(op, args, kwargs)._local_tensor
    if traits(op).is_value:
        return values.run_for_value(op, here, first, mesh, owners)
    try:
        metas = output_metadata(op, args, kwargs)
    except ValueDependentError:
        result, metas = values.run_for_metadata(op, here, first.device, mesh, owners)
    else:
        specs = _specs(metas, mesh, owners)
        _check_written(op, args, kwargs, specs)
        result = _run_random(op, args, kwargs, here, mesh, owners) if traits(op).is_random else here and here()
    if not run:
        result = _empties(metas)
    return wrap(op, args, kwargs, result, _specs(metas, mesh, owners), run)


def _check_written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Any) -> None:
    """Refuse an ``out=`` of another shape, which only the owner would resize."""
    if traits(op).is_inplace_view:
        return
    every = specs if isinstance(specs, tuple) else (specs,)
    for position, spec in zip(traits(op).aliased_returns, every, strict=False):
        if position is not None and spec is not None:
            written = argument(op, position, args, kwargs)
            if written.shape != spec.shape:
                raise RuntimeError(
                    f"{op}: the result has shape {tuple(spec.shape)} and the tensor to write it to has shape "
                    f"{tuple(written.shape)}. Owned tensors are not resized; give one of the right shape."
                )


# Draws whose number depends on shapes alone, so that every rank can make them.
_DRAWS_BY_SHAPE = {
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "native_dropout", "normal_",
    "rand_like", "randint_like", "randn_like", "random_", "uniform_",
}  # fmt: skip


def _run_random(
    op: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    here: Callable[[], Any] | None,
    mesh: DeviceMesh,
    owners: Owners,
) -> Any:
    """Run an op that draws random numbers, and leave the generators of all ranks in step."""
    first = _first(op, args, kwargs)
    tracker = random._rng_tracker
    if tracker is not None and tracker.distribute_region_enabled:
        with tracker._distribute_region(without_owners(first._spec)):
            return here and here()
    if op._schema.name.split("::")[1] in _DRAWS_BY_SHAPE:
        # The others draw the same numbers and drop them: nothing is sent, and `normal_` of an owned weight gives
        # what a single process gets.
        if here is not None:
            return here()
        args, kwargs = _map_dtensors(_placeholder, args, kwargs)
        return op(*args, **kwargs)
    result = here and here()
    values.share_generator(kwargs.get("generator") or _default_generator(first._local_tensor.device), mesh, owners)
    return result


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return torch.get_device_module(device).default_generators[device.index or 0]


def _placeholder(tensor: DTensor) -> Tensor:
    return tensor._local_tensor.new_zeros(tensor.shape)


def _empties(metas: Outputs) -> Any:
    if metas is None:
        return None
    if isinstance(metas, OutputMeta):
        return metas.empty_local()
    return type(metas)(None if meta is None else meta.empty_local() for meta in metas)  # type: ignore[call-arg]


def _specs(metas: Outputs, mesh: DeviceMesh, owners: Owners) -> Any:
    if metas is None:
        return None
    if isinstance(metas, OutputMeta):
        return output_spec(metas.tensor_meta, mesh, owners)
    return tuple(None if meta is None else output_spec(meta.tensor_meta, mesh, owners) for meta in metas)


# Tensors that the owner's coordinate shards further #


def execute_sharded(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, owners: Owners
) -> Any:
    """Other mesh dimensions shard the operands: the ranks at the owner's coordinate run DTensor's own code.

    To them the owner dimensions look replicated, and nothing may happen along those.
    """
    plain_args, plain_kwargs = _map_dtensors(_without_owners, args, kwargs)
    specs = _propagated_specs(op, plain_args, plain_kwargs, mesh, owners)
    run = holds(mesh, owners)
    if run:
        result = _unwrapped(op(*plain_args, **plain_kwargs))
    else:
        device = _first(op, args, kwargs)._local_tensor.device
        result = _map_specs(lambda spec: _empty_of(spec, device), specs)
    return wrap(op, args, kwargs, result, _map_specs(lambda spec: with_owners(spec, owners), specs), run)


def _without_owners(tensor: DTensor) -> DTensor:
    return DTensor(tensor._local_tensor, without_owners(tensor._spec), requires_grad=False)


def _unwrapped(result: Any) -> Any:
    if isinstance(result, DTensor):
        return result._local_tensor
    if isinstance(result, list | tuple):
        return type(result)(_unwrapped(item) for item in result)
    return result


def _empty_of(spec: DTensorSpec, device: torch.device) -> Tensor:
    meta = spec.tensor_meta
    assert meta is not None
    return OutputMeta(tuple(meta.shape), meta.stride, meta.dtype, device).empty_local()


def _map_specs(function: Callable[[DTensorSpec], Any], specs: Any) -> Any:
    if isinstance(specs, DTensorSpec):
        return function(specs)
    if specs is None:
        return None
    return type(specs)(None if spec is None else function(spec) for spec in specs)


def _propagated_specs(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh, owners: Owners
) -> Any:
    """Output specs by torch's propagation, checked on every rank not to touch the owner dimensions."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(op, args, kwargs)
    assert info.schema is not None
    try:
        sharding = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise NotImplementedError(
            f"{op}: the shape of its result depends on values, and its operands are sharded on another mesh dimension "
            f"than the owner's. Redistribute them to Replicate() there first."
        ) from error
    outputs = sharding.output_spec
    needed = [sharding.redistribute_schema.args_spec] if sharding.redistribute_schema is not None else []
    every = [outputs] if isinstance(outputs, DTensorSpec) else list(outputs or ())
    for spec in [*every, *(spec for specs in needed for spec in specs)]:
        for mesh_dim, owner in enumerate(owners):
            if spec is not None and owner is not None and not isinstance(spec.placements[mesh_dim], Replicate):
                raise NotImplementedError(
                    f"{op}: DTensor would run it with {spec.placements[mesh_dim]!r} on {dim_name(mesh, mesh_dim)}, "
                    f"where an operand is {owner!r}, so the owner cannot run it alone. Redistribute the operands to "
                    f"Replicate() on that dimension first."
                )
    return outputs


# Results #


def wrap(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, specs: Any, run: bool) -> Any:
    """Local results as what the op returns: DTensors, or the very arguments that it wrote to."""
    known = traits(op)
    if known.is_inplace_view:
        return _rewrap_first(op, args, kwargs, result, specs, run)
    if known.is_view:
        return return_and_correct_aliasing(op, args, kwargs, _wrapped(result, specs))
    if not any(position is not None for position in known.aliased_returns):
        return _wrapped(result, specs)
    results = result if isinstance(result, tuple) else (result,)
    all_specs = specs if isinstance(specs, tuple) else (specs,)
    wrapped = tuple(
        argument(op, position, args, kwargs) if position is not None else _wrapped(item, spec)
        for position, item, spec in zip(known.aliased_returns, results, all_specs, strict=True)
    )
    return wrapped if isinstance(result, tuple) else wrapped[0]


def _wrapped(result: Any, specs: Any) -> Any:
    if isinstance(result, Tensor):
        return DTensor(result, specs, requires_grad=False)
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(item, spec) for item, spec in zip(result, specs, strict=True))
    return result


def _rewrap_first(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, spec: DTensorSpec, run: bool
) -> DTensor:
    """After ``t_`` and its like: the first argument has another shape now, inside and outside."""
    first: DTensor = args[0]
    if not run:
        first._local_tensor = result
    first._spec = spec
    return return_and_correct_aliasing(op, args, kwargs, first)
