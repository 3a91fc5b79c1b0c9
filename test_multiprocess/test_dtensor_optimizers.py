"""Any optimizer: unmodified, over a mix of owners, tails and rows, 10 steps, against one process."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import mfsdp
from mfsdp import CommCounter, OwnerShard, Tail
from test_multiprocess.world import on_ranks

SHAPES = [(6, 4), (4, 6), (5,), (3, 3), (8, 2)]
STEPS = 10


def places(world_size: int) -> list[Placement]:
    return [OwnerShard(0), OwnerShard(1), Tail(world_size - 1), Tail(0), Shard(0)]


def weights(matrices_only: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in SHAPES if len(shape) == 2 or not matrices_only]


def gradients(parameters: list[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) for p in parameters]


def place(full: list[Tensor], mesh: DeviceMesh, world_size: int, owned_only: bool = False) -> list[nn.Parameter]:
    chosen = [p for p, shape in zip(places(world_size), SHAPES, strict=True) if len(full) == 5 or len(shape) == 2]
    if owned_only:
        chosen = [OwnerShard(index % world_size) for index in range(len(full))]
    return [nn.Parameter(distribute_tensor(t.clone(), mesh, [p])) for t, p in zip(full, chosen, strict=True)]


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def compare(make: Make, mesh: DeviceMesh, world_size: int, *, exact: bool = True, may_communicate: bool = False,
            matrices_only: bool = False, owned_only: bool = False) -> None:  # fmt: skip
    full = weights(matrices_only)
    single = [nn.Parameter(t.clone()) for t in full]
    placed = place(full, mesh, world_size, owned_only)
    reference, optimizer = make(single), make(placed)
    for step in range(STEPS):
        for parameter, mine, gradient in zip(single, placed, gradients(full, step), strict=True):
            parameter.grad = gradient.clone()
            mine.grad = distribute_tensor(gradient.clone(), mesh, mine.placements)  # type: ignore[attr-defined]
        reference.step()
        with CommCounter() as comm:
            optimizer.step()
        assert may_communicate or comm.collectives == 0, comm
    for parameter, mine in zip(single, placed, strict=True):
        value = mine.full_tensor()  # type: ignore[attr-defined]
        if exact:
            assert torch.equal(value, parameter), (value - parameter).abs().max()
        else:
            torch.testing.assert_close(value, parameter, rtol=1e-5, atol=1e-6)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.1}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.1}),
}


@on_ranks(2, 3)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_elementwise_optimizers(mesh: DeviceMesh, world_size: int, name: str, foreach: bool) -> None:
    kind, options = KINDS[name]
    if name == "Rprop" and not foreach:
        # its loop assigns through a mask, which DTensor refuses for Shard(0); owned parameters take it
        compare(lambda p: kind(p, foreach=False, **options), mesh, world_size, owned_only=True)
        with pytest.raises(RuntimeError, match=r"index_put_.*Shard\(dim=0\)"):
            compare(lambda p: kind(p, foreach=False, **options), mesh, world_size)
        return
    # torch has no _foreach_copy_ for Shard(0), which Rprop needs
    compare(lambda p: kind(p, foreach=foreach, **options), mesh, world_size, owned_only=name == "Rprop")


@on_ranks(2, 3)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers(mesh: DeviceMesh, world_size: int, name: str) -> None:
    kind, options = KINDS[name]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, fused=True, **options)

    compare(make, mesh, world_size, owned_only=True)
    if name in ("Adam", "AdamW"):  # torch has no fused SGD and Adagrad for Shard(0); slices round differently
        compare(make, mesh, world_size, exact=False)


@on_ranks(2, 3)
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon(mesh: DeviceMesh, world_size: int, adjust: str) -> None:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Muon(parameters, lr=0.02, adjust_lr_fn=adjust)

    compare(make, mesh, world_size, matrices_only=True, owned_only=True)


@on_ranks(2)
@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_may_communicate(mesh: DeviceMesh, world_size: int, foreach: bool) -> None:
    """It reads a norm into Python, so every rank must learn it (R2)."""
    compare(
        lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=foreach),
        mesh, world_size, exact=False, may_communicate=True, owned_only=True,
    )  # fmt: skip


@on_ranks(2)
def test_lbfgs_may_communicate(mesh: DeviceMesh, world_size: int) -> None:
    target = weights()
    single = [nn.Parameter(torch.zeros_like(t)) for t in target]
    placed = place([torch.zeros_like(t) for t in target], mesh, world_size, owned_only=True)
    goals = [distribute_tensor(t, mesh, p.placements) for t, p in zip(target, placed, strict=True)]  # type: ignore[attr-defined]

    def run(parameters: list[nn.Parameter], goals: list[Tensor]) -> None:
        optimizer = torch.optim.LBFGS(parameters, lr=0.5, max_iter=4)

        def closure() -> Any:
            optimizer.zero_grad()
            losses = [
                ((p - g) ** 2 * (index + 1)).sum() for index, (p, g) in enumerate(zip(parameters, goals, strict=True))
            ]
            total = sum(losses)
            total.backward()
            return total

        for _ in range(3):
            optimizer.step(closure)

    run(single, target)
    run(placed, goals)
    for parameter, mine in zip(single, placed, strict=True):
        torch.testing.assert_close(mine.full_tensor(), parameter.detach(), rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


class TenLineShampoo(torch.optim.Optimizer):
    """Shampoo's formula, written as if there were one process: L^(-1/4) G R^(-1/4)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["left"], state["right"] = torch.zeros_like(p @ p.mT), torch.zeros_like(p.mT @ p)
                state["left"].add_(p.grad @ p.grad.mT)
                state["right"].add_(p.grad.mT @ p.grad)
                roots = []
                for factor in (state["left"], state["right"]):
                    values, vectors = torch.linalg.eigh(factor)
                    roots.append(vectors @ torch.diag((values.clamp(min=0) + 1e-3).pow(-0.25)) @ vectors.mT)
                p.sub_(roots[0] @ p.grad @ roots[1], alpha=group["lr"])


@on_ranks(2, 3)
def test_a_shampoo_written_for_one_process(mesh: DeviceMesh, world_size: int) -> None:
    compare(TenLineShampoo, mesh, world_size, matrices_only=True, owned_only=True)


@on_ranks(2)
@pytest.mark.parametrize("foreach", [False, True])
def test_schedulers_tensor_lr_and_state_dict(mesh: DeviceMesh, world_size: int, foreach: bool) -> None:
    lr = 0.1 if foreach else torch.tensor(0.1)  # torch takes a tensor with foreach only on accelerators
    full = weights()
    single, placed = [nn.Parameter(t.clone()) for t in full], place(full, mesh, world_size)

    def make(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, lr=copy.copy(lr), foreach=foreach)

    reference, optimizer = make(single), make(placed)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in (reference, optimizer)]
    for step in range(6):
        for parameter, mine, gradient in zip(single, placed, gradients(full, step), strict=True):
            parameter.grad = gradient.clone()
            mine.grad = distribute_tensor(gradient.clone(), mesh, mine.placements)  # type: ignore[attr-defined]
        reference.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        if step == 2:  # into a fresh optimizer and on
            saved = optimizer.state_dict()
            optimizer = make(placed)
            optimizer.load_state_dict(saved)
            schedules[1] = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5, last_epoch=2)
            optimizer.param_groups[0]["lr"] = reference.param_groups[0]["lr"]
    for parameter, mine in zip(single, placed, strict=True):
        torch.testing.assert_close(mine.full_tensor(), parameter.detach())  # type: ignore[attr-defined]
        state = optimizer.state[mine]
        assert state["exp_avg"].placements == mine.placements  # type: ignore[attr-defined]


@on_ranks(4)
def test_optimizers_on_meshes_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = weights(matrices_only=True)
    layouts: list[list[Placement]] = [
        [Replicate(), OwnerShard(1)],
        [OwnerShard(1), OwnerShard(0)],
        [OwnerShard(1), Shard(0)],
        [OwnerShard(0), Shard(1)],
    ]
    kinds: list[tuple[Make, bool]] = [
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), True),
        (lambda p: torch.optim.Muon(p, lr=0.02), False),
    ]
    for make, elementwise in kinds:
        single = [nn.Parameter(t.clone()) for t in full]
        placed = [nn.Parameter(mfsdp.distribute_tensor(t, mesh, p)) for t, p in zip(full, layouts, strict=True)]
        reference, optimizer = make(single), make(placed)
        for step in range(3):
            for parameter, mine, gradient in zip(single, placed, gradients(full, step), strict=True):
                parameter.grad = gradient.clone()
                mine.grad = mfsdp.distribute_tensor(gradient, mesh, mine.placements)  # type: ignore[attr-defined]
            reference.step()
            with CommCounter() as comm:
                optimizer.step()
            # a matrix that TP shards as well is orthogonalised by the TP group of its owner
            assert comm.collectives == 0 or not elementwise, comm
        for parameter, mine in zip(single, placed, strict=True):
            value = mine.full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(value, parameter.detach(), rtol=2e-2, atol=2e-3)  # bf16 sums over TP


# Clipping #


def clip_setup(mesh: DeviceMesh, world_size: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    full = weights()
    mix = [OwnerShard(0), OwnerShard(1), Tail(world_size - 1), Replicate(), Shard(0)]
    single = [nn.Parameter(t.clone()) for t in full]
    placed = [nn.Parameter(distribute_tensor(t.clone(), mesh, [p])) for t, p in zip(full, mix, strict=True)]
    for parameter, mine, gradient in zip(single, placed, gradients(full, 0), strict=True):
        parameter.grad = gradient.clone()
        mine.grad = distribute_tensor(gradient.clone(), mesh, mine.placements)  # type: ignore[attr-defined]
    return single, placed


@on_ranks(2, 3)
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.5])
def test_clip_grad_norm(mesh: DeviceMesh, world_size: int, norm_type: float, foreach: bool) -> None:
    single, placed = clip_setup(mesh, world_size)
    expected = torch.nn.utils.clip_grad_norm_(single, 0.5, norm_type, foreach=foreach)
    with CommCounter() as comm:
        norm = torch.nn.utils.clip_grad_norm_(placed, 0.5, norm_type, foreach=foreach)
    assert comm.collectives <= 2, comm
    assert isinstance(norm, DTensor)
    torch.testing.assert_close(norm.full_tensor(), expected)
    for parameter, mine in zip(single, placed, strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), parameter.grad)  # type: ignore[union-attr]
        assert mine.grad.placements == mine.placements  # type: ignore[union-attr, attr-defined]


@on_ranks(2, 3)
def test_clipping_many_tensors_costs_no_more_collectives(mesh: DeviceMesh, world_size: int) -> None:
    full = [torch.randn(4, 3) for _ in range(20)]
    for mix in ([OwnerShard(0), OwnerShard(1)], [OwnerShard(0), Tail(1), Shard(0)]):
        grads = [distribute_tensor(t, mesh, [mix[index % len(mix)]]) for index, t in enumerate(full)]
        for foreach in (False, True):
            with CommCounter() as comm:
                norm = torch.nn.utils.get_total_norm(grads, foreach=foreach)
            assert comm.collectives <= 2, comm
            torch.testing.assert_close(norm.full_tensor(), torch.nn.utils.get_total_norm(full))  # type: ignore[attr-defined]


@on_ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_with_tensor_parallelism_costs_no_more_collectives_for_more_tensors(norm_type: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    mixes: list[list[list[Placement]]] = [
        [[Shard(0), OwnerShard(1)], [Shard(0), OwnerShard(0)]],
        [[Shard(0), OwnerShard(1)], [OwnerShard(1), Shard(0)], [Replicate(), OwnerShard(0)]],
    ]
    full = [torch.randn(8, 5) for _ in range(12)]
    for mix in mixes:
        calls = []
        for number in (6, 12):
            grads = [distribute_tensor(t, mesh, mix[i % len(mix)]) for i, t in enumerate(full[:number])]
            expected = torch.nn.utils.get_total_norm([t.full_tensor() for t in grads], norm_type)
            with CommCounter() as comm:
                norm = torch.nn.utils.get_total_norm(grads, norm_type).full_tensor()  # type: ignore[attr-defined]
            torch.testing.assert_close(norm, expected)
            calls.append(comm.collectives)
        assert calls[0] == calls[1] <= 6


@on_ranks(2)
def test_other_clipping(mesh: DeviceMesh, world_size: int) -> None:
    for foreach in (False, True):
        single, placed = clip_setup(mesh, world_size)
        torch.nn.utils.clip_grad_value_(single, 0.3, foreach=foreach)
        with CommCounter() as comm:
            torch.nn.utils.clip_grad_value_(placed, 0.3, foreach=foreach)
        assert comm.collectives == 0
        for parameter, mine in zip(single, placed, strict=True):
            assert torch.equal(mine.grad.full_tensor(), parameter.grad)  # type: ignore[union-attr]
    single, placed = clip_setup(mesh, world_size)
    placed[0].grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="non-finite"):
        torch.nn.utils.clip_grad_norm_(placed, 1.0, error_if_nonfinite=True)


@on_ranks(4)
def test_replicas_are_not_counted_twice() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = weights()
    mix = [OwnerShard(0), OwnerShard(1), Tail(1), Replicate(), Shard(0)]
    for norm_type in (2.0, float("inf")):
        placed = [
            nn.Parameter(distribute_tensor(t.clone(), mesh, [Replicate(), p])) for t, p in zip(full, mix, strict=True)
        ]
        for mine, gradient in zip(placed, gradients(full, 0), strict=True):
            mine.grad = distribute_tensor(gradient.clone(), mesh, mine.placements)  # type: ignore[attr-defined]
        with CommCounter() as comm:
            norm = torch.nn.utils.clip_grad_norm_(placed, 0.5, norm_type)
        assert comm.collectives <= 2
        torch.testing.assert_close(
            norm.full_tensor(),
            torch.nn.utils.get_total_norm(gradients(full, 0), norm_type),  # type: ignore[attr-defined]
        )


@on_ranks(2)
def test_grad_scaler(mesh: DeviceMesh, world_size: int) -> None:
    """Unscaling is owner-local; a non-finite gradient of one owner makes every rank skip the step."""
    _, placed = clip_setup(mesh, world_size)
    owned = [p for p in placed if isinstance(p.placements[0], OwnerShard | Tail)]  # type: ignore[attr-defined]
    for bad in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(owned, lr=1.0)
        before = [p.full_tensor().clone() for p in owned]  # type: ignore[attr-defined]
        grads = [p.grad.full_tensor().clone() for p in owned]  # type: ignore[union-attr]
        scaler.scale(torch.zeros(()))
        if bad:
            owned[0].grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        for parameter, value, gradient in zip(owned, before, grads, strict=True):
            expected = value if bad else value - gradient / 4
            torch.testing.assert_close(parameter.full_tensor(), expected)  # type: ignore[attr-defined]
        assert scaler.get_scale() == (2.0 if bad else 4.0)


@on_ranks(2)
def test_partial_gradients_reach_owned_parameters(mesh: DeviceMesh, world_size: int) -> None:
    """A gradient that nobody has reduced yet is reduced to the owner by the step (R2, in-place ops)."""
    full = torch.ones(4, 3)
    parameter = nn.Parameter(mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)]))
    gradient = DTensor.from_local(torch.full((4, 3), 0.5), mesh, [Partial()], run_check=False)
    with torch.no_grad():
        parameter.add_(gradient, alpha=-1.0)
    assert torch.equal(parameter.full_tensor(), full - 0.5 * world_size)
