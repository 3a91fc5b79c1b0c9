"""What ``fully_shard(style="graph")`` makes of a model's modules: in which order, of which classes, by which plan."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp
from mfsdp.fsdp import plan_of
from mfsdp.fsdp.graph import style
from mfsdp.fsdp.objects import all_gather_object
from test_multiprocess.fsdp_cases import TinyLM, compare, loss_of, rank_input, same_model
from test_multiprocess.graph_cases import WithEncode, shard_graph
from test_multiprocess.world import on_ranks


@on_ranks(3)
def test_units_are_made_in_one_order_on_all_ranks(mesh: DeviceMesh) -> None:
    made: list[str] = []
    make = style.make_graph_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "make_graph_module", lambda module, unit: made.append(unit.name) or make(module, unit))
        shard_graph(same_model(), mesh)
    assert all_gather_object(made) == [["(root)", "layers.0", "layers.1", "layers.2"]] * 3


@on_ranks(2)
def test_a_plan_that_is_made_at_the_call_is_known_and_counts(mesh: DeviceMesh) -> None:
    model = same_model()
    made = mfsdp.plan(model, mesh)
    fresh = init_device_mesh("cpu", (2,), mesh_dim_names=("fresh",))  # nothing was planned for it yet
    mfsdp.fully_shard(model, mesh=fresh, style="graph")
    known = plan_of(model)
    assert known is not None
    assert known.hash() == made.hash()
    more = [nn.Linear(4, 4, bias=False) for _ in range(4)]
    for index, module in enumerate(more):  # each is the least that its rank can have more than the other
        mfsdp.fully_shard(module, mesh=fresh, style="graph" if index % 2 else "hooks")
    first, *rest = (module.weight.placements[0].owner for module in more)
    assert rest == [1 - first, first, 1 - first]


@on_ranks(2)
def test_units_of_one_class_are_of_one_class(mesh: DeviceMesh) -> None:
    models = [same_model(), same_model()]
    for model in models:
        shard_graph(model, mesh)
    assert len({type(layer) for model in models for layer in model.layers}) == 1
    assert type(models[0]) is type(models[1])


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_other_methods_can_be_forwards(mesh: DeviceMesh, compiled: bool) -> None:
    torch._dynamo.reset()
    reference = same_model(WithEncode)
    model = copy.deepcopy(reference)
    shard_graph(model, mesh)
    mfsdp.register_forward_method(model, "encode")
    encode = torch.compile(model.encode, fullgraph=True, backend="aot_eager") if compiled else model.encode
    ours = {model: encode, reference: reference.encode}
    compare(model, reference, lambda m: ours[m](rank_input(4)).sum(), world_size=2)


class WithEmpty(TinyLM):
    """Next to rows of an uneven number it has parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.empty_vector = nn.Parameter(torch.ones(0))
        self.empty_matrix = nn.Parameter(torch.ones(0, 3))
        self.empty_rows = nn.Parameter(torch.ones(3, 0))

    def forward(self, tokens: Tensor) -> Tensor:
        empty = self.empty_vector.sum() + self.empty_matrix.sum() + self.empty_rows.sum()
        return super().forward(tokens) + empty


@on_ranks(2, 3)
def test_parameters_without_elements(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(WithEmpty)
    model = copy.deepcopy(reference)
    shard_graph(model, mesh)
    compare(model, reference, lambda m: loss_of(m, 0), world_size=world_size)
