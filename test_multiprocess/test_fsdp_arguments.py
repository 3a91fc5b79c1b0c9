"""Ranks that do not call ``fully_shard`` alike are told so, all of them; and what is no argument is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from mfsdp.planning import plan
from test_multiprocess.fsdp_cases import same_model
from test_multiprocess.test_fsdp_refusals import expect, refusal
from test_multiprocess.world import on_ranks

NAMED = "DeviceMesh((shard=3), 'cpu', stride=(1,))"


def ignoring(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    return {"ignored_params": {model.get_parameter("layers.0.up.weight")}}


def with_a_name(model: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (3,), mesh_dim_names=("shard",))}


@pytest.mark.parametrize(
    ("argument", "usual", "other", "change"),
    [
        ("style", "'hooks'", "'graph'", {"style": "graph"}),
        ("style", "'hooks'", "'hoks'", {"style": "hoks"}),
        ("reshard_after_forward", "None", "False", {"reshard_after_forward": False}),
        ("reshard_after_forward", "None", "2", {"reshard_after_forward": 2}),
        ("mp_policy.param_dtype", "None", "torch.float16", {"mp_policy": MixedPrecisionPolicy(torch.float16)}),
        ("mp_policy.reduce_dtype", "None", "torch.float64", {"mp_policy": MixedPrecisionPolicy(None, torch.float64)}),
        (
            "mp_policy.cast_forward_inputs",
            "True",
            "False",
            {"mp_policy": MixedPrecisionPolicy(None, None, None, False)},
        ),
        (
            "offload_policy",
            "OffloadPolicy()",
            "CPUOffloadPolicy(pin_memory=False)",
            {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        ),
        ("plan", "a ShardPlan", "None", {"plan": None}),
        ("ignored_params: layers.0.up.weight", "not in it", "in it", ignoring),
        ("mesh", "DeviceMesh((3,), 'cpu', stride=(1,))", NAMED, with_a_name),
    ],
)
@on_ranks(3)
def test_ranks_with_different_arguments(
    mesh: DeviceMesh, argument: str, usual: str, other: str, change: dict[str, Any] | Callable[..., dict[str, Any]]
) -> None:
    model = same_model()
    arguments: dict[str, Any] = {"mesh": mesh, "plan": plan(model, mesh)}
    changed = change(model, mesh) if callable(change) else change
    if dist.get_rank() == 2:
        arguments |= changed
    text = refusal(RuntimeError, model, **arguments)
    assert text == (
        f"ranks 0 and 2 do not call fully_shard alike: {argument} is {usual} on one, {other} on the other. Every rank "
        "must pass the same arguments."
    )


@on_ranks(3)
def test_the_first_rank_is_the_one_that_differs(mesh: DeviceMesh) -> None:
    expect(
        refusal(RuntimeError, same_model(), mesh=mesh, style="hooks" if dist.get_rank() else "graph"),
        """\
ranks 0 and 1 do not call fully_shard alike: style is 'graph' on one, 'hooks' on the other. Every
rank must pass the same arguments.""",
    )


@on_ranks(2)
def test_replicas_with_different_arguments(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    turned = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for each in (hsdp, turned):
        model = same_model()
        text = refusal(RuntimeError, model, mesh=each, reshard_after_forward=dist.get_rank() == 0)
        expect(
            text,
            """\
ranks 0 and 1 do not call fully_shard alike: reshard_after_forward is True on one, False on the
other. Every rank must pass the same arguments.""",
        )


@on_ranks(2)
def test_a_module_of_one_rank_that_is_none(mesh: DeviceMesh) -> None:
    model = same_model()
    given = "layers" if dist.get_rank() == 1 else model
    text = refusal(TypeError, model, given, mesh=mesh)
    assert text.startswith("on rank 1 of the mesh: ") == (dist.get_rank() != 1)
    expect(
        text.removeprefix("on rank 1 of the mesh: "),
        """fully_shard takes a module, or a list of modules, but was given a str.""",
    )
    expect(
        refusal(TypeError, model, [], mesh=mesh),
        """fully_shard takes a module, or a list of modules, but was given an empty list.""",
    )
    given = model.layers if dist.get_rank() == 1 else model.layers[0]
    text = refusal(ValueError, model, given, mesh=mesh).removeprefix("on rank 1 of the mesh: ")
    assert text.startswith("fully_shard does not support containers that do not implement forward: ModuleList(")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"plan": 3}, "plan must be a ShardPlan, as mfsdp.plan(model, mesh) makes it, or None, but is of type int."),
        (
            {"reshard_after_forward": 1.5},
            "reshard_after_forward must be True, False, a number of ranks, or None, but is of type float.",
        ),
        ({"mp_policy": None}, "mp_policy must be a MixedPrecisionPolicy, but is of type NoneType."),
        ({"offload_policy": object()}, "offload_policy must be an OffloadPolicy, but is of type object."),
        ({"ignored_params": [1]}, "ignored_params must be a set of parameters, or None, but is of type list."),
    ],
)
@on_ranks(2)
def test_arguments_of_another_type(mesh: DeviceMesh, wrong: dict[str, Any], message: str) -> None:
    assert refusal(TypeError, same_model(), **{"mesh": mesh, **wrong}) == message
