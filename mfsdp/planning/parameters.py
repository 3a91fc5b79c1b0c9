"""The parameters of a model as the planner lists them: every name once, tied ones together."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

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
    found = []
    for group in places.values():
        modules = {name: module for name, _, module in reversed(group)}  # of equal names, the first counts
        names = tuple(dict.fromkeys(name for name, _, _ in group))
        found.append(NamedParameter(names, group[0][1], tuple(modules[name] for name in names)))
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def unit_of_modules(model: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, str]:
    """Module name -> the name of its unit.

    By default a unit is a child of an ``nn.ModuleList`` or ``nn.ModuleDict``, which is where models keep the
    blocks that are passed to ``fully_shard`` one by one, and a module belongs to the nearest unit around it
    (itself included), or to the root unit ``""`` if there is none.

    Args:
        model: the root module.
        patterns: name patterns of the modules that are units, in place of the default; a module then belongs
            to the outermost unit around it, as ``*`` also matches dots.

    Raises:
        PlanError: a pattern matches no module.
    """
    units: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    unused = dict.fromkeys(patterns or ())
    for name, module in model.named_modules(remove_duplicate=False):
        modules[name] = module
        parent = name.rpartition(".")[0]
        inherited = units[parent] if name else ""
        matching = [pattern for pattern in patterns or () if fnmatchcase(name, pattern)]
        for pattern in matching:
            unused.pop(pattern, None)
        if patterns is None:
            starts = bool(name) and _is_container(modules[parent])
        else:
            starts = not inherited and bool(matching)
        units[name] = name if starts else inherited
    if unused:
        raise PlanError(f"units: no module's name matches {', '.join(map(repr, unused))}.")
    return units


def sizes_of_embeddings(parameters: Sequence[NamedParameter]) -> frozenset[int]:
    """The ``num_embeddings`` of every embedding that one of ``parameters`` is the weight of."""
    return frozenset(
        module.num_embeddings
        for parameter in parameters
        for module in parameter.modules
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    )
