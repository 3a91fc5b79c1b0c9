"""What ``fully_shard`` refuses, on every rank alike, before anything is moved.

A rank that raised alone would leave the others waiting in their next collective. So nothing is raised where
it is found: every rank first hears from all others what they found (:func:`agree`), and then all raise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _validate_module
from torch.distributed.tensor import DTensor

from mfsdp.fsdp.arguments import first_difference
from mfsdp.fsdp.managed import FoundParameter, ManagedParameter
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.planning import Role, ShardPlan

__all__ = [
    "Findings",
    "agree",
    "check_dtypes",
    "check_mesh",
    "check_modules",
    "check_options",
    "check_parameters",
    "check_plan",
    "check_unsharded",
]

_T = TypeVar("_T")


@dataclass
class Findings:
    """What this rank has against a call; filled by the checks, settled by :func:`agree`.

    Args:
        arguments: what this rank calls with, as :meth:`mfsdp.fsdp.arguments.Arguments.described` puts it.
        errors: what is wrong with it.
    """

    arguments: dict[str, str]
    errors: list[Exception] = field(default_factory=list)

    def add(self, error: Exception) -> None:
        self.errors.append(error)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise at once for a mesh that one cannot even agree over.

    Raises:
        ValueError: neither 1-D nor 2-D.
    """
    if mesh.ndim not in (1, 2):
        raise ValueError(
            "fully_shard needs a mesh of 1 dimension, or of 2 (replicate, shard) for HSDP; this one has "
            f"{mesh.ndim}: {mesh}. Pass the part of it that is data parallel, for instance mesh['replicate', "
            "'shard']."
        )


def check_options(
    mesh: DeviceMesh,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: object | None,
    dp_mesh_dims: object | None,
    findings: Findings,
) -> None:
    """Refuse what FSDP2 can do and owned parameters cannot, and what neither can."""
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        findings.add(
            ValueError(
                f"fully_shard needs names for the dimensions of a 2-D mesh, which {mesh} has not. Make it with "
                f"init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
            )
        )
    if shard_placement_fn is not None:
        findings.add(
            NotImplementedError(
                "shard_placement_fn: where a parameter lives is decided by its role and owner in the plan. "
                "Choose roles with mfsdp.plan(model, mesh, roles=...)."
            )
        )
    if dp_mesh_dims is not None:
        findings.add(
            NotImplementedError(
                "dp_mesh_dims: meshes with other than data-parallel dimensions are not supported. Pass the "
                "data-parallel part, for instance mesh['replicate', 'shard']."
            )
        )
    shards = mesh.size(-1)
    if type(reshard_after_forward) is int and (reshard_after_forward < 1 or shards % reshard_after_forward):
        findings.add(
            ValueError(
                f"reshard_after_forward={reshard_after_forward} does not divide mesh dimension "
                f"{mesh.ndim - 1}, which has {shards} ranks. Use a factor of {shards}, or True or False."
            )
        )


def check_modules(module: object, modules: Sequence[nn.Module], findings: Findings) -> None:
    """Refuse what is no module, and a container that is never called.

    Args:
        module: as it is passed to ``fully_shard``.
        modules: the modules in it.
        findings: takes what is found.
    """
    given = list(module) if isinstance(module, Sequence) else [module]
    strange = [type(each).__name__ for each in given if not isinstance(each, nn.Module)]
    if strange or not modules:
        what = f"a {strange[0]}" if strange else "an empty list"
        findings.add(TypeError(f"fully_shard takes a module, or a list of modules, but was given {what}."))
    try:
        _validate_module(module, "fully_shard")  # type: ignore[arg-type]
    except ValueError as error:
        findings.add(error)


def check_unsharded(modules: Sequence[nn.Module], findings: Findings) -> None:
    """Refuse modules that ``fully_shard`` had before."""
    for module in modules:
        if isinstance(module, FSDPModule):
            findings.add(
                ValueError(
                    f"fully_shard was already called on this {type(module).__name__}; it can be called on a "
                    "module once. Call it on its blocks first and on the module that contains them last."
                )
            )


def check_dtypes(found: Sequence[FoundParameter], findings: Findings) -> None:
    """Refuse parameters that no gradient, and so no optimizer, can reach."""
    for place in found:
        if not place.parameter.dtype.is_floating_point:
            findings.add(
                ValueError(
                    f"{place.name}: a parameter of dtype {place.parameter.dtype}; fully_shard takes real "
                    "floating-point parameters only. Register it as a buffer, convert it, or pass it in "
                    "ignored_params."
                )
            )


def check_plan(plan: ShardPlan, mesh: DeviceMesh, unknown: Sequence[FoundParameter], findings: Findings) -> None:
    """Refuse a plan for another number of ranks or another model."""
    owners = mesh.size(-1)
    if plan.world_size != owners:
        dim = mesh.ndim - 1
        names = mesh.mesh_dim_names
        where = f"mesh dimension {dim}" + (f" ({names[dim]!r})" if names else "")
        findings.add(
            ValueError(
                f"the plan is for {plan.world_size} ranks, {where} has {owners}. Make it with "
                "mfsdp.plan(model, mesh) for the mesh that is passed to fully_shard."
            )
        )
    if unknown:
        parameters = list(dict.fromkeys(place.parameter for place in unknown))
        first = unknown[0]
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        findings.add(
            ValueError(
                f"the plan does not know the module's parameter {first.name} of shape "
                f"{tuple(first.parameter.shape)}{more}. A plan belongs to the model instance that it was made from: "
                "make it from the model that contains this module, or, if it comes from JSON or from an equal "
                "model, bind it with plan.bind(model)."
            )
        )


def check_parameters(managed: Sequence[ManagedParameter], mesh: DeviceMesh, findings: Findings) -> None:
    """Refuse parameters that the plan does not describe, or that cannot be owned."""
    for parameter in managed:
        for problem in _problems_of(parameter, mesh):
            findings.add(problem)


def _problems_of(managed: ManagedParameter, mesh: DeviceMesh) -> Iterator[Exception]:
    name, parameter, entry = managed.name, managed.parameter, managed.entry
    if tuple(parameter.shape) != tuple(entry.shape) or parameter.dtype != entry.dtype:
        yield ValueError(
            f"{name}: the plan describes a parameter of shape {tuple(entry.shape)} and {entry.dtype}, the "
            f"module's has shape {tuple(parameter.shape)} and {parameter.dtype}. Make the plan from this "
            "model."
        )
    if entry.parts:
        yield NotImplementedError(
            f"{name}: the plan spreads its matrices over the ranks {[part.owner for part in entry.parts]}; a "
            "parameter with several owners is not supported. Plan with spread_stacks=False."
        )
    if entry.owner is not None and entry.owner >= mesh.size(-1):
        yield ValueError(
            f"{name}: owner {entry.owner} is outside mesh dimension {mesh.ndim - 1}, whose coordinates are 0 "
            f"to {mesh.size(-1) - 1}. Plan again with mfsdp.plan(model, mesh)."
        )
    if parameter.device.type not in (mesh.device_type, "meta"):
        yield ValueError(
            f"{name}: the parameter is on {parameter.device}, the mesh is of {mesh.device_type} devices. "
            f"Move the model with model.to({mesh.device_type!r}) before fully_shard, or build it on the meta "
            "device."
        )
    if isinstance(parameter, DTensor):
        yield NotImplementedError(
            f"{name}: the parameter is a DTensor with placements {parameter.placements}; fully_shard of "
            "parameters that are sharded already is not supported. Call it on plain parameters."
        )
    elif entry.role is not Role.ROWS and not parameter.is_contiguous():
        yield NotImplementedError(
            f"{name}: the parameter is not contiguous: shape {tuple(parameter.shape)}, strides "
            f"{parameter.stride()}. Replace it by parameter.contiguous() before fully_shard."
        )


@dataclass(frozen=True)
class _Report:
    """What ranks tell each other about one call."""

    arguments: dict[str, str]
    error: Exception | None
    plan_hash: str | None
    unit: tuple[tuple[str, ...], ...]


def agree(mesh: DeviceMesh, plan: ShardPlan | None, managed: Sequence[ManagedParameter], findings: Findings) -> None:
    """Raise on every rank if any rank has findings, or if ranks do not agree on what to shard how.

    One small exchange over all ranks of the mesh, replicas included.

    Raises:
        Exception: the first finding of this rank, or else that of the first rank that has one.
        RuntimeError: ranks differ in their arguments, in their plans or in the unit's parameters.
    """
    report = _Report(
        arguments=findings.arguments,
        error=findings.errors[0] if findings.errors else None,
        plan_hash=plan.hash() if plan else None,
        unit=tuple(_describe(parameter) for parameter in managed),
    )
    reports = _exchange(mesh, report)
    difference = first_difference([other.arguments for other in reports])
    if difference is not None:  # before what is wrong, which may be a consequence
        raise RuntimeError(_argument_difference(mesh, *difference))
    if report.error is not None:
        raise report.error
    for rank, other in enumerate(reports):
        if other.error is not None:
            raise type(other.error)(f"on rank {_global_rank(mesh, rank)} of the mesh: {other.error}")
    if len({other.plan_hash for other in reports}) > 1:
        assert plan is not None
        _raise_plan_difference(mesh, plan)
    for rank, other in enumerate(reports):
        if other.unit != reports[0].unit:
            raise RuntimeError(_unit_difference(reports[0].unit, other.unit, mesh, rank))


def _argument_difference(mesh: DeviceMesh, rank: int, argument: str, first: str, other: str) -> str:
    return (
        f"ranks {_global_rank(mesh, 0)} and {_global_rank(mesh, rank)} do not call fully_shard alike: {argument} is "
        f"{first} on one, {other} on the other. Every rank must pass the same arguments."
    )


def _describe(managed: ManagedParameter) -> tuple[str, ...]:
    entry = managed.entry
    return (
        managed.name,
        f"role {entry.role.name}",
        f"owner {entry.owner}",
        f"unit {entry.unit!r}",
        f"shape {tuple(managed.parameter.shape)}",
        f"{managed.parameter.dtype}",
        f"requires_grad={managed.parameter.requires_grad}",
    )


def _global_rank(mesh: DeviceMesh, index: int) -> int:
    return int(mesh.mesh.flatten()[index])


def _exchange(mesh: DeviceMesh, mine: _T) -> list[_T]:
    """``mine`` of every rank, in the order of ``mesh.mesh.flatten()``."""
    gathered: dict[int, _T] = {dist.get_rank(): mine}
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        parts = all_gather_object(gathered, group)
        gathered = {rank: value for part in parts for rank, value in part.items()}
    return [gathered[rank] for rank in mesh.mesh.flatten().tolist()]


def _raise_plan_difference(mesh: DeviceMesh, plan: ShardPlan) -> None:
    plans = _exchange(mesh, plan.to_json())
    first = ShardPlan.from_json(plans[0])
    for rank, text in enumerate(plans):
        difference = first.first_difference(ShardPlan.from_json(text))
        if difference is not None:
            raise RuntimeError(
                f"ranks {_global_rank(mesh, 0)} and {_global_rank(mesh, rank)} have different plans: "
                f"{difference}. Every rank must plan the same model for the same mesh with the same options."
            )


def _unit_difference(
    first: tuple[tuple[str, ...], ...], other: tuple[tuple[str, ...], ...], mesh: DeviceMesh, rank: int
) -> str:
    pair = f"ranks {_global_rank(mesh, 0)} and {_global_rank(mesh, rank)} do not shard the same"
    remedy = "Every rank must call fully_shard on the same modules of the same model, in the same order."
    for mine, theirs in zip(first, other, strict=False):
        if mine[0] != theirs[0]:
            return f"{pair}: {mine[0]} on one, {theirs[0]} on the other. {remedy}"
        if mine != theirs:
            differing = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
            here, there = (", ".join(side) for side in zip(*differing, strict=True))
            return f"{pair}: {mine[0]} has {here} on one, {there} on the other. {remedy}"
    extra = max(first, other, key=len)[min(len(first), len(other))]
    return f"{pair}: {extra[0]} is there on one of them only. {remedy}"
