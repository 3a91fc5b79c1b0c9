"""What an op would return, found on every rank alike without running it: shapes, strides, dtypes, devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from mfsdp.dtensor.specs import empty_shape


class ValueDependentError(Exception):
    """The shapes of an op's results depend on the values of its operands (or nobody taught torch its shapes)."""


@dataclass(frozen=True)
class OutputMeta:
    """Metadata of one tensor that an op returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(tensor: Tensor) -> "OutputMeta":
        return OutputMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    @property
    def tensor_meta(self) -> TensorMeta:
        return TensorMeta(torch.Size(self.shape), self.stride, self.dtype)

    def empty_local(self, device: torch.device | None = None) -> Tensor:
        """What a rank that owns nothing holds of it, by default on its own device."""
        return torch.empty(empty_shape(self.shape), dtype=self.dtype, device=device or self.device)


Outputs = OutputMeta | None | Sequence[OutputMeta | None]
"""As an op returns them: one tensor, None, or a tuple or list of these."""


def output_metadata(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outputs:
    """Metadata of ``op(*args, **kwargs)`` as if every DTensor among the arguments were its global tensor.

    Raises:
        ValueDependentError: it cannot be known without the values.
        Exception: whatever the op itself raises for these shapes, on every rank alike.
    """
    if _are_we_tracing():
        return _run_fake(op, _frozen(args), _frozen(kwargs))
    key_args, key_kwargs = _frozen(args), _frozen(kwargs)
    try:
        hash((key_args, key_kwargs))
    except TypeError:
        return _run_fake(op, key_args, key_kwargs)
    return _run_fake_cached(op, key_args, key_kwargs)


@dataclass(frozen=True)
class _Leaf:
    """A non-tensor argument with its type, since 1, 1.0 and True are equal but do not promote alike."""

    value: Any
    kind: type


@dataclass(frozen=True)
class _Items:
    kind: type
    values: tuple[Any, ...]


def _frozen(value: Any) -> Any:
    """Arguments as a key: tensors by metadata, containers by kind and content."""
    if isinstance(value, DTensor):
        local = value._local_tensor
        return OutputMeta(tuple(value.shape), tuple(value.stride()), value.dtype, local.device)
    if isinstance(value, Tensor):
        return OutputMeta.of(value)
    if isinstance(value, list | tuple):
        return _Items(list if isinstance(value, list) else tuple, tuple(_frozen(item) for item in value))
    if isinstance(value, dict):
        return _Items(dict, tuple((key, _frozen(item)) for key, item in sorted(value.items())))
    return _Leaf(value, type(value))


def _thawed(value: Any) -> Any:
    if isinstance(value, OutputMeta):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device)
    if isinstance(value, _Items):
        if value.kind is dict:
            return {key: _thawed(item) for key, item in value.values}
        return value.kind(_thawed(item) for item in value.values)
    return value.value


def _run_fake(op: OpOverload, args: _Items, kwargs: _Items) -> Outputs:
    # disable_proxy_modes_tracing: a compiled graph must not record this shadow computation
    with detect_fake_mode() or FakeTensorMode(), disable_proxy_modes_tracing():
        try:
            result = op(*_thawed(args), **_thawed(kwargs))
        except (
            DynamicOutputShapeException,
            DataDependentOutputException,
            UnsupportedOperatorException,
        ) as error:
            raise ValueDependentError(str(op)) from error
    return _metadata_of(result)


_run_fake_cached = lru_cache(maxsize=16384)(_run_fake)


def _metadata_of(result: Any) -> Outputs:
    if isinstance(result, Tensor):
        return OutputMeta.of(result)
    if isinstance(result, list):
        return [OutputMeta.of(item) if isinstance(item, Tensor) else None for item in result]
    if isinstance(result, tuple):
        return tuple(OutputMeta.of(item) if isinstance(item, Tensor) else None for item in result)
    return None
