"""What graph style refuses, on every rank, with its own text, before anything is moved."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

import mfsdp
from mfsdp.fsdp import fully_shard
from mfsdp.fsdp.graph import GraphFSDPModule
from mfsdp.planning import ShardPlan, plan
from test_multiprocess.fsdp_cases import Block, OnlyOwned, TinyLM, compare, rank_input, same_model
from test_multiprocess.graph_cases import WithEncode, shard_graph
from test_multiprocess.test_fsdp_refusals import expect, refusal
from test_multiprocess.world import on_ranks


@on_ranks(2)
def test_a_model_that_hooks_have_sharded(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    fully_shard(model.layers[1], mesh=mesh, plan=made)
    text = refusal(ValueError, model, mesh=mesh, plan=made, style="graph")
    expect(
        text,
        """\
style='graph': 'layers.1' (FSDPBlock) was sharded by hooks already. A model is of one style: call
fully_shard(model, style='graph') once, on the root of a model that is not sharded yet.""",
    )


@on_ranks(2)
def test_hooks_in_a_model_of_graph_style(mesh: DeviceMesh) -> None:
    model = same_model()
    made = shard_graph(model, mesh)
    text = refusal(ValueError, model.layers[0], mesh=mesh, plan=made)
    expect(
        text,
        """\
this GraphFSDPBlock was sharded with style='graph', which covers a model as a whole: call
fully_shard once, on the root, or use style='hooks' for all of its modules.""",
    )


@on_ranks(2)
def test_twice(mesh: DeviceMesh) -> None:
    model = same_model()
    made = shard_graph(model, mesh)
    text = refusal(ValueError, model, mesh=mesh, plan=made, style="graph")
    expect(
        text,
        """\
style='graph': this GraphFSDPTinyLM was sharded already. Call fully_shard(model, style='graph')
once, on the root, and not on its blocks; the units in it are those of the plan.""",
    )


@on_ranks(2)
def test_block_by_block(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    text = refusal(ValueError, model.layers[0], mesh=mesh, plan=made, style="graph")
    expect(
        text,
        """\
style='graph' is called once, on the root of the planned model: the plan has 16 parameters that this
module has not, embedding.weight for instance. Call fully_shard(model, style='graph') on the model
that was planned, and not on its blocks.""",
    )
    blocks = list(model.layers)
    text = refusal(NotImplementedError, model, blocks, mesh=mesh, plan=made, style="graph")
    expect(
        text,
        """\
style='graph' with a list of 3 modules: the units are those of the plan. Call fully_shard once, on
the root; mfsdp.plan(model, mesh, units=...) chooses units.""",
    )


@on_ranks(2)
def test_the_root_after_a_block_without_a_plan(mesh: DeviceMesh) -> None:
    model = same_model()
    fully_shard(model.layers[1], mesh=mesh, style="graph")
    text = refusal(ValueError, model, mesh=mesh, style="graph")
    expect(
        text,
        """\
style='graph': 'layers.1' (GraphFSDPBlock) was sharded already. Call fully_shard(model,
style='graph') once, on the root, and not on its blocks; the units in it are those of the plan.""",
    )


@on_ranks(2)
def test_policies_that_need_hooks(mesh: DeviceMesh) -> None:
    model = same_model()
    made = plan(model, mesh)
    text = refusal(
        NotImplementedError, model, mesh=mesh, plan=made, style="graph", offload_policy=CPUOffloadPolicy(False)
    )
    expect(
        text,
        """CPUOffloadPolicy with style='graph': parameters stay on the device that computes. Use style='hooks'.""",
    )
    text = refusal(NotImplementedError, model, mesh=mesh, plan=made, style="graph", reshard_after_forward=2)
    expect(
        text,
        """\
reshard_after_forward=2 with style='graph': full parameters are gathered again from all ranks, or
kept. Pass True or False, or use style='hooks'.""",
    )


@on_ranks(2)
def test_copying_a_sharded_model(mesh: DeviceMesh) -> None:
    model = same_model()
    shard_graph(model, mesh)
    for copied in (model, model.layers):
        with pytest.raises(NotImplementedError, match=r"^GraphFSDP(TinyLM|Block): .* cannot be copied. Copy the model"):
            copy.deepcopy(copied)


@on_ranks(2)
def test_methods_that_are_not_registered_find_sharded_parameters(mesh: DeviceMesh) -> None:
    model = same_model(WithEncode)
    shard_graph(model, mesh)
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model.encode(rank_input(4))
    with pytest.raises(ValueError, match=r"^GraphFSDPWithEncode has no method 'decode' to register"):
        mfsdp.register_forward_method(model, "decode")


@on_ranks(2)
def test_ranks_that_plan_different_models(mesh: DeviceMesh) -> None:
    model = same_model(lambda: TinyLM(width=8 + 4 * dist.get_rank()))
    text = refusal(RuntimeError, model, mesh=mesh, style="graph")
    expect(
        text,
        """\
ranks 0 and 1 have different plans: embedding.weight: shape is [13, 8] in one plan and [13, 12] in
the other, resident_bytes is 1664 in one plan and 2496 in the other, step_flops is 1456 in one plan
and 2184 in the other. Every rank must plan the same model for the same mesh with the same options.""",
    )


@on_ranks(2)
def test_a_plan_on_one_rank_only(mesh: DeviceMesh) -> None:
    model = same_model()
    entries = {
        name: replace(entry, owner=0 if entry.owner is not None else None)
        for name, entry in plan(model, mesh).entries.items()
    }
    made = ShardPlan(entries, 2).bind(model)
    text = refusal(RuntimeError, model, mesh=mesh, plan=made if dist.get_rank() == 1 else None, style="graph")
    assert text.startswith("ranks 0 and 1 do not call fully_shard alike: plan is ")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 4)])


@on_ranks(2)
def test_modules_that_keep_their_parameters_elsewhere(mesh: DeviceMesh) -> None:
    model = same_model(Recurrent)
    text = refusal(NotImplementedError, model, mesh=mesh, style="graph")
    expect(
        text,
        """\
layers.0.weight_ih_l0: LSTM does something of its own when 'weight_ih_l0' is set, which
style='graph' would pass by. Use style='hooks', or put it in ignored_params.""",
    )


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleList([Block(4)])])


@on_ranks(2)
def test_units_without_a_forward(mesh: DeviceMesh) -> None:
    model = same_model(Container)
    made = plan(model, mesh, units=["layers.0"])
    text = refusal(NotImplementedError, model, mesh=mesh, plan=made, style="graph")
    expect(
        text,
        """\
unit 'layers.0', a ModuleList, has no forward of its class to gather its parameters in. Choose units
that are called, with mfsdp.plan(model, mesh, units=...).""",
    )


@on_ranks(2)
def test_another_style(mesh: DeviceMesh) -> None:
    text = refusal(ValueError, same_model(), mesh=mesh, style="compile")
    expect(
        text,
        """style must be 'hooks' or 'graph', not 'compile'.""",
    )


@on_ranks(2)
def test_only_one_rank_is_wrong(mesh: DeviceMesh) -> None:
    model = same_model()
    if dist.get_rank() == 1:
        model.layers[0].forward = lambda x: x
    with pytest.raises(NotImplementedError, match="has no forward of its class"):
        fully_shard(model, mesh=mesh, plan=plan(model, mesh), style="graph")
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not any(isinstance(module, GraphFSDPModule) for module in model.modules())
    dist.barrier()  # nobody is left behind in a collective


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_differentiating_gradients_of_parameters(mesh: DeviceMesh, reshard_after_forward: bool) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard_graph(model, mesh, reshard_after_forward=reshard_after_forward)
    with pytest.raises(NotImplementedError) as caught:
        torch.autograd.grad(model(rank_input(4)).sum(), list(model.parameters()), create_graph=True)
    expect(
        str(caught.value),
        """\
unit layers.1: create_graph=True for gradients of its parameters. With style='graph' they are
reduced by an operator that cannot be differentiated again. Gradients of activations can be:
torch.autograd.grad(outputs, inputs, create_graph=True) with inputs that are no parameters.""",
    )

    def penalised(module: nn.Module) -> torch.Tensor:
        inputs = rank_input(4).requires_grad_()
        loss = module(inputs).tanh().sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        return loss + gradient.square().sum()

    compare(model, reference, penalised, world_size=2)
