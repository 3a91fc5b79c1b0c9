"""Bad input is refused on every rank, with its own text, before anything is moved."""

import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mfsdp.fsdp import fully_shard
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.planning import ShardPlan, plan
from mfsdp.planning.records import Part
from mfsdp.planning.split import Stack
from test_multiprocess.fsdp_cases import TinyLM, groups_of, loss_of, same_model, shard
from test_multiprocess.world import on_ranks


def refusal(error: type[Exception], model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The text with which ``fully_shard`` refuses, after which nothing may have changed."""
    before = {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(error) as caught:
        fully_shard(*(args or (model,)), **kwargs)
    assert type(caught.value) is error
    assert {name: (id(value), value.data_ptr()) for name, value in model.named_parameters()} == before
    assert [type(module) for module in model.modules()] == classes
    dist.barrier()  # nobody is left behind in a collective
    return str(caught.value)


def expect(actual: str, expected: str) -> None:
    """Every rank has said the same, namely ``expected``; one rank compares, so that one can accept."""
    said = all_gather_object(actual)
    assert said == [actual] * dist.get_world_size()
    if dist.get_rank() == 0:
        assert_expected_inline(textwrap.fill(actual, 100), expected, skip=1)


def only_on(rank: int, change: Callable[[], None]) -> None:
    if dist.get_rank() == rank:
        change()


@on_ranks(2, 3)
def test_an_owner_outside_the_mesh(mesh: DeviceMesh, world_size: int) -> None:
    model = same_model()
    wide = plan(model, 8)
    entries = {name: replace(entry, owner=7 if entry.owner else entry.owner) for name, entry in wide.entries.items()}
    outside = ShardPlan(entries, 8).bind(model)
    object.__setattr__(outside, "world_size", world_size)  # such a plan cannot be made
    text = refusal(ValueError, model, mesh=mesh, plan=outside).replace(f"0 to {world_size - 1}", "0 to W-1")
    expect(
        text,
        """\
layers.0.norm.weight: owner 7 is outside mesh dimension 0, whose coordinates are 0 to W-1. Plan
again with mfsdp.plan(model, mesh).""",
    )


@on_ranks(2)
def test_a_plan_for_another_number_of_ranks(mesh: DeviceMesh) -> None:
    model = same_model()
    expect(
        refusal(ValueError, model, mesh=mesh, plan=plan(model, 3)),
        """\
the plan is for 3 ranks, mesh dimension 0 has 2. Make it with mfsdp.plan(model, mesh) for the mesh
that is passed to fully_shard.""",
    )


@on_ranks(4)
def test_a_plan_for_another_number_of_ranks_on_a_mesh_with_names(mesh: DeviceMesh) -> None:
    model = same_model()
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expect(
        refusal(ValueError, model, mesh=hsdp, plan=plan(model, 4)),
        """\
the plan is for 4 ranks, mesh dimension 1 ('shard') has 2. Make it with mfsdp.plan(model, mesh) for
the mesh that is passed to fully_shard.""",
    )


@on_ranks(2)
def test_a_plan_for_another_model(mesh: DeviceMesh) -> None:
    model = same_model()
    expect(
        refusal(ValueError, model, mesh=mesh, plan=plan(same_model(), mesh)),
        """\
the plan does not know the module's parameter embedding.weight of shape (13, 8) and 21 more. A plan
belongs to the model instance that it was made from: make it from the model that contains this
module, or, if it comes from JSON or from an equal model, bind it with plan.bind(model).""",
    )


@on_ranks(2)
def test_a_plan_made_before_the_model_changed(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    model.layers[1].up.weight = nn.Parameter(torch.ones(2, 2))
    expect(
        refusal(ValueError, model, mesh=mesh, plan=made),
        """\
layers.1.up.weight: the plan describes a parameter of shape (24, 8) and torch.float32, the module's
has shape (2, 2) and torch.float32. Make the plan from this model.""",
    )


@on_ranks(2)
def test_a_parameter_on_another_device(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.norm.weight = nn.Parameter(torch.empty(8, device="cuda"))
    text = refusal_with_fake(model, mesh=mesh, plan=made)
    expect(
        text,
        """\
norm.weight: the parameter is on cuda:0, the mesh is of cpu devices. Move the model with
model.to('cpu') before fully_shard, or build it on the meta device.""",
    )


def refusal_with_fake(model: nn.Module, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        fully_shard(model, **kwargs)
    return str(caught.value)


@on_ranks(2)
def test_an_integer_parameter(mesh: DeviceMesh) -> None:
    model = same_model()
    model.norm.steps = nn.Parameter(torch.tensor([1]), requires_grad=False)
    expect(
        refusal(ValueError, model, mesh=mesh),
        """\
norm.steps: a parameter of dtype torch.int64; fully_shard takes real floating-point parameters only.
Register it as a buffer, convert it, or pass it in ignored_params.""",
    )


@on_ranks(2)
def test_a_complex_parameter(mesh: DeviceMesh) -> None:
    model = same_model()
    model.norm.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    expect(
        refusal(ValueError, model, mesh=mesh),
        """\
norm.phase: a parameter of dtype torch.complex64; fully_shard takes real floating-point parameters
only. Register it as a buffer, convert it, or pass it in ignored_params.""",
    )


@on_ranks(3)
def test_a_fault_of_one_rank_is_raised_by_all(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)

    def change() -> None:
        model.norm.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    only_on(1, change)
    text = refusal(ValueError, model, mesh=mesh, plan=made)
    assert text.startswith("on rank 1 of the mesh: ") == (dist.get_rank() != 1)
    expect(
        text.removeprefix("on rank 1 of the mesh: "),
        """\
norm.phase: a parameter of dtype torch.complex64; fully_shard takes real floating-point parameters
only. Register it as a buffer, convert it, or pass it in ignored_params.""",
    )


@on_ranks(2, 3)
def test_ranks_with_different_plans(mesh: DeviceMesh, world_size: int) -> None:
    model = same_model()
    made = plan(model, mesh)
    if dist.get_rank() == 1:
        entries = dict(made.entries)
        entry = entries["layers.1.up.weight"]
        entries["layers.1.up.weight"] = replace(entry, owner=(entry.owner + 1) % world_size)
        made = ShardPlan(entries, world_size, cost_model=made.cost_model).bind(model)
    text = refusal(RuntimeError, model, mesh=mesh, plan=made)
    expect(
        re.sub(r"owner is \d in one plan and \d", "owner is A in one plan and B", text),
        """\
ranks 0 and 1 have different plans: layers.1.up.weight: owner is A in one plan and B in the other.
Every rank must plan the same model for the same mesh with the same options.""",
    )


@on_ranks(2)
def test_a_plan_on_one_rank_only(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    text = refusal(RuntimeError, model, mesh=mesh, plan=made if dist.get_rank() == 1 else None)
    expect(
        text,
        """\
ranks 0 and 1 do not call fully_shard alike: plan is None on one, a ShardPlan on the other. Every
rank must pass the same arguments.""",
    )


@on_ranks(4)
def test_replicas_with_different_plans(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = same_model()
    made = plan(model, hsdp)
    if dist.get_rank() >= 2:  # one replica agrees with itself
        entries = {
            name: replace(entry, owner=1 - entry.owner) if entry.owner is not None else entry
            for name, entry in made.entries.items()
        }
        made = ShardPlan(entries, 2, 2, cost_model=made.cost_model).bind(model)
    expect(
        refusal(RuntimeError, model, mesh=hsdp, plan=made),
        """\
ranks 0 and 2 have different plans: layers.0.norm.weight: owner is 0 in one plan and 1 in the other.
Every rank must plan the same model for the same mesh with the same options.""",
    )


@on_ranks(2)
def test_ranks_with_different_models(mesh: DeviceMesh) -> None:
    model = same_model(lambda: TinyLM(depth=2 + dist.get_rank()))
    expect(
        refusal(RuntimeError, model, mesh=mesh),
        """\
ranks 0 and 1 do not shard the same: layers.0.norm.weight has owner 1 on one, owner 0 on the other.
Every rank must call fully_shard on the same modules of the same model, in the same order.""",
    )


@on_ranks(2)
def test_ranks_that_shard_different_modules(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    layer = model.layers[dist.get_rank()]
    expect(
        refusal(RuntimeError, model, layer, mesh=mesh, plan=made),
        """\
ranks 0 and 1 do not shard the same: layers.0.norm.weight on one, layers.1.norm.weight on the other.
Every rank must call fully_shard on the same modules of the same model, in the same order.""",
    )


@on_ranks(2)
def test_ranks_that_freeze_different_parameters(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    model.layers[0].up.weight.requires_grad_(dist.get_rank() == 0)
    expect(
        refusal(RuntimeError, model, mesh=mesh, plan=made),
        """\
ranks 0 and 1 do not shard the same: layers.0.up.weight has requires_grad=True on one,
requires_grad=False on the other. Every rank must call fully_shard on the same modules of the same
model, in the same order.""",
    )


@on_ranks(2)
def test_a_module_that_is_sharded_already(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh)
    expect(
        refusal(ValueError, model, mesh=mesh),
        """\
fully_shard was already called on this FSDPTinyLM; it can be called on a module once. Call it on its
blocks first and on the module that contains them last.""",
    )
    expect(
        refusal(ValueError, model, model.layers[0], mesh=mesh),
        """\
fully_shard was already called on this FSDPBlock; it can be called on a module once. Call it on its
blocks first and on the module that contains them last.""",
    )


@on_ranks(2)
def test_parameters_that_are_sharded_already(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    weight = model.norm.weight
    model.norm.weight = nn.Parameter(DTensor.from_local(weight.detach(), mesh, run_check=False))
    with pytest.raises(NotImplementedError) as caught:
        fully_shard(model, mesh=mesh, plan=made)
    expect(
        str(caught.value),
        """\
norm.weight: the parameter is a DTensor with placements (Replicate(),); fully_shard of parameters
that are sharded already is not supported. Call it on plain parameters.""",
    )


@on_ranks(2)
def test_a_parameter_with_several_owners(mesh: DeviceMesh) -> None:
    model = same_model()
    model.experts = nn.Parameter(torch.ones(4, 3, 5))
    entries = dict(plan(model, mesh, splits={"experts": Stack()}).entries)
    parts = (Part(0, 0, 2), Part(1, 2, 4))
    entries["experts"] = replace(entries["experts"], owner=None, parts=parts)
    made = ShardPlan(entries, 2).bind(model)
    expect(
        refusal(NotImplementedError, model, mesh=mesh, plan=made),
        """\
experts: the plan spreads its matrices over the ranks [0, 1]; a parameter with several owners is not
supported. Plan with spread_stacks=False.""",
    )


@on_ranks(2)
def test_a_parameter_that_is_not_contiguous(mesh: DeviceMesh) -> None:
    model = same_model()
    model.layers[0].up.weight = nn.Parameter(torch.ones(8, 24).t())
    expect(
        refusal(NotImplementedError, model, mesh=mesh, plan=plan(model, mesh)),
        """\
layers.0.up.weight: the parameter is not contiguous: shape (24, 8), strides (1, 24). Replace it by
parameter.contiguous() before fully_shard.""",
    )


@pytest.mark.parametrize("option", ["reshard", "placement", "dims"])
@on_ranks(2)
def test_options_that_are_not_supported(mesh: DeviceMesh, option: str) -> None:
    model = same_model()
    made = plan(model, mesh)
    if option == "reshard":
        text = refusal(ValueError, model, mesh=mesh, plan=made, reshard_after_forward=3)
        expect(
            text,
            """\
reshard_after_forward=3 does not divide mesh dimension 0, which has 2 ranks. Use a factor of 2, or
True or False.""",
        )
    elif option == "placement":
        text = refusal(NotImplementedError, model, mesh=mesh, plan=made, shard_placement_fn=lambda p: None)
        expect(
            text,
            """\
shard_placement_fn: where a parameter lives is decided by its role and owner in the plan. Choose
roles with mfsdp.plan(model, mesh, roles=...).""",
        )
    else:
        text = refusal(NotImplementedError, model, mesh=mesh, plan=made, dp_mesh_dims=object())
        expect(
            text,
            """\
dp_mesh_dims: meshes with other than data-parallel dimensions are not supported. Pass the data-
parallel part, for instance mesh['replicate', 'shard'].""",
        )


@on_ranks(4)
def test_meshes_that_are_not_supported(mesh: DeviceMesh) -> None:
    model = same_model()
    unnamed = init_device_mesh("cpu", (2, 2))
    expect(
        refusal(ValueError, model, mesh=unnamed),
        """\
fully_shard needs names for the dimensions of a 2-D mesh, which DeviceMesh((2, 2), 'cpu', stride=(2,
1)) has not. Make it with init_device_mesh(..., mesh_dim_names=('replicate', 'shard')).""",
    )
    deep = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replicate", "shard", "tensor"))
    expect(
        refusal(ValueError, model, mesh=deep),
        """\
fully_shard needs a mesh of 1 dimension, or of 2 (replicate, shard) for HSDP; this one has 3:
DeviceMesh((replicate=2, shard=2, tensor=1), 'cpu', stride=(2, 1, ())). Pass the part of it that is
data parallel, for instance mesh['replicate', 'shard'].""",
    )


@on_ranks(2)
def test_custom_collectives_are_refused(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import ProcessGroupAllocAllGather

    model = same_model()
    shard(model, mesh)
    with pytest.raises(NotImplementedError) as caught:
        model.layers[0].set_custom_all_gather(ProcessGroupAllocAllGather(mesh.get_group()))
    expect(
        str(caught.value),
        """\
ProcessGroupAllocAllGather: owned parameters are gathered by broadcasts and reduced to their owners,
which a custom all-gather or reduce-scatter, or its allocator, cannot replace. Apply it to modules
whose parameters are all ROWS.""",
    )


@on_ranks(2)
def test_a_shard_replaced_by_a_plain_tensor(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh)
    state = {name: value.detach() for name, value in same_model().layers[0].named_parameters()}
    with pytest.raises(TypeError) as caught:
        model.layers[0].load_state_dict(state, assign=True)
    expect(
        str(caught.value),
        """\
layers.0.norm.weight: fully_shard found a Parameter registered where it had put a sharded parameter.
Load a state dict of sharded parameters, or copy into the parameter instead of replacing it.""",
    )


@on_ranks(2)
def test_half_of_a_unit_converted(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh)
    group = next(groups_of(model))
    group.fsdp_params[0].place_local(group.fsdp_params[0].local.double())
    group._mark_repack()
    with pytest.raises(ValueError) as caught:
        loss_of(model, 0)
    expect(
        str(caught.value),
        """\
the parameters of a unit that were sharded in one dtype no longer have one: norm.weight is
torch.float64, norm.bias is torch.float32. Convert the whole module, or none of it.""",
    )
