"""build_optimizer on models that are sharded by FSDP2, or not sharded at the moment, and its state across ranks."""

import copy

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

import mfsdp
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.optim import build_optimizer
from test_multiprocess.world import on_ranks


def new_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6)))


@on_ranks(2)
def test_matrices_of_fsdp2_are_not_given_to_adamw(mesh: DeviceMesh) -> None:
    model = new_model()
    torch_fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError) as refused:
        build_optimizer(model)
    assert_expected_inline(
        str(refused.value),
        """\
build_optimizer: no parameter is a matrix that its owner holds whole: parameter '0.weight' of shape (6, 6) is \
Shard(dim=0) on mesh dimension 0. Shard the model with mfsdp.fully_shard, which places matrices as OwnerShard, or \
use AdamW alone.""",
    )
    embedding = nn.Sequential(nn.Embedding(8, 6))
    torch_fully_shard(embedding, mesh=mesh)
    assert list(build_optimizer(embedding).parts) == ["other"]


@on_ranks(2)
def test_after_a_forward_pass_that_left_the_root_unsharded(mesh: DeviceMesh) -> None:
    model, reference = new_model(), new_model()
    for each in (model, reference):
        plan = mfsdp.plan(each, mesh)
        mfsdp.fully_shard(each[2], mesh=mesh, plan=plan)
        mfsdp.fully_shard(each, mesh=mesh, plan=plan)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    expected = build_optimizer(reference)
    with torch.no_grad():
        model(x)
    assert not isinstance(model[0].weight, DTensor)
    optimizer = build_optimizer(model)
    for each, stepped in ((model, optimizer), (reference, expected)):
        assert all(isinstance(param, DTensor) for group in stepped.param_groups for param in group["params"])
        each(x).square().mean().backward()
        stepped.step()
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))


@on_ranks(2)
def test_state_of_another_optimizer_is_refused_on_owners_and_others(mesh: DeviceMesh) -> None:
    model = new_model()
    mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh))
    soap = build_optimizer(model, matrix="soap")
    model(torch.ones(2, 6)).sum().backward()
    soap.step()
    with pytest.raises(
        ValueError, match=r"Muon: the state to be loaded for parameter '0\.weight' has no 'momentum_buffer'"
    ):
        build_optimizer(model).load_state_dict(soap.state_dict())


@pytest.mark.parametrize("matrix", ["muon", "shampoo", "soap"])
@on_ranks(2)
def test_full_state_dicts_continue_bit_for_bit(mesh: DeviceMesh, matrix: str) -> None:
    model = new_model()
    mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh))
    options = StateDictOptions(full_state_dict=True)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    first = build_optimizer(model, matrix=matrix)
    model(x).square().mean().backward()
    first.step()
    first.zero_grad()
    saved = copy.deepcopy(get_optimizer_state_dict(model, first, options=options))
    second = build_optimizer(model, matrix=matrix)
    set_optimizer_state_dict(model, second, saved, options=options)
    before = [local_tensor(param).clone() for param in model.parameters()]
    results = []
    model(x).square().mean().backward()
    grads = [param.grad for param in model.parameters()]
    for optimizer in (first, second):
        with torch.no_grad():
            for param, value, grad in zip(model.parameters(), before, grads, strict=True):
                local_tensor(param).copy_(value)
                param.grad = grad
        optimizer.step()
        results.append([local_tensor(param).clone() for param in model.parameters()])
    for found, expected, old in zip(*results, before, strict=True):
        assert torch.equal(found, expected)
        assert not found.numel() or not torch.equal(found, old)


@pytest.mark.parametrize("matrix", ["muon", "shampoo", "soap"])
@on_ranks(2)
def test_a_step_skipped_for_one_ranks_gradient_changes_nothing_on_any(mesh: DeviceMesh, matrix: str) -> None:
    model = new_model()
    mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh))
    optimizer = build_optimizer(model, matrix=matrix)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    params = dict(model.named_parameters())
    owners = {param.placements[0].owner for param in params.values()}
    assert owners == {0, 1}

    def everything() -> list[torch.Tensor]:
        state = [value for param in params.values() for value in optimizer.state[param].values()]
        return [local_tensor(tensor).clone() for tensor in (*params.values(), *state)]

    def step(bad: str | None) -> bool:
        """One step with a gradient spoiled on its owner alone; whether anything was changed on this rank."""
        before = everything()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 6)).square().mean()).backward()
        if bad is not None and is_local(params[bad]):
            local_tensor(params[bad].grad).view(-1)[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        after = everything()
        return len(after) != len(before) or not all(map(torch.equal, before, after))

    assert not step("0.weight")
    assert not any(optimizer.state.values())  # the first step was skipped: nothing has begun
    assert step(None)
    for bad in params:
        assert not step(bad), bad
    assert scaler.get_scale() == 4.0 * 0.5 ** (1 + len(params))
