"""Making a plan: of a whole model, or of some of its parameters."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from mfsdp.planning.binding import Binding
from mfsdp.planning.capacity import check_cap
from mfsdp.planning.cost import CostModel, MuonCost
from mfsdp.planning.dtypes import dtype_name
from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import RankLoad, loads_of
from mfsdp.planning.parameters import NamedParameter, list_parameters, of_model, unit_of_modules
from mfsdp.planning.placing import BytesOnly, Costs, place, shard
from mfsdp.planning.records import MatrixShard, ParameterSpec, Role
from mfsdp.planning.roles import Roles, Splits, roles_of, splits_of
from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["Mesh", "plan", "plan_parameters", "plan_specs"]


@runtime_checkable
class Mesh(Protocol):
    """What the planner reads of a ``DeviceMesh``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions; owners are on the last."""
        ...


def _sizes(mesh: Mesh | int) -> tuple[int, int]:
    """(replicas, owners) of ``mesh``."""
    if not isinstance(mesh, int | Mesh):
        raise TypeError(f"plan: mesh must be a DeviceMesh or a number of owners, not {mesh!r}.")
    shape = (mesh,) if isinstance(mesh, int) else tuple(mesh.shape)
    if not 1 <= len(shape) <= 2:
        raise PlanError(
            f"a mesh of shape {shape} cannot be planned for; pass the 1-D mesh of the owners, or a 2-D mesh "
            f"(replicas, owners), for instance mesh['replicate', 'shard']."
        )
    if min(shape) < 1:
        raise PlanError(f"a mesh of shape {shape} has no ranks; every dimension needs at least 1.")
    return (shape[0] if len(shape) == 2 else 1), shape[-1]


def _specs(
    parameters: Sequence[NamedParameter],
    units: Sequence[str],
    roles: Roles | None,
    splits: Splits | None,
    model: nn.Module | None,
) -> list[ParameterSpec]:
    _check_dtypes(parameters)
    split = splits_of(parameters, splits)
    chosen = roles_of(parameters, roles, split=split, model=model)
    return [
        ParameterSpec(
            name=parameter.names[0],
            role=role,
            shape=tuple(parameter.parameter.shape),
            dtype=parameter.parameter.dtype,
            unit=unit,
            aliases=parameter.names[1:],
            trainable=parameter.parameter.requires_grad,
            split=split.get(parameter.names[0]),
        )
        for parameter, unit, role in zip(parameters, units, chosen, strict=True)
    ]


def _check_dtypes(parameters: Iterable[NamedParameter]) -> None:
    for parameter in parameters:
        dtype: torch.dtype = parameter.parameter.dtype
        if not dtype.is_floating_point:
            raise PlanError(
                f"{parameter.names[0]}: a parameter of dtype {dtype_name(dtype)} cannot be planned, only "
                f"floating-point ones can. Register it as a buffer, or convert it."
            )


def _initial(loads: Sequence[RankLoad] | None, world_size: int) -> list[RankLoad]:
    found = [RankLoad()] * world_size if loads is None else list(loads)
    if len(found) != world_size:
        raise PlanError(f"initial_loads has {len(found)} entries for {world_size} ranks; it needs one per rank.")
    return found


def _placed(
    specs: Sequence[ParameterSpec],
    world_size: int,
    costs: Costs,
    before: Sequence[RankLoad],
    cap: int | None,
    spread_stacks: bool,
) -> dict[str, MatrixShard]:
    """The records of ``specs``; rows first, because what ranks have of them is no matter of choice."""
    rows = {spec.name: shard(spec, None, costs.of(spec)) for spec in specs if spec.role is Role.ROWS}
    loads = [old + new for old, new in zip(before, loads_of(rows.values(), world_size), strict=True)]
    base = [load.step_flops for load in loads], [load.resident_bytes for load in loads]
    others = [spec for spec in specs if spec.role is not Role.ROWS]
    records = rows | place(others, costs, base, cap, spread_stacks)
    return {spec.name: records[spec.name] for spec in specs}


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No cyclic garbage collection inside.

    A large plan makes hundreds of thousands of objects and not one cycle; the collector would go through all
    that the process has several times over, which takes as long as the planning itself.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _most_bytes(
    specs: Sequence[ParameterSpec],
    world_size: int,
    costs: Costs,
    before: Sequence[RankLoad],
    spread_stacks: bool,
) -> int:
    """The most bytes that some rank has, if only bytes are balanced."""
    entries = _placed(specs, world_size, BytesOnly(costs.model), before, 0, spread_stacks)
    loads = zip(before, loads_of(entries.values(), world_size), strict=True)
    return max(old.resident_bytes + new.resident_bytes for old, new in loads)


def plan_specs(
    specs: Sequence[ParameterSpec],
    world_size: int,
    *,
    replicas: int = 1,
    cost_model: CostModel | None = None,
    bytes_cap: int | None = None,
    initial_loads: Sequence[RankLoad] | None = None,
    spread_stacks: bool = False,
    binding: Binding | None = None,
) -> ShardPlan:
    """Plan parameters that need not exist, as :func:`plan` does.

    Args:
        specs: the parameters, in the model's order.
        world_size: number of owners.
        replicas: groups of ``world_size`` ranks that hold the same.
        cost_model, bytes_cap, initial_loads, spread_stacks: as in :func:`plan`.
        binding: the modules that the specs were read from.

    Raises:
        PlanError: as in :func:`plan`.
    """
    if len({spec.name for spec in specs}) != len(specs):
        raise PlanError("two parameters have one name.")
    if bytes_cap is not None and bytes_cap < 0:
        raise PlanError(f"bytes_cap={bytes_cap} must not be negative.")
    costs = Costs(cost_model or MuonCost())
    before = _initial(initial_loads, world_size)
    with _collector_paused():
        entries = _placed(specs, world_size, costs, before, bytes_cap, spread_stacks)
    if bytes_cap is not None:

        def most_bytes(ranks: int) -> int:
            even = before if ranks == world_size else [RankLoad()] * ranks
            return _most_bytes(specs, ranks, costs, even, spread_stacks)

        added = loads_of(entries.values(), world_size)
        loads = [old + new for old, new in zip(before, added, strict=True)]
        check_cap(bytes_cap, [*entries.values()], loads, most_bytes, more_ranks=initial_loads is None)
    return ShardPlan(entries, world_size, replicas, costs.model.name, binding or Binding())


def plan(
    model: nn.Module,
    mesh: Mesh | int,
    *,
    roles: Roles | None = None,
    splits: Splits | None = None,
    units: Sequence[str] | None = None,
    cost_model: CostModel | None = None,
    bytes_cap: int | None = None,
    initial_loads: Sequence[RankLoad] | None = None,
    spread_stacks: bool = False,
) -> ShardPlan:
    """Decide which rank owns which parameter of ``model``, for the whole model at once.

    The result is a function of names, shapes, dtypes, ``requires_grad`` and the arguments alone, so every
    rank comes to the same plan without communication. It is bound to ``model``, so that
    ``fully_shard(block, plan=plan)`` finds the parameters of each block in it.

    Args:
        model: the root module; it may be on the meta device.
        mesh: the device mesh, or the number of owners. Owners are on the last mesh dimension; a 2-D mesh is
            (replicas, owners).
        roles: overrides of the roles in :mod:`mfsdp.planning.roles`: name pattern -> role, or a function of
            (name, parameter, module) that returns a role, or None for the default.
        splits: the logical matrices of fused and stacked parameters, in the same two ways: name pattern -> a
            rule of :mod:`mfsdp.planning.split`, for instance ``{"*.qkv.weight": EqualBlocks(3)}``.
        units: name patterns of the modules that will be passed to ``fully_shard``; by default the children of
            ``nn.ModuleList`` and ``nn.ModuleDict``. They decide what is spread over owners, and reports.
        cost_model: what counts bytes and operations; by default Muon's with 5 iterations.
        bytes_cap: resident bytes that a rank may have. By default 5% above the larger of the mean and the
            largest item, exceeded where that is not possible; a cap of the user's is kept or is an error.
        initial_loads: what each rank has already, for instance of another model on the same ranks.
        spread_stacks: whether a stack of matrices (a split with ``Stack``) may be cut between matrices and
            owned by several ranks where that is more even.

    Raises:
        TypeError: ``mesh`` is neither a mesh nor a number.
        PlanError: a parameter that cannot be planned (integer, complex, lazy), a role or split that its shape
            does not allow, a pattern that matches nothing, a mesh that is no mesh of owners, or a cap that
            cannot be kept.
    """
    replicas, world_size = _sizes(mesh)
    parameters = list_parameters(of_model(model))
    of_module = unit_of_modules(model, units)
    unit_of = [of_module[parameter.names[0].rpartition(".")[0]] for parameter in parameters]
    return plan_specs(
        _specs(parameters, unit_of, roles, splits, model),
        world_size,
        replicas=replicas,
        cost_model=cost_model,
        bytes_cap=bytes_cap,
        initial_loads=initial_loads,
        spread_stacks=spread_stacks,
        binding=Binding.to_model(model),
    )


def plan_parameters(
    named: Iterable[tuple[str, nn.Parameter, nn.Module]],
    world_size: int,
    *,
    replicas: int = 1,
    roles: Roles | None = None,
    splits: Splits | None = None,
    cost_model: CostModel | None = None,
    initial_loads: Sequence[RankLoad] | None = None,
    unit: str = "",
) -> ShardPlan:
    """Plan some parameters only, continuing from what ranks have already.

    Less even than :func:`plan`, which sees everything; and an output head is only recognised together with
    an embedding of the same number of rows.

    Args:
        named: (name, parameter, module on which it is registered); a parameter may come under several names.
        world_size: number of owners.
        replicas: groups of ``world_size`` ranks that hold the same.
        roles, splits, cost_model: as in :func:`plan`.
        initial_loads: what each rank has already: :meth:`ShardPlan.loads` of earlier plans, added up.
        unit: the unit that they all belong to.

    Raises:
        PlanError: as in :func:`plan`.
    """
    if world_size < 1 or replicas < 1:
        raise PlanError(f"world_size={world_size} and replicas={replicas} must be 1 or more.")
    parameters = list_parameters(named)
    return plan_specs(
        _specs(parameters, [unit] * len(parameters), roles, splits, None),
        world_size,
        replicas=replicas,
        cost_model=cost_model,
        initial_loads=initial_loads,
        binding=Binding.to_parameters(parameters),
    )
