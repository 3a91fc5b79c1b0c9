"""Training with owned parameters against DDP and FSDP2 on the same data."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.planning import Role, ShardPlan
from test_multiprocess.fsdp_cases import (
    TinyLM,
    assert_same,
    loss_of,
    mean_over_ranks,
    same_model,
    shard,
    whole_gradients,
    whole_parameters,
)
from test_multiprocess.world import on_ranks

MUON_RATE, ADAMW_RATE = 0.02, 0.003


def matrix_names(plan: ShardPlan) -> set[str]:
    return {name for name, entry in plan.entries.items() if entry.role is Role.MATRIX}


def muon(parameters: list[nn.Parameter], pace: float) -> torch.optim.Optimizer:
    return torch.optim.Muon(parameters, lr=pace * MUON_RATE, weight_decay=0.1)


def adamw(parameters: list[nn.Parameter], pace: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=pace * ADAMW_RATE, weight_decay=0.1, foreach=True)


class FullStep:
    """torch's Muon on matrices and AdamW on the rest, as one has them on a replicated model."""

    def __init__(self, model: nn.Module, matrices: set[str], pace: float = 1.0) -> None:
        named = dict(model.named_parameters())
        self._optimizers = [
            muon([p for n, p in named.items() if n in matrices], pace),
            adamw([p for n, p in named.items() if n not in matrices], pace),
        ]

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


class LocalStep:
    """torch's optimizers on what this rank holds, as plain tensors: independent of how DTensor dispatches."""

    def __init__(self, model: nn.Module, matrices: set[str], pace: float = 1.0) -> None:
        self._pairs = [
            (name, parameter, nn.Parameter(local_tensor(parameter).detach()))
            for name, parameter in model.named_parameters()
            if is_local(parameter)
        ]
        owned = [plain for name, _, plain in self._pairs if name in matrices]
        rest = [plain for name, _, plain in self._pairs if name not in matrices]
        self._optimizers = [adamw(rest, pace)]
        if owned:
            self._optimizers.append(muon(owned, pace))

    def step(self) -> None:
        for _, parameter, plain in self._pairs:
            plain.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        for optimizer in self._optimizers:
            optimizer.step()


def train(model: nn.Module, step: Callable[[], None], steps: int) -> list[float]:
    losses = []
    for number in range(steps):
        loss = loss_of(model, number % 2)
        loss.backward()
        step()
        model.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@pytest.mark.parametrize("stepped", ["local", "DTensor"])
@on_ranks(2)
def test_twenty_steps_are_those_of_ddp_with_full_muon_bit_for_bit(mesh: DeviceMesh, stepped: str) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    matrices = matrix_names(shard(model, mesh))
    theirs = train(DistributedDataParallel(reference), FullStep(reference, matrices).step, steps=20)
    step = {"local": LocalStep, "DTensor": FullStep}[stepped](model, matrices).step
    ours = train(model, step, steps=20)
    assert ours == theirs
    assert theirs[18] < theirs[0] - 0.5  # something was learnt; both are of batch 0
    assert_same(whole_parameters(model), dict(reference.named_parameters()), exact=True)


# With more ranks, sums are taken in another order than DDP's. Muon rounds to bf16, where a difference in the
# last bit of fp32 may now and then become one of bf16: hence small steps, or fp64.
@pytest.mark.parametrize(("dtype", "pace", "tolerance"), [(torch.float32, 0.01, 1e-6), (torch.float64, 1.0, 1e-10)])
@on_ranks(3, 4)
def test_twenty_steps_are_those_of_ddp_with_full_muon(
    mesh: DeviceMesh, world_size: int, dtype: torch.dtype, pace: float, tolerance: float
) -> None:
    reference = same_model().to(dtype)
    model = copy.deepcopy(reference)
    matrices = matrix_names(shard(model, mesh))
    theirs = train(DistributedDataParallel(reference), FullStep(reference, matrices, pace).step, steps=20)
    ours = train(model, LocalStep(model, matrices, pace).step, steps=20)
    assert theirs[18] < theirs[0]
    assert ours == pytest.approx(theirs, rel=tolerance)


@on_ranks(2, 3)
def test_torchs_optimizers_step_what_is_sharded_without_communication(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    matrices = matrix_names(shard(model, mesh))
    theirs = FullStep(reference, matrices, 0.1 if world_size > 2 else 1.0)
    ours = FullStep(model, matrices, 0.1 if world_size > 2 else 1.0)

    def clip_and_step(module: nn.Module, step: FullStep) -> Callable[[], None]:
        def run() -> None:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            norms[step].append(norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item())
            with comm:
                step.step()

        return run

    norms: dict[FullStep, list[float]] = {theirs: [], ours: []}
    comm = CommCounter()
    train(DistributedDataParallel(reference), clip_and_step(reference, theirs), steps=5)
    train(model, clip_and_step(model, ours), steps=5)
    assert comm.collectives == 0, comm
    assert norms[ours] == pytest.approx(norms[theirs], rel=1e-5)
    assert_same(whole_parameters(model), dict(reference.named_parameters()), exact=False, atol=1e-3)


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@on_ranks(2, 3, 4)
def test_gradients_are_those_of_fsdp2(mesh: DeviceMesh, world_size: int, reshard_after_forward: bool | None) -> None:
    model, reference = same_model(), same_model()
    shard(model, mesh, reshard_after_forward=reshard_after_forward)
    shard_by_fsdp2(reference, mesh, reshard_after_forward=reshard_after_forward)
    for step in range(2):  # the second with revived storages
        for module in (model, reference):
            module.zero_grad()
            loss_of(module, step).backward()
        assert_same(whole_gradients(model), whole_gradients(reference), exact=world_size == 2)


def shard_by_fsdp2(model: nn.Module, mesh: DeviceMesh, **options: object) -> None:
    for layer in model.layers:
        torch_fully_shard(layer, mesh=mesh, **options)
    torch_fully_shard(model, mesh=mesh, **options)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
@on_ranks(2, 3)
def test_mixed_precision_is_that_of_fsdp2(mesh: DeviceMesh, world_size: int, reduce_dtype: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, reference = same_model(), same_model()
    shard(model, mesh, mp_policy=policy)
    shard_by_fsdp2(reference, mesh, mp_policy=policy)
    seen: list[torch.dtype] = []
    model.layers[0].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = [loss_of(module, 0) for module in (model, reference)]
    assert seen == [torch.bfloat16]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    ours = whole_gradients(model)
    assert {grad.dtype for grad in ours.values() if grad is not None} == {torch.float32}
    atol = 1e-6 if reduce_dtype else 2e-2
    assert_same(ours, whole_gradients(reference), exact=world_size == 2 and reduce_dtype is not None, atol=atol)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False)])
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes.append(x.dtype)
        return self.layers[0](x.bfloat16())


@pytest.mark.parametrize("cast_forward_inputs", [True, False])
@on_ranks(2)
def test_forward_inputs_and_outputs_are_cast_as_asked(mesh: DeviceMesh, cast_forward_inputs: bool) -> None:
    model = same_model(Scaled)
    shard(
        model,
        mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            output_dtype=torch.float64,
            cast_forward_inputs=cast_forward_inputs,
        ),
    )
    output = model(torch.ones(2, 6))
    assert model.dtypes == [torch.bfloat16 if cast_forward_inputs else torch.float32]
    assert output.dtype == torch.float64


@on_ranks(4)
def test_replicas_average_and_stay_identical(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reference = same_model()
    model = copy.deepcopy(reference)
    matrices = matrix_names(shard(model, hsdp))
    theirs = train(DistributedDataParallel(reference), FullStep(reference, matrices, 0.1).step, steps=5)
    ours = train(model, LocalStep(model, matrices, 0.1).step, steps=5)
    assert ours == pytest.approx(theirs, rel=1e-6)
    for name, value in whole_parameters(model).items():
        copies = [torch.empty_like(value) for _ in range(4)]
        dist.all_gather(copies, value.contiguous())
        assert all(torch.equal(copies[0], other) for other in copies), name


@on_ranks(4)
def test_replicas_can_put_off_their_all_reduce(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = same_model(), same_model()
    shard(model, hsdp)
    shard_by_fsdp2(reference, hsdp)
    for module in (model, reference):
        assert isinstance(module, FSDPModule)
        module.set_requires_all_reduce(False)
        loss_of(module, 0).backward()
        assert module.layers[0].up.weight.grad is None
        module.set_requires_all_reduce(True)
        loss_of(module, 1).backward()
    assert_same(whole_gradients(model), whole_gradients(reference), exact=False)


@on_ranks(1)
def test_one_rank_owns_all(mesh: DeviceMesh) -> None:
    reference = same_model()
    model = copy.deepcopy(reference)
    matrices = matrix_names(shard(model, mesh))
    theirs = train(reference, FullStep(reference, matrices).step, steps=3)
    ours = train(model, LocalStep(model, matrices).step, steps=3)
    assert ours == theirs
    assert_same(whole_parameters(model), dict(reference.named_parameters()), exact=True)


@pytest.mark.parametrize("factor", [1.0, 5.0])
@on_ranks(2)
def test_the_divide_factor_is_the_users(mesh: DeviceMesh, factor: float) -> None:
    model, reference = same_model(), same_model()
    shard(model, mesh)
    shard_by_fsdp2(reference, mesh)
    for module in (model, reference):
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(factor)
                part.set_force_sum_reduction_for_comms(True)
        loss_of(module, 0).backward()
    assert_same(whole_gradients(model), whole_gradients(reference), exact=True)


@on_ranks(2)
def test_without_a_plan_calls_continue_from_each_other(mesh: DeviceMesh) -> None:
    from mfsdp.fsdp import fully_shard

    reference = same_model(lambda: TinyLM(depth=4))
    model = copy.deepcopy(reference)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    owners = [layer.up.weight.placements[0].owner for layer in model.layers]
    owners += [layer.down.weight.placements[0].owner for layer in model.layers]
    assert owners.count(0) == owners.count(1) == 4
    loss_of(model, 0).backward()
    ddp = DistributedDataParallel(reference)  # must outlive the backward
    loss_of(ddp, 0).backward()
    assert_same(whole_gradients(model), {n: p.grad for n, p in reference.named_parameters()}, exact=True)
