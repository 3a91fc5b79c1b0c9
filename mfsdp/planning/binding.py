"""How a plan finds its entries again, starting from a module.

Parameters are no safe handle: ``to_empty`` and ``.to`` replace them. Modules stay, even when
``fully_shard`` changes their class, so a plan remembers the name of every module it was made from, weakly,
and asks for (module, parameter name).
"""

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

import torch
from torch import nn

from mfsdp.planning.parameters import NamedParameter

__all__ = ["Binding", "differences"]


class Binding:
    """Module -> its name in the planned model, holding no module alive.

    Args:
        names: (module, name) pairs; of a module with several names, the first counts.
    """

    def __init__(self, names: Iterable[tuple[nn.Module, str]] = ()) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        for module, name in names:
            self._names.setdefault(module, name)

    @classmethod
    def to_model(cls, model: nn.Module) -> "Binding":
        """The binding to all modules of ``model``."""
        return cls((module, name) for name, module in model.named_modules())

    @classmethod
    def to_parameters(cls, parameters: Iterable[NamedParameter]) -> "Binding":
        """The binding to the modules on which ``parameters`` are registered."""
        return cls(
            (module, name.rpartition(".")[0])
            for parameter in parameters
            for name, module in zip(parameter.names, parameter.modules, strict=True)
        )

    def name_of(self, module: nn.Module, parameter_name: str) -> str | None:
        """The full name of a parameter registered on ``module``, or None for an unknown module."""
        prefix = self._names.get(module)
        if prefix is None:
            return None
        return f"{prefix}.{parameter_name}" if prefix else parameter_name


def differences(
    planned: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype]], parameters: Iterable[NamedParameter]
) -> Iterator[str]:
    """One line for each way in which ``parameters`` are not the planned ones.

    Args:
        planned: all names of a parameter, canonical first -> its shape and dtype.
        parameters: those of a model.
    """
    remaining = {names[0]: (names, *rest) for names, rest in planned.items()}
    for parameter in parameters:
        name = parameter.names[0]
        if name not in remaining:
            yield f"{name}: in the model, not in the plan"
            continue
        names, shape, dtype = remaining.pop(name)
        found = parameter.parameter
        if tuple(found.shape) != shape:
            yield f"{name}: shape {tuple(found.shape)} in the model, {shape} in the plan"
        if found.dtype != dtype:
            yield f"{name}: dtype {found.dtype} in the model, {dtype} in the plan"
        if set(names) != set(parameter.names):
            yield (f"{name}: tied to {list(parameter.names[1:])} in the model, to {list(names[1:])} in the plan")
    for name in remaining:
        yield f"{name}: in the plan, not in the model"
