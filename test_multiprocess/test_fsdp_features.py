"""What users of FSDP2 rely on, one by one, against a plain or a DDP model on the same data."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import local_tensor
from mfsdp.fsdp import fully_shard
from mfsdp.planning import plan
from test_multiprocess.fsdp_cases import (
    Block,
    TinyLM,
    assert_same,
    groups_of,
    loss_of,
    same_model,
    shard,
    whole_gradients,
    whole_parameters,
)
from test_multiprocess.world import on_ranks


def average(gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """The mean over ranks of a plain model's gradients; where no rank has one, None."""
    averaged: dict[str, Tensor | None] = {}
    for name, grad in gradients.items():
        if grad is not None:
            grad = grad.clone()
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        averaged[name] = grad
    return averaged


def plain_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def compare(
    model: nn.Module,
    reference: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    world_size: int,
    zeros: bool = False,
) -> None:
    """Backward through both; gradients must be equal. ``zeros``: where the reference has none, ours are zero."""
    ours, theirs = loss(model), loss(reference)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    if zeros:
        for parameter in reference.parameters():
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    assert_same(whole_gradients(model), average(plain_gradients(reference)), exact=world_size <= 2)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return self.layers[0](x)


def rank_input(width: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(dist.get_rank()))


@on_ranks(2, 3)
def test_a_module_may_run_several_times_in_a_forward(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(Twice)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for _ in range(2):
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2, 3)
def test_several_forwards_may_come_before_their_backwards(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for module in (model, reference):
        losses = [loss_of(module, step) for step in range(3)]
        for loss in losses:
            loss.backward()
    assert_same(whole_gradients(model), average(plain_gradients(reference)), exact=False)


class Sparse(nn.Module):
    """Modules without parameters, an empty parameter, a 0-d one, and a unit that has nothing but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)])
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.scale * x + self.nothing.sum()


@on_ranks(1, 2, 4)
def test_units_may_have_few_parameters_or_none(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(Sparse)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    compare(model, reference, lambda m: m(rank_input(4)).square().sum(), world_size)
    assert all(group.fsdp_params for group in groups_of(model))


@pytest.mark.parametrize("sync", [True, False])
@on_ranks(2, 3)
def test_gradients_accumulate_once_per_micro_batch(mesh: DeviceMesh, world_size: int, sync: bool) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for step in range(3):
        model.set_requires_gradient_sync(sync or step == 2)
        model.set_is_last_backward(step == 2)
        loss_of(model, step).backward()
        loss_of(reference, step).backward()
        if step < 2 and not sync:
            assert model.layers[0].up.weight.grad is None
    assert_same(whole_gradients(model), average(plain_gradients(reference)), exact=False)


@on_ranks(2)
def test_parameters_can_stay_full_between_micro_batches(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    loss_of(model, 0).backward()
    assert not isinstance(model.layers[0].up.weight, torch.distributed.tensor.DTensor)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    loss_of(model, 1).backward()
    for step in range(2):
        loss_of(reference, step).backward()
    assert_same(whole_gradients(model), average(plain_gradients(reference)), exact=False)


@on_ranks(2)
def test_accumulation_without_sync_is_in_the_reduce_dtype(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    kept = {p.unsharded_accumulated_grad.dtype for group in groups_of(model) for p in group.fsdp_params}
    assert kept == {torch.float32}


@on_ranks(2, 3)
def test_frozen_parameters_get_no_gradient_until_they_train(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model()
    for module in (reference.embedding, reference.layers[0], reference.layers[1].up):
        module.requires_grad_(False)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    compare(model, reference, lambda m: loss_of(m, 0), world_size)
    assert model.layers[1].up.weight.grad is None
    for module in (model, reference):
        module.zero_grad()
        module.layers[1].up.requires_grad_(True)
        module.layers[2].down.requires_grad_(False)
    compare(model, reference, lambda m: loss_of(m, 1), world_size)


class Choosing(nn.Module):
    """Each rank uses other parameters of the unit; ``bypass`` uses none."""

    def __init__(self) -> None:
        super().__init__()
        self.paths = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        return x if rank == 2 else self.paths[rank](x) + self.paths[(rank + 1) % 2](x)


class ChoosingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Choosing(), Block(4), Choosing()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2, 3)
def test_ranks_may_leave_out_different_parameters(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(ChoosingModel)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for _ in range(2):
        compare(model, reference, lambda m: m(rank_input(4)).square().sum(), world_size, zeros=True)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4), Block(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers[0](x)
        return self.layers[1](x), self.layers[2](x)


@on_ranks(2)
def test_a_unit_whose_output_is_not_used_gets_no_gradient(mesh: DeviceMesh) -> None:
    reference = same_model(TwoHeads)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    compare(model, reference, lambda m: m(rank_input(4))[0].sum(), world_size=2)
    assert all(parameter.grad is None for parameter in model.layers[2].parameters())
    for module in (model, reference):
        module.zero_grad()
    compare(model, reference, lambda m: m(rank_input(4))[1].sum(), world_size=2)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["inside", "outside", "wrapper"])
@on_ranks(2, 3)
def test_activation_checkpointing(mesh: DeviceMesh, world_size: int, where: str, reentrant: bool) -> None:
    reference = same_model(Checkpointed)
    model = copy.deepcopy(reference)
    if where == "wrapper":
        for i, layer in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(layer)
    shard(model, mesh)
    if where == "outside":
        model.reentrant = reentrant
    if where == "inside":
        for layer in model.layers:
            inner = layer.forward
            layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
    for _ in range(2):
        ours = model(rank_input(4).requires_grad_()).square().sum()
        theirs = reference(rank_input(4).requires_grad_()).square().sum()
        torch.testing.assert_close(ours, theirs)
        ours.backward()
        theirs.backward()
    renamed = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in whole_gradients(model).items()}
    assert_same(renamed, average(plain_gradients(reference)), exact=False)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4), Block(4)])
        self.reentrant: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_a_first_forward_without_gradients_spoils_nothing(mesh: DeviceMesh, mode: Callable) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    with mode():
        torch.testing.assert_close(model(rank_input(4)), reference(rank_input(4)), atol=0, rtol=0)
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


class OnlyOwned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@on_ranks(2, 3)
def test_unshard_and_reshard_by_hand(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    layer = model.layers[0]
    assert isinstance(layer, FSDPModule)
    for async_op in (False, True):
        handle = layer.unshard(async_op=async_op)
        if handle is not None:
            handle.wait()
        assert torch.equal(layer.up.weight, reference.layers[0].up.weight)
        layer.reshard()
        assert layer.up.weight.numel() == 48
        assert local_tensor(layer.up.weight).numel() in (0, 48)
    layer.unshard(async_op=True)  # waited for by the forward
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size)


@on_ranks(2)
def test_an_exception_in_forward_leaves_the_module_usable(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for where in (model.layers[1].down, model.last):
        handle = where.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a user's fault")))
        with pytest.raises(ValueError, match="a user's fault"):
            model(rank_input(4))
        handle.remove()
        model.reset_iter_state()
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


@on_ranks(2)
def test_an_exception_in_backward_leaves_the_module_usable(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("a user's fault")

    handle = model.layers[0].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="a user's fault"):
        model(rank_input(4)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


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
def test_hooks_after_accumulation_see_the_reduced_gradient(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    seen: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)
    assert len(seen) == len(list(model.parameters()))
    assert all(parameter.grad is not None for parameter in seen)


@on_ranks(2)
def test_ddp_and_fsdp_agree_on_a_plain_step(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    ddp = DistributedDataParallel(reference)  # must outlive the backward
    loss_of(ddp, 0).backward()
    loss_of(model, 0).backward()
    assert_same(whole_gradients(model), plain_gradients(reference), exact=True)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("hsdp", [False, True])
@on_ranks(4)
def test_parameters_can_be_kept_within_groups_until_backward(mesh: DeviceMesh, cast: bool, hsdp: bool) -> None:
    if hsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16 if cast else None, torch.float32)
    model, reference = same_model(), same_model()
    shard(model, mesh, reshard_after_forward=2, mp_policy=policy)
    shard(reference, mesh, reshard_after_forward=True, mp_policy=policy)
    for step in range(2):
        for module in (model, reference):
            loss_of(module, step).backward()
        assert_same(whole_gradients(model), whole_gradients(reference), exact=True)


@on_ranks(4)
def test_what_is_kept_in_a_group_is_one_copy_of_the_unit(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh, reshard_after_forward=2)
    loss = loss_of(model, 0)
    for group in groups_of(model):
        kept = torch.tensor(group._memory.nbytes)
        first = dist.get_rank() // 2 * 2
        owned = sum(4 * segment.numel for segment in group._layout.segments if segment.owner // 2 == first // 2)
        sums = [torch.empty_like(kept) for _ in range(4)]
        dist.all_gather(sums, kept)
        # what owners in the group have is pinned and takes no memory; the rest is kept once
        assert sums[first] + sums[first + 1] == 4 * group._layout.numel - owned
    with CommCounter() as comm:
        loss.backward()
    units = sum(4 * group._layout.numel for group in groups_of(model))
    assert comm.by_kind["broadcast"].bytes == units
    assert sum(group._memory.nbytes for group in groups_of(model)) == 0


@on_ranks(2)
def test_offloaded_parameters_train_on_the_cpu(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert {local_tensor(parameter).device.type for parameter in model.parameters()} == {"cpu"}
    compare(model, reference, lambda m: loss_of(m, 0), world_size=2)


@on_ranks(2)
def test_other_methods_can_be_forwards(mesh: DeviceMesh) -> None:
    reference = same_model(WithEncode)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    register_fsdp_forward_method(model, "encode")
    compare(model, reference, lambda m: m.encode(rank_input(4)).sum(), world_size=2)


class WithEncode(OnlyOwned):
    def encode(self, x: Tensor) -> Tensor:
        return self.last(self.layers[0](x)) * 2


@on_ranks(2)
def test_blocks_can_be_compiled(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        compiled.append(len(list(graph.graph.nodes)))
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    shard(model, mesh)
    for _ in range(2):
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)
        model.zero_grad()
        reference.zero_grad()
    assert compiled


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


class ChunkedLoss(nn.Module):
    """The head is not part of forward: it is called chunk by chunk, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def chunked_loss(model: nn.Module) -> Tensor:
    return sum(model.head(chunk).square().sum() for chunk in model(rank_input(4)).unbind())  # type: ignore[return-value]


@on_ranks(2)
def test_a_group_may_run_in_part_and_its_head_by_chunks(mesh: DeviceMesh) -> None:
    reference = same_model(ChunkedLoss)
    model = copy.deepcopy(reference)
    made = plan(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, plan=made)
    fully_shard([model.norm, model.head], mesh=mesh, plan=made)
    fully_shard(model, mesh=mesh, plan=made)
    for _ in range(2):
        compare(model, reference, chunked_loss, world_size=2)
        model.zero_grad()
        reference.zero_grad()


@on_ranks(2, 3)
def test_reductions_may_have_a_process_group_of_their_own(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    shard(model, mesh)
    model.set_separate_reduce_scatter_group()
    compare(model, reference, lambda m: loss_of(m, 0), world_size)
    assert all(group._reduction_plan().ranks.group is not mesh.get_group() for group in groups_of(model))


@on_ranks(2)
def test_the_all_reduce_hook_sees_what_the_owner_has(mesh: DeviceMesh) -> None:
    model = same_model(OnlyOwned)
    shard(model, mesh)
    loss = lambda: model(rank_input(4)).sum()  # noqa: E731
    loss().backward()
    plain = whole_gradients(model)
    model.zero_grad()
    seen: list[int] = []

    def double(reduced: Tensor) -> None:
        seen.append(reduced.numel())
        reduced.mul_(2)

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(double)
    loss().backward()
    for name, grad in whole_gradients(model).items():
        assert torch.equal(grad, 2 * plain[name]), name
    assert sum(seen) == sum(group._resident.flat.numel() for group in groups_of(model))


@on_ranks(2)
def test_a_unit_that_backward_does_not_need_is_not_gathered_again(mesh: DeviceMesh) -> None:
    reference = same_model(Shifted)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    model.layers[1].set_unshard_in_backward(False)
    loss = model(rank_input(4)).sum()
    with CommCounter() as comm:
        loss.backward()
    needed = [group for group in groups_of(model) if group._module_fqn in ("layers.0", "layers.2")]
    assert comm.by_kind["broadcast"].bytes == sum(4 * group._layout.numel for group in needed)
    reference(rank_input(4)).sum().backward()
    assert_same(whole_gradients(model), average(plain_gradients(reference)), exact=True)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Shift(), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
