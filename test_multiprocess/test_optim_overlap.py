"""Stepping in backward under fully_shard: the same bits, and gradients that do not pile up."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import local_tensor
from mfsdp.optim import RoutedOptimizer
from mfsdp.optim.spent_gradient import SpentGradient
from test_multiprocess.world import on_ranks

LAYERS = 6


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(LAYERS))
    )
    plan = mfsdp.plan(model, mesh)
    for layer in model:
        mfsdp.fully_shard(layer, mesh=mesh, plan=plan)
    mfsdp.fully_shard(model, mesh=mesh, plan=plan)
    return model


def gradient_bytes(model: nn.Module) -> int:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    grads = [grad for grad in grads if not isinstance(grad, SpentGradient)]  # which takes no memory
    return sum(local.numel() * local.element_size() for local in map(local_tensor, grads))


def train(model: nn.Module, optimizer: RoutedOptimizer, steps: int = 5) -> int:
    """Train; the most gradient bytes that this rank held when a parameter's gradient had just arrived."""
    peak = 0

    def look(param: Tensor) -> None:
        nonlocal peak
        peak = max(peak, gradient_bytes(model))

    hooks = [param.register_post_accumulate_grad_hook(look) for param in model.parameters()]
    for step in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        peak = max(peak, gradient_bytes(model))
        with CommCounter() as comm:
            optimizer.step()
        assert comm.collectives == 0, comm
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return peak


@pytest.mark.parametrize("matrix", ["muon", "soap"])
@on_ranks(2, 3)
def test_same_bits_and_few_gradients(mesh: DeviceMesh, matrix: str) -> None:
    options: dict[str, Any] = {"matrix": matrix, "matrix_kwargs": {"lr": 0.02}}
    ordinary, overlapped = sharded(mesh), sharded(mesh)
    all_gradients = train(ordinary, mfsdp.optim.build_optimizer(ordinary, **options))
    peak = train(overlapped, mfsdp.optim.build_optimizer(overlapped, overlap="backward", **options))
    for (name, a), b in zip(ordinary.named_parameters(), overlapped.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor()), name
    assert all_gradients > 0
    assert peak <= all_gradients * 2 / LAYERS


@on_ranks(2)
def test_clipping_after_steps_in_backward_raises_on_every_rank(mesh: DeviceMesh) -> None:
    model = sharded(mesh)
    optimizer = mfsdp.optim.build_optimizer(model, overlap="backward")
    for _ in range(2):
        model(torch.ones(4, 16)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"the gradient of parameter '.*' has been used and freed"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    model(torch.ones(4, 16)).square().mean().backward()
    with pytest.raises(
        RuntimeError, match=r"second backward since the last|the gradient of .* has been used and freed"
    ):
        model(torch.ones(4, 16)).square().mean().backward()
