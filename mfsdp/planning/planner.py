"""Making a plan: of a whole model, or of some of its parameters."""

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from mfsdp.planning.assign import Item, Ranks, assign_matrices, assign_tails
from mfsdp.planning.binding import Binding
from mfsdp.planning.cost import CostModel, MuonCost
from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import RankLoad
from mfsdp.planning.parameters import NamedParameter, list_parameters, of_model, unit_of_modules
from mfsdp.planning.records import MatrixShard, ParameterSpec, Role
from mfsdp.planning.roles import Roles, roles_of
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
    parameters: Sequence[NamedParameter], units: Sequence[str], roles: Iterable[Role]
) -> list[ParameterSpec]:
    return [
        ParameterSpec(
            name=parameter.names[0],
            role=role,
            shape=tuple(parameter.parameter.shape),
            dtype=parameter.parameter.dtype,
            unit=unit,
            aliases=parameter.names[1:],
            trainable=parameter.parameter.requires_grad,
        )
        for parameter, unit, role in zip(parameters, units, roles, strict=True)
    ]


def _check_dtypes(parameters: Iterable[NamedParameter]) -> None:
    for parameter in parameters:
        dtype: torch.dtype = parameter.parameter.dtype
        if not dtype.is_floating_point:
            raise PlanError(
                f"{parameter.names[0]}: a parameter of dtype {dtype} cannot be planned, only floating-point "
                f"ones can. Register it as a buffer, or convert it."
            )


class _Costs:
    """A cost model, asked once for each kind of parameter."""

    def __init__(self, model: CostModel) -> None:
        self._model = model
        self._known: dict[tuple[object, ...], tuple[int, int]] = {}

    def of(self, spec: ParameterSpec) -> tuple[int, int]:
        """(step_flops, resident_bytes) of ``spec``."""
        kind = (spec.role, spec.shape, spec.dtype, spec.trainable)
        found = self._known.get(kind)
        if found is None:
            found = self._known[kind] = (self._model.step_flops(spec), self._model.resident_bytes(spec))
        return found


def plan_specs(
    specs: Sequence[ParameterSpec],
    world_size: int,
    *,
    replicas: int = 1,
    cost_model: CostModel | None = None,
    initial_loads: Sequence[RankLoad] | None = None,
    binding: Binding | None = None,
) -> ShardPlan:
    """Plan parameters that need not exist, as :func:`plan` does.

    Args:
        specs: the parameters, in the model's order.
        world_size: number of owners.
        replicas: groups of ``world_size`` ranks that hold the same.
        cost_model: what counts bytes and operations; by default Muon's.
        initial_loads: what each rank has already; owners are chosen so that the sums are even.
        binding: the modules that the specs were read from.
    """
    cost_model = cost_model or MuonCost()
    costs = _Costs(cost_model)
    loads = list(initial_loads) if initial_loads is not None else [RankLoad()] * world_size
    if len(loads) != world_size:
        raise PlanError(
            f"initial_loads has {len(loads)} entries for {world_size} ranks; it needs one per rank."
        )
    rows = [spec for spec in specs if spec.role is Role.ROWS]
    fixed = ShardPlan({spec.name: _shard(spec, None, costs) for spec in rows}, world_size)
    loads = [before + row for before, row in zip(loads, fixed.loads(), strict=True)]
    ranks = Ranks([load.step_flops for load in loads], [load.resident_bytes for load in loads])
    owners: dict[str, int] = {}
    for role, assign in ((Role.MATRIX, assign_matrices), (Role.TAIL, assign_tails)):
        chosen = [spec for spec in specs if spec.role is role]
        items = [Item(*costs.of(spec), spec.unit) for spec in chosen]
        owners |= zip((spec.name for spec in chosen), assign(items, ranks), strict=True)
    entries = {spec.name: _shard(spec, owners.get(spec.name), costs) for spec in specs}
    if len(entries) != len(specs):
        raise PlanError("two parameters have one name.")
    return ShardPlan(entries, world_size, replicas, cost_model.name, binding or Binding())


def _shard(spec: ParameterSpec, owner: int | None, costs: _Costs) -> MatrixShard:
    flops, nbytes = costs.of(spec)
    return MatrixShard(
        spec.name, spec.role, owner, spec.shape, spec.dtype, nbytes, flops, spec.unit, spec.aliases
    )


def plan(
    model: nn.Module,
    mesh: Mesh | int,
    *,
    roles: Roles | None = None,
    cost_model: CostModel | None = None,
    initial_loads: Sequence[RankLoad] | None = None,
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
        cost_model: what counts bytes and operations; by default Muon's with 5 iterations.
        initial_loads: what each rank has already, for instance of another model on the same ranks.

    Raises:
        PlanError: a parameter that cannot be planned (integer, complex, lazy), a role that its shape does not
            allow, a pattern that matches nothing, or a mesh that is no mesh of owners.
    """
    replicas, world_size = _sizes(mesh)
    parameters = list_parameters(of_model(model))
    _check_dtypes(parameters)
    of_module = unit_of_modules(model)
    units = [of_module[parameter.names[0].rpartition(".")[0]] for parameter in parameters]
    specs = _specs(parameters, units, roles_of(parameters, units, roles, whole_model=True))
    return plan_specs(
        specs,
        world_size,
        replicas=replicas,
        cost_model=cost_model,
        initial_loads=initial_loads,
        binding=Binding.to_model(model),
    )


def plan_parameters(
    named: Iterable[tuple[str, nn.Parameter, nn.Module]],
    world_size: int,
    *,
    replicas: int = 1,
    roles: Roles | None = None,
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
        roles, cost_model: as in :func:`plan`.
        initial_loads: what each rank has already: :meth:`ShardPlan.loads` of earlier plans, added up.
        unit: the unit that they all belong to.

    Raises:
        PlanError: as in :func:`plan`.
    """
    parameters = list_parameters(named)
    _check_dtypes(parameters)
    units = [unit] * len(parameters)
    specs = _specs(parameters, units, roles_of(parameters, units, roles, whole_model=False))
    replicas, world_size = _sizes_checked(replicas, world_size)
    return plan_specs(
        specs,
        world_size,
        replicas=replicas,
        cost_model=cost_model,
        initial_loads=initial_loads,
        binding=Binding.to_parameters(parameters),
    )


def _sizes_checked(replicas: int, world_size: int) -> tuple[int, int]:
    if world_size < 1 or replicas < 1:
        raise PlanError(f"world_size={world_size} and replicas={replicas} must be 1 or more.")
    return replicas, world_size
