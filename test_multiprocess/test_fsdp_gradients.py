"""What backward leaves in ``.grad``, against a plain or a DDP model on the same data."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mfsdp.comm_counter import CommCounter
from test_multiprocess.fsdp_cases import (
    Block,
    OnlyOwned,
    assert_same,
    average,
    compare,
    groups_of,
    loss_of,
    plain_gradients,
    rank_input,
    same_model,
    shard,
    whole_gradients,
)
from test_multiprocess.world import on_ranks


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        return self.layers[0](x)


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
