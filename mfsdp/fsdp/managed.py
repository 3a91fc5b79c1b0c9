"""The parameters that one ``fully_shard`` call manages, and what the plan says about each."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

from mfsdp.placements import OwnerShard, Tail
from mfsdp.planning import MatrixShard, RankLoad, Role, ShardPlan, plan_parameters

__all__ = [
    "FoundParameter",
    "ManagedParameter",
    "commit_loads",
    "find_entries",
    "find_parameters",
    "loads_of_calls",
    "plan_call",
    "plan_of",
    "remember_plan",
]


@dataclass(frozen=True)
class FoundParameter:
    """A place where a parameter of the unit is registered.

    Args:
        name: its name below the module (or modules) that is sharded.
        module: the module that registers it.
        attribute: as what.
        parameter: the parameter as it is before sharding.
    """

    name: str
    module: nn.Module
    attribute: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter of the unit, with what the plan says about it.

    Args:
        name: its name: in the planned model, or, without a plan, below the module that is sharded.
        parameter: the parameter as it is before sharding.
        module: the module that registers it first.
        entry: the plan's record for it.
    """

    name: str
    parameter: nn.Parameter
    module: nn.Module
    entry: MatrixShard

    @property
    def placement(self) -> OwnerShard | Tail:
        """Its placement on the shard dimension; for owned parameters only."""
        if self.entry.owner is None:
            raise ValueError(f"{self.name}: a {self.entry.role.name} parameter has no owner.")
        return (OwnerShard if self.entry.role is Role.MATRIX else Tail)(self.entry.owner)


def find_parameters(modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter]) -> Iterator[FoundParameter]:
    """What one call on ``modules`` manages, in the order of FSDP2.

    Parameters of a nested ``fully_shard`` module and ``ignored`` ones are left out; a tied parameter comes
    once for every place where it is registered.
    """
    names = _module_names(modules)
    for module in _get_managed_modules(tuple(modules)):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in ignored:
                name = f"{names[module]}.{attribute}" if names[module] else attribute
                yield FoundParameter(name, module, attribute, parameter)


def _module_names(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Names below ``modules``; with several, each one's names start with its position in the list."""
    names: dict[nn.Module, str] = {}
    for position, root in enumerate(modules):
        prefix = f"{position}" if len(modules) > 1 else ""
        for name, module in root.named_modules(prefix=prefix):
            names.setdefault(module, name)
    return names


# What earlier calls without a plan have put on each rank of a mesh.
_loads: WeakKeyDictionary[DeviceMesh, tuple[RankLoad, ...]] = WeakKeyDictionary()


def loads_of_calls(mesh: DeviceMesh) -> tuple[RankLoad, ...] | None:
    """What earlier calls without a plan have put on each rank of ``mesh``; None if there were none."""
    return _loads.get(mesh)


def plan_call(found: Sequence[FoundParameter], mesh: DeviceMesh) -> ShardPlan:
    """A plan for one call that was given none, continuing from earlier such calls on the mesh.

    The new loads count once :func:`commit_loads` is called.

    Raises:
        PlanError: a parameter that cannot be planned.
    """
    return plan_parameters(
        [(place.name, place.parameter, place.module) for place in found],
        mesh.size(-1),
        replicas=mesh.size(0) if mesh.ndim == 2 else 1,
        initial_loads=loads_of_calls(mesh),
    )


def commit_loads(mesh: DeviceMesh, added: Sequence[RankLoad]) -> None:
    """Remember what a call without a plan has put on each rank of ``mesh``."""
    before = _loads.get(mesh) or (RankLoad(),) * len(added)
    _loads[mesh] = tuple(old + new for old, new in zip(before, added, strict=True))


# The plans that modules were sharded by.
_plans: WeakKeyDictionary[nn.Module, ShardPlan] = WeakKeyDictionary()


def remember_plan(modules: Sequence[nn.Module], plan: ShardPlan) -> None:
    """Remember that ``modules`` are sharded by ``plan``."""
    _plans.update((module, plan) for module in modules)


def plan_of(model: nn.Module) -> ShardPlan | None:
    """The plan of ``model`` that ``fully_shard`` was given, or else of a module in it; None without one.

    Graph style plans whole models, so that its plan is known even if it was not given one.
    """
    return next((_plans[module] for module in model.modules() if module in _plans), None)


def find_entries(
    found: Sequence[FoundParameter], plan: ShardPlan
) -> tuple[list[ManagedParameter], list[FoundParameter]]:
    """Look every parameter up in ``plan``: those that it knows, once each, and the others."""
    known: dict[nn.Parameter, ManagedParameter] = {}
    unknown: list[FoundParameter] = []
    for place in found:
        if place.parameter in known:
            continue
        name = plan.name_of(place.module, place.attribute)
        if name is None:
            unknown.append(place)
        else:
            known[place.parameter] = ManagedParameter(name, place.parameter, place.module, plan.entries[name])
    return list(known.values()), unknown
