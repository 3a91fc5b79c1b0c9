"""One unit in graph style: whose parameters are full while its forward runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from mfsdp.fsdp.graph.gather import GatherParameters, gathered
from mfsdp.fsdp.graph.saved import SavedParameters
from mfsdp.fsdp.graph.spec import Precision, UnitSpec, Wires

__all__ = ["GraphUnit", "Place", "UnitParameters"]

Place = tuple[nn.Module, str]
"""A module, and the name under which it registers a parameter."""


class UnitParameters:
    """The parameters of a unit that are stored in one dtype.

    Args:
        unit: the unit's name, for errors.
        places: of each parameter, where it is registered; in the order of the full tensor.
        owners: coordinate of its owner, None for ``ROWS``.
        wires: the groups.
        precision: the dtypes.
    """

    def __init__(
        self,
        unit: str,
        places: Sequence[Sequence[Place]],
        owners: Sequence[int | None],
        wires: Wires,
        precision: Precision,
    ) -> None:
        self._unit = unit
        self._first_places = [each[0] for each in places]
        self._owners = tuple(owners)
        self._wires = wires
        self._precision = precision
        self.places = [(place, index) for index, each in enumerate(places) for place in each]
        self._trainable = tuple(param.requires_grad for param in self._sharded())
        self._spec = self.spec_for(self._trainable)

    def _sharded(self) -> list[Tensor]:
        return [module._parameters[name] for module, name in self._first_places]  # type: ignore[misc]

    def is_full(self) -> bool:
        """Whether the full parameters are registered: a forward of the unit is running."""
        return not isinstance(self._sharded()[0], DTensor)

    def spec_for(self, trainable: tuple[bool, ...]) -> UnitSpec:
        """The numbers of the unit if these of its parameters are trained; a constant where a graph is compiled."""
        shapes = [tuple(param.shape) for param in self._sharded()]
        return UnitSpec.of(shapes, self._owners, trainable, self._wires, self._precision)

    def gather(self, keep: bool) -> tuple[tuple[Tensor, ...], SavedParameters | None]:
        """The full parameters, and what to run forward under so that backward gathers them again.

        Args:
            keep: whether to keep them for backward instead.
        """
        params = self._sharded()
        trainable = tuple([param.requires_grad for param in params])
        spec = self._spec if trainable == self._trainable else self.spec_for(trainable)
        locals_ = [param.to_local() for param in params]  # type: ignore[attr-defined]
        if torch.compiler.is_compiling():
            if keep:
                return GatherParameters.apply(spec, self._unit, None, *locals_), None
            # The partitioner recomputes what is in a checkpoint: gather, wait, and views of the result.
            full = checkpoint(GatherParameters.apply, spec, self._unit, None, *locals_, use_reentrant=False)
            return full, None
        saved = None
        if not keep:
            held = [local.detach() for local in locals_]
            saved = SavedParameters(lambda: gathered(spec, held, f"gather in backward of unit {self._unit}"))
        return GatherParameters.apply(spec, self._unit, saved, *locals_), saved


class _Registered:
    """While it is entered, modules have other tensors registered as their parameters."""

    def __init__(self, places: list[Place], tensors: list[Tensor]) -> None:
        self._places = places
        self._tensors = tensors
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        self._before = [module._parameters[name] for module, name in self._places]
        self._register(self._tensors)
        return self

    def __exit__(self, *raised: object) -> None:
        self._register(self._before)

    def _register(self, tensors: list[Any]) -> None:
        for (module, name), tensor in zip(self._places, tensors, strict=True):
            module._parameters[name] = tensor


@dataclass(frozen=True, eq=False)
class GraphUnit:
    """A module whose parameters are gathered together, and what its forward is run with.

    Args:
        name: its name in the model, "(root)" for the root.
        groups: its parameters, by dtype.
        keep: whether full parameters are kept from forward to backward.
        policy: dtypes.
    """

    name: str
    groups: tuple[UnitParameters, ...]
    keep: bool
    policy: MixedPrecisionPolicy

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)`` with full parameters in the place of sharded ones.

        Within another forward of the unit they are there already.
        """
        if any(group.is_full() for group in self.groups):
            return forward(*args, **kwargs)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            args, kwargs = _cast((args, kwargs), self.policy.param_dtype)
        places: list[Place] = []
        tensors: list[Tensor] = []
        hooks: list[SavedParameters] = []
        for group in self.groups:
            full, saved = group.gather(self.keep)
            for place, index in group.places:
                places.append(place)
                tensors.append(full[index])
            if saved is not None:
                hooks.append(saved)
        with _Registered(places, tensors):
            output = _under(hooks, forward, args, kwargs)
        if self.policy.output_dtype is not None:
            output = _cast(output, self.policy.output_dtype)
        return output


def _under(
    hooks: list[SavedParameters],
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not hooks:
        return forward(*args, **kwargs)
    with hooks[0].hooks():
        return _under(hooks[1:], forward, args, kwargs)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in nested ``values`` cast to ``dtype``."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return pytree.tree_map(cast, values)
