"""The parameters of a model as the planner lists them: every name once, tied ones together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import UninitializedParameter

from mfsdp.planning.errors import PlanError

__all__ = ["NamedParameter", "list_parameters", "of_model", "sizes_of_embeddings", "unit_of_modules"]


@dataclass(frozen=True, slots=True)
class NamedParameter:
    """A parameter and the places where it is registered.

    Args:
        names: its full names, the canonical one first.
        parameter: the parameter itself.
        modules: for each name, the module on which it is registered.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    modules: tuple[nn.Module, ...]


def of_model(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Every (name, parameter, module) of ``model``, tied ones under each of their names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield (f"{prefix}.{name}" if prefix else name), parameter, module


def list_parameters(named: Iterable[tuple[str, nn.Parameter, nn.Module]]) -> list[NamedParameter]:
    """Group ``named`` by parameter, in order of first appearance.

    Raises:
        PlanError: a parameter that has no shape yet, or two parameters of one name.
    """
    places: dict[int, list[tuple[str, nn.Parameter, nn.Module]]] = {}
    owners: dict[str, nn.Parameter] = {}
    for name, parameter, module in named:
        if isinstance(parameter, UninitializedParameter):
            raise PlanError(f"{name}: a lazy parameter has no shape yet; run one forward before planning.")
        if owners.setdefault(name, parameter) is not parameter:
            raise PlanError(f"{name}: two different parameters have this name.")
        places.setdefault(id(parameter), []).append((name, parameter, module))
    return [
        NamedParameter(
            names=tuple(dict.fromkeys(name for name, _, _ in group)),
            parameter=group[0][1],
            modules=tuple(module for _, _, module in group),
        )
        for group in places.values()
    ]


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def unit_of_modules(model: nn.Module) -> dict[str, str]:
    """Module name -> the name of its unit.

    A unit is a child of an ``nn.ModuleList`` or ``nn.ModuleDict``, which is where models keep the blocks that
    are passed to ``fully_shard`` one by one. A module belongs to the nearest unit around it (itself
    included), and to the root unit ``""`` if there is none.
    """
    units: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[name] = module
        parent = name.rpartition(".")[0]
        if not name:
            units[name] = ""
        elif _is_container(modules[parent]):
            units[name] = name
        else:
            units[name] = units[parent]
    return units


def sizes_of_embeddings(parameters: Sequence[NamedParameter]) -> frozenset[int]:
    """The ``num_embeddings`` of every embedding that one of ``parameters`` is the weight of."""
    return frozenset(
        module.num_embeddings
        for parameter in parameters
        for module in parameter.modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    )
