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

__all__ = ["ManagedParameter", "find_entries", "managed_parameters", "plan_call"]


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter of the unit.

    Args:
        name: its name: in the planned model, or, without a plan, in the module that is sharded.
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


def managed_parameters(
    modules: Sequence[nn.Module], ignored: AbstractSet[nn.Parameter]
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """(module, attribute, parameter) that one call on ``modules`` manages, in the order of FSDP2.

    Those of a nested ``fully_shard`` module and ``ignored`` ones are left out; a tied parameter comes once
    for every place where it is registered.
    """
    for module in _get_managed_modules(tuple(modules)):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in ignored:
                yield module, attribute, parameter


def _module_names(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Names below ``modules``; with several, each one's names start with its position in the list."""
    names: dict[nn.Module, str] = {}
    for position, root in enumerate(modules):
        prefix = f"{position}" if len(modules) > 1 else ""
        for module, name in ((module, name) for name, module in root.named_modules(prefix=prefix)):
            names.setdefault(module, name)
    return names


# What earlier calls without a plan have put on each rank of a mesh.
_loads: WeakKeyDictionary[DeviceMesh, tuple[RankLoad, ...]] = WeakKeyDictionary()


def plan_call(
    modules: Sequence[nn.Module],
    found: Sequence[tuple[nn.Module, str, nn.Parameter]],
    mesh: DeviceMesh,
) -> ShardPlan:
    """A plan for one call that was given none, continuing from earlier such calls on the mesh.

    The new loads count only once :func:`commit_loads` is called.
    """
    names = _module_names(modules)
    named = [
        (f"{names[module]}.{attribute}" if names[module] else attribute, parameter, module)
        for module, attribute, parameter in found
    ]
    return plan_parameters(
        named,
        mesh.size(-1),
        replicas=mesh.size(0) if mesh.ndim == 2 else 1,
        initial_loads=_loads.get(mesh),
    )


def commit_loads(mesh: DeviceMesh, plan: ShardPlan) -> None:
    """Remember what a plan by :func:`plan_call` has put on the ranks of ``mesh``."""
    before = _loads.get(mesh) or (RankLoad(),) * plan.world_size
    _loads[mesh] = tuple(old + new for old, new in zip(before, plan.loads(), strict=True))


def find_entries(
    found: Sequence[tuple[nn.Module, str, nn.Parameter]], plan: ShardPlan
) -> tuple[list[ManagedParameter], list[str]]:
    """Look every parameter up in ``plan``: those that it knows, once each, and descriptions of the others."""
    known: dict[nn.Parameter, ManagedParameter] = {}
    unknown: list[str] = []
    for module, attribute, parameter in found:
        if parameter in known:
            continue
        name = plan.name_of(module, attribute)
        if name is None:
            unknown.append(f"{attribute} of {type(module).__name__}")
        else:
            known[parameter] = ManagedParameter(name, parameter, module, plan.entries[name])
    return list(known.values()), unknown
