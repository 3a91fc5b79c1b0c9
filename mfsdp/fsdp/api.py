"""``fully_shard``: FSDP2's call, with every matrix whole on one rank."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_init import (
    _get_device_from_mesh,
    _get_mesh_info,
    _init_default_mesh,
)
from torch.distributed.utils import _get_root_modules

from mfsdp.fsdp import checks
from mfsdp.fsdp.arguments import Arguments
from mfsdp.fsdp.graph import GraphFSDPModule, GraphOptions, shard_graph
from mfsdp.fsdp.managed import ManagedParameter, commit_loads, find_entries, find_parameters, plan_call, remember_plan
from mfsdp.fsdp.param_group import OwnerParamGroup
from mfsdp.fsdp.post_forward import post_forward_mesh_info
from mfsdp.planning import PlanError, Role, ShardPlan

__all__ = ["fully_shard"]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    plan: ShardPlan | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    style: Literal["hooks"] = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    plan: ShardPlan | None = ...,
    reshard_after_forward: bool | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    style: Literal["graph"],
) -> GraphFSDPModule: ...


@overload
def fully_shard(
    module: list[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    plan: ShardPlan | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: Any = ...,
    style: Literal["hooks"] = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    plan: ShardPlan | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (as in FSDP2)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    style: Literal["hooks", "graph"] = "hooks",
) -> FSDPModule | GraphFSDPModule | list[FSDPModule]:
    """Shard a module's parameters over the mesh: each matrix whole on the rank that owns it.

    The call is that of :func:`torch.distributed.fsdp.fully_shard`, with ``plan`` added: call it on the blocks
    of a model and then on the model. Afterwards a parameter is a DTensor on ``mesh``, on its last dimension

    * ``OwnerShard(owner)`` if its role is ``MATRIX``: the owner holds it whole, the others an empty tensor,
    * ``Tail(owner)`` if its role is ``TAIL``: likewise, packed with its neighbours,
    * ``Shard(0)`` if its role is ``ROWS``: FSDP2 manages it,

    and, on a 2-D mesh (replicate, shard), ``Replicate()`` on the first. Full parameters are gathered before
    forward and backward and freed after; gradients are averaged over all ranks and arrive on the owner. All
    methods of ``FSDPModule`` work as documented there.

    Differences from FSDP2: gradients of all parameters of a unit that ran in backward are reduced, zeros
    standing in where a rank has none (FSDP2's ``set_reduce_scatter_unused_params(True)``); 0-d parameters are
    allowed; parameters must already be on the mesh's device (or on ``meta``). Without mixed precision the owner's
    full parameter *is* its shard, so that an in-place change between ``unshard()`` and ``reshard()`` stays, on the
    owner alone, where FSDP2 discards it on every rank: change sharded parameters, or on all ranks alike.

    Args:
        module: the module, or modules that are gathered together.
        mesh: 1-D, or 2-D (replicate, shard) for HSDP; owners are coordinates on the last dimension. By default
            all ranks.
        plan: who owns what, from ``mfsdp.plan(model, mesh)``. Without one, this call's parameters are planned
            now, continuing from what earlier such calls have put on each rank of the mesh.
        reshard_after_forward: whether to free full parameters after forward; ``None``: in all but the root. An
            int: keep them in groups of that many ranks, each rank some segments, for the gather in backward.
        shard_placement_fn: not supported; roles and owners come from the plan.
        mp_policy: dtypes of computation (``param_dtype``) and of gradient reduction (``reduce_dtype``).
        offload_policy: ``CPUOffloadPolicy()`` keeps sharded parameters and gradients in CPU memory.
        ignored_params: parameters to leave alone.
        dp_mesh_dims: not supported; pass the data-parallel part of the mesh.
        style: ``"hooks"``, as FSDP2, or ``"graph"``: see below.

    With ``style="graph"`` gathers and reductions are operators in the model's own forward and backward, so that
    ``torch.compile(model, fullgraph=True)`` sees and schedules them. It takes one call, on the root of the planned
    model; the units are those of the plan. Uncompiled it gives the same numbers, without overlap.
    ``reshard_after_forward`` is a bool, there is no offloading, and the result is a
    :class:`~mfsdp.fsdp.graph.GraphFSDPModule`, which has none of the methods of an ``FSDPModule``. Methods other than
    ``forward`` are registered with :func:`mfsdp.register_forward_method`. Segments are broadcast on every network;
    between hosts that gloo connects, hooks style has a faster way. Gradients of parameters cannot be differentiated
    again (``create_graph=True``), those of activations can. To compile a model that checkpoints activations,
    set ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint``.

    Returns:
        ``module``, changed in place into an ``FSDPModule`` (or the list of them), or into a ``GraphFSDPModule``.

    Raises:
        ValueError: a parameter, a module, the mesh or the plan does not fit; the message says which and how.
        NotImplementedError: something that FSDP2 can do and this cannot yet.
        TypeError: an argument of another type.
        RuntimeError: ranks disagree on the plan or on the module, or pass different arguments.

        Each is raised on every rank, even if only one has the fault, and before anything is moved.
    """
    mesh = mesh or _init_default_mesh()
    checks.check_mesh(mesh)
    modules = _modules_of(module)
    ignored = set() if ignored_params is None else ignored_params
    call = Arguments(modules, mesh, plan, reshard_after_forward, mp_policy, offload_policy, ignored, style)
    findings = checks.Findings(call.described(), list(call.problems()))
    checks.check_options(mesh, reshard_after_forward, shard_placement_fn, dp_mesh_dims, findings)
    checks.check_modules(module, modules, findings)
    if findings.errors:  # whoever has some raises here, and the others with it
        checks.agree(mesh, None, (), findings)
    if style == "graph":
        options = GraphOptions.of(reshard_after_forward, mp_policy, offload_policy, findings)
        return shard_graph(module, mesh, plan, options, ignored, findings)
    _check_style(modules, findings)
    managed = _plan_and_check(modules, mesh, plan, ignored, findings)
    owned = [parameter for parameter in managed if parameter.entry.role is not Role.ROWS]
    result = torch_fsdp.fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard_after_forward,
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        ignored_params={parameter.parameter for parameter in owned} | ignored,
    )
    reshard = True if reshard_after_forward is None else reshard_after_forward
    _add_owner_groups(modules, owned, mesh, reshard, mp_policy, offload_policy)
    if plan is not None:
        remember_plan(modules, plan)
    return result


def _modules_of(module: Any) -> tuple[nn.Module, ...]:
    """The modules to shard; those that are below another one of a list are sharded with it."""
    if isinstance(module, nn.Module):
        return (module,)
    if not isinstance(module, Sequence):
        return ()
    return tuple(_get_root_modules([each for each in module if isinstance(each, nn.Module)]))


def _check_style(modules: Sequence[nn.Module], findings: checks.Findings) -> None:
    """Refuse hooks in a model of graph style."""
    for module in modules:
        if any(isinstance(each, GraphFSDPModule) for each in module.modules()):
            findings.add(
                ValueError(
                    f"this {type(module).__name__} was sharded with style='graph', which covers a model as a whole: "
                    "call fully_shard once, on the root, or use style='hooks' for all of its modules."
                )
            )


def _plan_and_check(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh,
    plan: ShardPlan | None,
    ignored: set[nn.Parameter],
    findings: checks.Findings,
) -> list[ManagedParameter]:
    """What the plan says about each parameter of this call, if all ranks find nothing wrong with it."""
    checks.check_unsharded(modules, findings)
    found = list(find_parameters(modules, ignored))
    checks.check_dtypes(found, findings)
    managed: list[ManagedParameter] = []
    used = plan
    if used is None and not findings.errors:
        try:
            used = plan_call(found, mesh)
        except PlanError as error:
            findings.add(error)
    if used is not None:
        managed, unknown = find_entries(found, used)
        checks.check_plan(used, mesh, unknown, findings)
        checks.check_parameters(managed, mesh, findings)
    checks.agree(mesh, plan, managed, findings)
    if plan is None and used is not None:
        commit_loads(mesh, used.loads())
    return managed


def _add_owner_groups(
    modules: tuple[nn.Module, ...],
    owned: Iterable[ManagedParameter],
    mesh: DeviceMesh,
    reshard_after_forward: bool | int,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> None:
    """Put the owned parameters under the state that FSDP2 has just made, a group for each dtype."""
    state = torch_fsdp.fully_shard.state(modules[0])  # type: ignore[attr-defined]
    mesh_info = _get_mesh_info(mesh)
    post_forward = post_forward_mesh_info(reshard_after_forward, mesh_info)  # type: ignore[arg-type]
    device = _get_device_from_mesh(mesh)
    by_dtype: dict[torch.dtype, list[ManagedParameter]] = {}
    for parameter in owned:
        by_dtype.setdefault(parameter.parameter.dtype, []).append(parameter)
    for group in by_dtype.values():
        state._fsdp_param_groups.append(
            OwnerParamGroup(group, modules, mesh_info, post_forward, device, mp_policy, offload_policy)  # type: ignore[arg-type]
        )
    for parameter in owned:  # for Dynamo, as FSDP2 marks the modules of its own parameters
        parameter.module._is_fsdp_managed_module = True  # type: ignore[assignment]
        parameter.module._fsdp_use_orig_params = True  # type: ignore[assignment]
