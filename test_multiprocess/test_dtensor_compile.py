"""Owned DTensors under torch.compile(fullgraph=True): the step, forward and backward, and how often it compiles."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

import mfsdp
from mfsdp import OwnerShard, Tail
from test_multiprocess.world import on_ranks


def newton_schulz_step(weight: Any, gradient: Any, momentum: Any, lr: Any) -> None:
    """A Muon step as anybody would write it for one process."""
    momentum.lerp_(gradient, 0.05)
    x = gradient.lerp(momentum, 0.95)
    x = x / (x.norm() + 1e-7)
    for _ in range(2):
        gram = x @ x.mT
        x = 1.5 * x - 0.5 * gram @ x
    weight.sub_(lr * x)


def tensors(seed: int, shape: tuple[int, int] = (6, 8)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(3)]


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_step_over_several_owners(mesh: DeviceMesh, world_size: int, backend: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(newton_schulz_step, fullgraph=True, backend=counter)
    lr = torch.tensor(0.1)
    for number in range(6):
        lr.fill_(0.1 / (number + 1))
        full = tensors(number)
        owned = [mfsdp.distribute_tensor(t, mesh, [OwnerShard(number % world_size)]) for t in full]
        newton_schulz_step(*full, lr)
        step(*owned, lr)
        for value, mine in zip(full, owned, strict=True):
            torch.testing.assert_close(mine.full_tensor(), value, rtol=1e-4, atol=1e-5)
    # once per owner of a shape, not once per matrix or learning rate
    assert counter.frame_count == world_size


@on_ranks(2, timeout=240)
def test_no_arithmetic_in_the_graph_of_a_rank_without_data(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=capture, inference_compiler=capture)
    step = torch.compile(newton_schulz_step, fullgraph=True, backend=backend)
    owned = [mfsdp.distribute_tensor(t, mesh, [OwnerShard(1)]) for t in tensors(0)]
    step(*owned, 0.1)
    (graph,) = graphs
    products = [node for node in graph.graph.nodes if "mm" in str(node.target)]
    assert bool(products) == (dist.get_rank() == 1), graph.code
    assert not [node for node in graph.graph.nodes if "c10d" in str(node.target)]


@on_ranks(2, 3, timeout=240)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_forward_and_backward_with_redistribution(mesh: DeviceMesh, world_size: int, backend: str) -> None:
    """A data-parallel layer whose weight lives on one rank: gathered in forward, its gradient averaged there."""
    torch._dynamo.reset()
    weight, bias, _ = tensors(1)
    rank = dist.get_rank()
    owned = nn.Parameter(mfsdp.distribute_tensor(weight, mesh, [OwnerShard(1)]))
    tail = nn.Parameter(mfsdp.distribute_tensor(bias[0], mesh, [Tail(0)]))

    def gathered(parameter: Any) -> Tensor:
        whole = parameter.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])

    def loss(x: Tensor) -> Tensor:
        return ((x @ gathered(owned) + gathered(tail)).relu() ** 2).mean()

    inputs = [torch.randn(4, 6, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    compiled(inputs[rank]).backward()
    plain = [weight.clone().requires_grad_(), bias[0].clone().requires_grad_()]
    for x in inputs:
        (((x @ plain[0] + plain[1]).relu() ** 2).mean() / world_size).backward()
    for mine, reference in zip((owned, tail), plain, strict=True):
        assert mine.grad is not None
        assert mine.grad.placements == mine.placements  # type: ignore[attr-defined]
        torch.testing.assert_close(mine.grad.full_tensor(), reference.grad, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


@on_ranks(2, timeout=240)
def test_compiled_transitions(mesh: DeviceMesh, world_size: int) -> None:
    full = tensors(2)[0]
    targets = [OwnerShard(0), OwnerShard(1), Tail(1), Replicate(), torch.distributed.tensor.Shard(0)]
    for source in targets:
        placed = distribute_tensor(full.clone(), mesh, [source])
        for target in targets:
            torch._dynamo.reset()
            move = torch.compile(
                lambda t, target=target: (t.redistribute(placements=[target]) * 2).redistribute(
                    placements=[Replicate()]
                ),
                fullgraph=True,
                backend="aot_eager",
                dynamic=False,
            )
            assert torch.equal(move(placed).to_local(), full * 2), (source, target)


@on_ranks(2, timeout=240)
@pytest.mark.parametrize("kind", ["Muon", "AdamW"])
def test_unmodified_optimizers_compile(mesh: DeviceMesh, world_size: int, kind: str) -> None:
    torch._dynamo.reset()
    full = [t for seed in range(2) for t in tensors(seed)]
    single = [nn.Parameter(t.clone()) for t in full]
    owned = [nn.Parameter(mfsdp.distribute_tensor(t, mesh, [OwnerShard(i % world_size)])) for i, t in enumerate(full)]
    make = getattr(torch.optim, kind)
    options: dict[str, Any] = {"foreach": True} if kind == "AdamW" else {}
    reference = make(single, lr=torch.tensor(0.02) if kind == "Muon" else 0.02, **options)
    optimizer = make(owned, lr=torch.tensor(0.02) if kind == "Muon" else 0.02, **options)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(optimizer.step, backend=counter)
    for number in range(3):
        for parameter, mine, gradient in zip(
            single, owned, [g for s in range(2) for g in tensors(10 + s + number)], strict=True
        ):
            parameter.grad = gradient.clone()
            mine.grad = mfsdp.distribute_tensor(gradient, mesh, mine.placements)  # type: ignore[attr-defined]
        reference.step()
        compiled()
    for parameter, mine in zip(single, owned, strict=True):
        torch.testing.assert_close(mine.full_tensor(), parameter.detach(), rtol=2e-2, atol=2e-3)  # type: ignore[attr-defined]
