"""``fully_shard(model, style="graph")``: from the root of a model to units whose gathers are in the graph."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

from mfsdp.fsdp import checks
from mfsdp.fsdp.collectives import ShardGroup
from mfsdp.fsdp.graph.module import GraphFSDPModule, make_graph_module
from mfsdp.fsdp.graph.spec import Precision, Wires
from mfsdp.fsdp.graph.unit import GraphUnit, Place, UnitParameters
from mfsdp.fsdp.managed import (
    FoundParameter,
    ManagedParameter,
    commit_loads,
    find_entries,
    find_parameters,
    loads_of_calls,
    remember_plan,
)
from mfsdp.planning import PlanError, Role, ShardPlan
from mfsdp.planning import plan as make_plan
from mfsdp.planning.loads import loads_of
from mfsdp.planning.records import rows_of_rank

__all__ = ["GraphOptions", "shard_graph"]


@dataclass(frozen=True)
class GraphOptions:
    """How units behave.

    Args:
        reshard_after_forward: whether full parameters are gathered again in backward rather than kept from forward;
            None: in all units but the root.
        policy: dtypes of computation and reduction.
    """

    reshard_after_forward: bool | None
    policy: MixedPrecisionPolicy

    @classmethod
    def of(
        cls,
        reshard_after_forward: bool | int | None,
        policy: MixedPrecisionPolicy,
        offload: OffloadPolicy,
        findings: checks.Findings,
    ) -> "GraphOptions":
        """The options of a call; what hooks style can do and graph style cannot is refused."""
        if type(reshard_after_forward) is int:
            findings.add(
                NotImplementedError(
                    f"reshard_after_forward={reshard_after_forward} with style='graph': full parameters are gathered "
                    "again from all ranks, or kept. Pass True or False, or use style='hooks'."
                )
            )
        if type(offload) is not OffloadPolicy:
            findings.add(
                NotImplementedError(
                    f"{type(offload).__name__} with style='graph': parameters stay on the device that computes. Use "
                    "style='hooks'."
                )
            )
        return cls(None if reshard_after_forward is None else bool(reshard_after_forward), policy)

    def keeps(self, unit: str) -> bool:
        """Whether the unit keeps its full parameters from forward to backward."""
        return not unit if self.reshard_after_forward is None else not self.reshard_after_forward

    def precision(self, stored: torch.dtype) -> Precision:
        """The dtypes of parameters that are stored as ``stored``."""
        compute = self.policy.param_dtype or stored
        return Precision(stored, compute, self.policy.reduce_dtype or compute)


def shard_graph(
    module: nn.Module | list[nn.Module],
    mesh: DeviceMesh,
    plan: ShardPlan | None,
    options: GraphOptions,
    ignored: AbstractSet[nn.Parameter],
    findings: checks.Findings,
) -> GraphFSDPModule:
    """Shard a whole model for graph style; see :func:`mfsdp.fully_shard`.

    Args:
        module: the root of the planned model.
        mesh: checked already.
        plan: who owns what; by default made from the model, continuing from what earlier calls without a plan have
            put on each rank of the mesh.
        options: how units behave.
        ignored: parameters to leave alone.
        findings: what is known to be wrong with the call.
    """
    units: dict[str, list[tuple[ManagedParameter, list[Place]]]] = {}
    managed: list[ManagedParameter] = []
    used = plan
    if isinstance(module, nn.Module):
        _check_tree(module, findings)
        found = list(find_parameters((module,), ignored))
        checks.check_dtypes(found, findings)
        if used is None and not findings.errors:
            try:
                used = make_plan(module, mesh, initial_loads=loads_of_calls(mesh))
            except PlanError as error:
                findings.add(error)
        if used is not None:
            managed, unknown = find_entries(found, used)
            checks.check_plan(used, mesh, unknown, findings)
            checks.check_parameters(managed, mesh, findings)
            _check_root(used, list(find_parameters((module,), set())), findings)
            units = _units_of(found, managed, used)
            modules = _modules_of_units(module, used)
            for problem in _problems_of_units(units, modules):
                findings.add(problem)
    else:
        findings.add(
            NotImplementedError(
                f"style='graph' with a list of {len(module)} modules: the units are those of the plan. Call "
                "fully_shard once, on the root; mfsdp.plan(model, mesh, units=...) chooses units."
            )
        )
    checks.agree(mesh, used, managed, findings)
    assert isinstance(module, nn.Module)
    assert used is not None
    _prepare_compiler()
    _replace_parameters(units, mesh)
    for name in dict.fromkeys([*units, ""]):
        make_graph_module(modules[name], _unit(name, units.get(name, []), mesh, options))
    assert isinstance(module, GraphFSDPModule)
    remember_plan([module], used)
    if plan is None:
        commit_loads(mesh, loads_of((parameter.entry for parameter in managed), used.world_size))
    return module


def _prepare_compiler() -> None:
    # here, so that nobody else who imports mfsdp imports Dynamo and Inductor
    from mfsdp.fsdp.graph import lowering, overlap

    torch.compiler.assume_constant_result(UnitParameters.spec_for)
    lowering.register_lowerings()
    overlap.install()


# What is refused #


def _check_tree(root: nn.Module, findings: checks.Findings) -> None:
    for name, module in root.named_modules():
        where = f"{name!r} ({type(module).__name__})" if name else f"this {type(module).__name__}"
        if isinstance(module, FSDPModule):
            findings.add(
                ValueError(
                    f"style='graph': {where} was sharded by hooks already. A model is of one style: call "
                    "fully_shard(model, style='graph') once, on the root of a model that is not sharded yet."
                )
            )
            return
        if isinstance(module, GraphFSDPModule):
            findings.add(
                ValueError(
                    f"style='graph': {where} was sharded already. Call fully_shard(model, style='graph') once, on the "
                    "root, and not on its blocks; the units in it are those of the plan."
                )
            )
            return


def _check_root(plan: ShardPlan, found: Sequence[FoundParameter], findings: checks.Findings) -> None:
    """Refuse a module that is only a part of what was planned."""
    names = {plan.name_of(place.module, place.attribute) for place in found}
    missing = [name for name in plan.entries if name not in names]
    if missing and names != {None}:
        findings.add(
            ValueError(
                f"style='graph' is called once, on the root of the planned model: the plan has {len(missing)} "
                f"parameters that this module has not, {missing[0]} for instance. Call fully_shard(model, "
                "style='graph') on the model that was planned, and not on its blocks."
            )
        )


def _problems_of_units(
    units: dict[str, list[tuple[ManagedParameter, list[Place]]]], modules: dict[str, nn.Module]
) -> Iterator[Exception]:
    for name, parameters in units.items():
        unit = modules.get(name)
        if unit is None:
            yield ValueError(
                f"unit {name!r} of the plan is no module of this model. Make the plan with mfsdp.plan(model, mesh), or "
                "bind it with plan.bind(model)."
            )
        elif type(unit).forward is nn.Module.forward or "forward" in vars(unit):
            yield NotImplementedError(
                f"unit {name or '(root)'!r}, a {type(unit).__name__}, has no forward of its class to gather its "
                "parameters in. Choose units that are called, with mfsdp.plan(model, mesh, units=...)."
            )
        for parameter, places in parameters:
            for module, attribute in places:
                if type(module).__setattr__ is not nn.Module.__setattr__:
                    yield NotImplementedError(
                        f"{parameter.name}: {type(module).__name__} does something of its own when {attribute!r} is "
                        "set, which style='graph' would pass by. Use style='hooks', or put it in ignored_params."
                    )


# Units #


def _modules_of_units(root: nn.Module, plan: ShardPlan) -> dict[str, nn.Module]:
    """Name in the plan -> module, of all modules below ``root``."""
    found: dict[str, nn.Module] = {}
    for module in root.modules():
        name = plan.binding.name_of(module, "")
        if name is not None:
            found.setdefault(name.removesuffix("."), module)
    found[""] = root
    return found


def _units_of(
    found: Sequence[FoundParameter], managed: Sequence[ManagedParameter], plan: ShardPlan
) -> dict[str, list[tuple[ManagedParameter, list[Place]]]]:
    """The parameters of each unit, with all places where each is registered.

    A parameter that is tied across units belongs to the root, whose forward is around that of all others.
    """
    names = {parameter.entry.unit for parameter in managed}
    places: dict[nn.Parameter, list[Place]] = {}
    around: dict[nn.Parameter, set[str]] = {}
    for place in found:
        places.setdefault(place.parameter, []).append((place.module, place.attribute))
        full_name = plan.binding.name_of(place.module, place.attribute)
        if full_name is not None:
            around.setdefault(place.parameter, set()).add(_unit_around(full_name, names))
    units: dict[str, list[tuple[ManagedParameter, list[Place]]]] = {}
    for parameter in managed:
        tied_across = len(around[parameter.parameter]) > 1
        unit = "" if tied_across else parameter.entry.unit
        units.setdefault(unit, []).append((parameter, places[parameter.parameter]))
    return units


def _unit_around(name: str, units: AbstractSet[str]) -> str:
    prefix = name
    while prefix:
        prefix = prefix.rpartition(".")[0]
        if prefix in units:
            return prefix
    return ""


def _unit(
    name: str, parameters: list[tuple[ManagedParameter, list[Place]]], mesh: DeviceMesh, options: GraphOptions
) -> GraphUnit:
    label = name or "(root)"
    ranks = ShardGroup.of(mesh, mesh.ndim - 1)
    wires = Wires(ranks, mesh.get_group(0) if mesh.ndim == 2 else None)
    by_dtype: dict[torch.dtype, list[tuple[ManagedParameter, list[Place]]]] = {}
    for parameter, places in parameters:
        by_dtype.setdefault(parameter.entry.dtype, []).append((parameter, places))
    groups = []
    for dtype, members in by_dtype.items():
        members.sort(key=lambda member: _order(member[0]))
        groups.append(
            UnitParameters(
                label,
                [places for _, places in members],
                [parameter.entry.owner for parameter, _ in members],
                wires,
                options.precision(dtype),
            )
        )
    return GraphUnit(label, tuple(groups), options.keeps(name), options.policy)


def _order(parameter: ManagedParameter) -> tuple[bool, int, int]:
    """Owned before ``ROWS``, owner by owner, large before small."""
    owner = parameter.entry.owner
    return owner is None, owner or 0, -parameter.entry.numel


# Parameters #


def _replace_parameters(units: dict[str, list[tuple[ManagedParameter, list[Place]]]], mesh: DeviceMesh) -> None:
    for parameters in units.values():
        for parameter, places in parameters:
            sharded = nn.Parameter(_sharded(parameter, mesh), requires_grad=parameter.parameter.requires_grad)
            for module, name in places:
                module._parameters[name] = sharded


@torch.no_grad()
def _sharded(parameter: ManagedParameter, mesh: DeviceMesh) -> DTensor:
    """What this rank keeps of a parameter; its own values, nothing is sent."""
    whole = parameter.parameter.detach()
    rows = parameter.entry.role is Role.ROWS
    placement: Placement = Shard(0) if rows else parameter.placement
    coordinate = mesh.get_local_rank(mesh.ndim - 1)
    held = _rows(whole, coordinate, mesh.size(-1)) if rows else _owned(whole, coordinate == parameter.entry.owner)
    placements = (*(Replicate(),) * (mesh.ndim - 1), placement)
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(held.clone(memory_format=torch.contiguous_format), spec, requires_grad=False)


def _rows(whole: Tensor, coordinate: int, world_size: int) -> Tensor:
    start = sum(rows_of_rank(whole.shape[0], rank, world_size) for rank in range(coordinate))
    return whole[start : start + rows_of_rank(whole.shape[0], coordinate, world_size)]


def _owned(whole: Tensor, mine: bool) -> Tensor:
    return whole if mine else whole.new_empty((0, *whole.shape[1:]))
