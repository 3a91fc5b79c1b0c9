"""Whether the dispatcher's cache key decides an op's outputs, and how to make it so.

DTensor's C++ dispatcher caches an answer under the metadata of the tensors and those other arguments that the op's
``RuntimeSchemaInfo`` names. Many ops have none, or one that leaves out an argument which decides the output's shape or
dtype (``histc`` its bins): a second call with another value then silently gets the first one's shapes. So before an
answer for an owned operand may be cached, the op's info is completed: every argument that is neither a tensor nor a
number becomes part of the key. That makes keys of plain DTensors finer as well, never coarser.

Numbers stay outside (a learning rate changes every step) unless they decide the output's dtype. The key does not tell
a number in a tensor's place from a 0-d tensor either, and these two promote differently.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.utils._python_dispatch import _disable_current_modes

from mfsdp.dtensor.schema import operands, traits

_NUMBERS = ("number", "Optional[number]")

# What torch makes of a number that is given where a tensor is expected, but for its promotion.
_NUMBERS_OF = {torch.int64: 1, torch.float64: 1.5, torch.complex128: 1j}
_DTYPES_OF = {type(number): dtype for dtype, number in _NUMBERS_OF.items()}


def key_decides_outputs(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every call of ``op`` with the cache key of this one has the same output metadata.

    If not, the key is completed for later calls, and this call's answer must not be cached.
    """
    if not _complete(op):
        return False
    if traits(op).aliased_returns == (0,):
        return True  # an in-place result has the dtype of what it is written to
    return not (_numbers_matter(op, args, kwargs) or _wrapping_matters(op, args, kwargs))


def _complete(op: OpOverload) -> bool:
    """Whether the key of ``op`` was complete; now it is."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op) or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
    first, names = _deciding_arguments(op)
    static_from = RuntimeSchemaInfo().static_argnum if info is None else info.static_argnum
    static_names = [] if info is None else (info.static_kwargkey or [])
    if static_from <= first and names <= set(static_names):
        return True
    propagator.op_to_schema_info[op] = RuntimeSchemaInfo(
        min(static_from, first),
        [*static_names, *sorted(names - set(static_names))],
        needs_pytree=info is not None and info.needs_pytree,
    )
    return False


@lru_cache(maxsize=8192)
def _deciding_arguments(op: OpOverload) -> tuple[int, frozenset[str]]:
    """Position of the first argument that is neither tensor nor number, and the names of such keywords."""
    positions = [RuntimeSchemaInfo().static_argnum]
    names = set()
    for position, argument in enumerate(op._schema.arguments):
        kind = str(argument.type)
        if "Tensor" in kind or kind in _NUMBERS:
            continue
        if argument.kwarg_only:
            names.add(argument.name)
        else:
            positions.append(position)
    return min(positions), frozenset(names)


def _numbers_matter(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether another number outside the key, say a complex one, would give outputs of another dtype."""
    kinds = _kinds(op)
    names = [name for name in (*list(kinds)[: len(args)], *kwargs) if kinds[name] in _NUMBERS]
    if not names:
        return False
    if torch.Tag.pointwise not in op.tags:
        return not all(tensor.is_floating_point() for tensor, _ in operands(op, args, kwargs))
    dtypes = {_dtype_with(op, args, kwargs, dict.fromkeys(names, number)) for number in _NUMBERS_OF.values()}
    return len(dtypes - {None}) > 1


def _wrapping_matters(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number in a tensor's place, and a 0-d tensor of the dtype it would have, give different dtypes."""
    kinds = _kinds(op)
    given = [*zip(kinds, args, strict=False), *kwargs.items()]
    dtypes = {name: dtype for name, value in given if "Tensor" in kinds[name] and (dtype := _number_dtype(value))}
    if not dtypes:
        return False
    numbers = {name: _NUMBERS_OF[dtype] for name, dtype in dtypes.items()}
    tensors = {name: torch.empty((), dtype=dtype) for name, dtype in dtypes.items()}
    return _dtype_with(op, args, kwargs, numbers) != _dtype_with(op, args, kwargs, tensors)


def _kinds(op: OpOverload) -> dict[str, str]:
    """Name of an argument -> its type, in the schema's order."""
    return {argument.name: str(argument.type) for argument in op._schema.arguments}


def _number_dtype(value: Any) -> torch.dtype | None:
    """The dtype under which the key knows this value, if that may be a number or a tensor."""
    if isinstance(value, Tensor):
        return value.dtype if not isinstance(value, DTensor) and value.dtype in _NUMBERS_OF and not value.ndim else None
    return _DTYPES_OF.get(type(value))


def _dtype_with(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], others: dict[str, Any]
) -> torch.dtype | None:
    """Dtype of a pointwise op's result with ``others`` in the place of arguments of these names.

    By running it on tensors without elements; None if it refuses.
    """

    def stand_in(name: str, value: Any) -> Any:
        value = others.get(name, value)
        return torch.empty((0,) * value.ndim, dtype=value.dtype) if isinstance(value, Tensor) else value

    with _disable_current_modes():
        try:
            result = op(
                *(stand_in(name, value) for name, value in zip(_kinds(op), args, strict=False)),
                **{name: stand_in(name, value) for name, value in kwargs.items()},
            )
        except (RuntimeError, TypeError, ValueError):
            return None
    return result.dtype if isinstance(result, Tensor) else None
