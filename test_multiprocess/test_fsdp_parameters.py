"""Which parameters a sharded module has and what can be done with them, against a plain model."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
)

from mfsdp.dtensor import local_tensor
from mfsdp.fsdp import fully_shard
from mfsdp.planning import plan
from test_multiprocess.fsdp_cases import (
    Block,
    OnlyOwned,
    TinyLM,
    assert_same,
    average,
    compare,
    groups_of,
    loss_of,
    rank_input,
    same_model,
    shard,
    whole_parameters,
)
from test_multiprocess.world import on_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.first.other = self.first.bias
        self.layers = nn.ModuleList([Block(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.layers[0](self.first(x))) + self.first.other


@on_ranks(2, 3)
def test_tied_parameters_stay_tied(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(Tied)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for _ in range(2):
        assert model.second.weight is model.first.weight
        assert model.first.other is model.first.bias
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2, 3)
def test_state_dicts_come_out_and_go_in(mesh: DeviceMesh, world_size: int, assign: bool) -> None:
    source, model = same_model(seed=1), same_model(seed=2)
    expected = {name: value.detach().clone() for name, value in source.named_parameters()}
    shard(source, mesh)
    shard(model, mesh)
    loss_of(model, 0).backward()  # the root is left resharded only by backward
    model.zero_grad()
    loss_of(source, 0)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    source.reset_iter_state()
    model.load_state_dict(state, assign=assign)
    assert_same(whole_parameters(model), expected, exact=True)
    resident = {group: group._resident.flat.data_ptr() for group in groups_of(model)}
    torch.testing.assert_close(loss_of(model, 1), loss_of(source, 1), atol=0, rtol=0)
    for group in groups_of(model):  # again one segment, the same one
        assert group._resident.flat.data_ptr() == resident[group]
        for slot in group._resident._own.slots:
            assert group.fsdp_params[slot.index].local.data_ptr() == slot.view(group._resident.flat).data_ptr()


@on_ranks(2, 3)
def test_meta_device_then_materialised(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model()
    with torch.device("meta"):
        model, forgotten = TinyLM(), OnlyOwned()
    shard(forgotten, mesh)
    with pytest.raises(RuntimeError, match=r"materialized from meta device.*last.weight"):
        forgotten(rank_input(4))
    shard(model, mesh)
    model.to_empty(device="cpu")
    values = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        local = local_tensor(parameter)
        if local.numel():
            split = values[name].detach() if local.shape == values[name].shape else None
            if split is None:
                split = values[name].detach().chunk(world_size)[mesh.get_local_rank()]
            with torch.no_grad():
                local.copy_(split)
    compare(model, reference, lambda m: loss_of(m, 0), world_size)


@on_ranks(2)
def test_modules_can_be_sharded_together(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    made = plan(model, mesh)
    returned = fully_shard([model.layers[1], model.last], mesh=mesh, plan=made)
    assert returned == [model.layers[1], model.last]
    assert fully_shard(model, mesh=mesh, plan=made) is model
    assert [len(group.modules) for group in groups_of(model)] == [1, 2, 2]
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4).double()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x).double())


@on_ranks(2)
def test_a_unit_may_have_several_dtypes(mesh: DeviceMesh) -> None:
    reference = same_model(Mixed)
    model = copy.deepcopy(reference)
    fully_shard(model, mesh=mesh, plan=plan(model, mesh))
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


@on_ranks(2)
def test_ignored_parameters_are_left_alone(mesh: DeviceMesh) -> None:
    model = same_model(OnlyOwned)
    ignored = set(model.layers[0].up.parameters())
    fully_shard(model, mesh=mesh, plan=plan(model, mesh), ignored_params=ignored)
    assert set(model.layers[0].up.parameters()) == ignored
    model(rank_input(4)).sum().backward()
    local = model.layers[0].up.weight.grad
    assert not torch.equal(average({"": local})[""], local)


@on_ranks(3)
def test_a_mesh_may_list_its_ranks_in_any_order(mesh: DeviceMesh) -> None:
    shuffled = DeviceMesh("cpu", [2, 0, 1])
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    made = shard(model, shuffled)
    for name, parameter in model.named_parameters():
        owner = (2, 0, 1)[made.entries[name].owner]
        assert (local_tensor(parameter).numel() > 0) == (owner == dist.get_rank()), name
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=3)


@on_ranks(2)
def test_offloaded_parameters_train_on_the_cpu(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert {local_tensor(parameter).device.type for parameter in model.parameters()} == {"cpu"}
    compare(model, reference, lambda m: loss_of(m, 0), world_size=2)


@on_ranks(2)
def test_parameters_tied_across_units_are_refused_with_fsdp2s_message(mesh: DeviceMesh) -> None:
    model = same_model(OnlyOwned)
    model.layers[1].up.weight = model.layers[0].up.weight
    shard(model, mesh)
    with pytest.raises(ValueError, match="already managed by another FSDP group"):
        model(rank_input(4))


@on_ranks(2)
def test_a_sharded_model_can_change_its_dtype(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    model(rank_input(4)).sum().backward()  # so that there are full parameters of the old dtype
    model.zero_grad()
    model.double()
    reference.double()
    compare(model, reference, lambda m: m(rank_input(4).double()).sum(), world_size=2)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@on_ranks(2)
def test_a_deep_copy_is_refused_with_fsdp2s_message(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(model)


@on_ranks(2, 3)
def test_initialisation_after_to_empty(mesh: DeviceMesh, world_size: int) -> None:
    with torch.device("meta"):
        model = OnlyOwned()
    shard(model, mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.reset_parameters()
    with torch.no_grad():
        nn.init.constant_(model.last.bias, 3.0)
    values = whole_parameters(model)
    assert torch.equal(values["layers.0.norm.weight"], torch.ones(4))
    assert torch.equal(values["last.bias"], torch.full((2,), 3.0))
    assert 0 < values["layers.0.up.weight"].abs().max() <= 0.5
    expected = OnlyOwned()
    expected.load_state_dict(values)
    compare(model, expected, lambda m: m(rank_input(4)).sum(), world_size)


@on_ranks(2)
def test_names_and_parameters_stay(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    assert isinstance(model, FSDPModule)
    for (name, ours), (expected, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert name == expected
        assert ours.shape == theirs.shape
    before = list(model.parameters())
    loss_of(model, 0).backward()
    assert all(after is parameter for after, parameter in zip(model.parameters(), before, strict=True))
