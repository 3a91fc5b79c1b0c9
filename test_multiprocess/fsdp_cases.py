"""What the tests of the runtime share: small models, batches, and ways to look at a sharded model as a whole."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp.dtensor import is_local, local_tensor
from mfsdp.fsdp import fully_shard
from mfsdp.placements import is_owner
from mfsdp.planning import ShardPlan, plan

VOCABULARY = 13


class Block(nn.Module):
    """A residual MLP block: two matrices, four tails."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class TinyLM(nn.Module):
    """Embedding, blocks, norm, head: parameters of all three roles."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def same_model(make: Callable[[], nn.Module] = TinyLM, seed: int = 0) -> nn.Module:
    """``make()``, with the same values on every rank and every call."""
    torch.manual_seed(seed)
    return make()


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> ShardPlan:
    """``fully_shard`` on each of ``model.layers`` and then on ``model``; the plan is returned."""
    made = plan(model, mesh)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, plan=made, **options)
    fully_shard(model, mesh=mesh, plan=made, **options)
    return made


def batch(step: int, rank: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens and targets of this rank in ``step``: each target follows from its token, so it can be learnt."""
    seed = 1000 * step + (dist.get_rank() if rank is None else rank)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(seed))
    return tokens, (5 * tokens + 2) % VOCABULARY


def loss_of(model: nn.Module, step: int) -> Tensor:
    """The loss of this rank's batch."""
    tokens, targets = batch(step)
    logits = model(tokens).flatten(0, 1)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return nn.functional.cross_entropy(logits, targets.flatten())


def mean_over_ranks(loss: Tensor) -> float:
    """The average of ``loss`` over all ranks."""
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor's full value on every rank, without relying on how DTensor redistributes owned tensors."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not any(is_owner(placement) for placement in tensor.placements):
        return tensor.full_tensor().detach()
    mesh, placement = tensor.device_mesh, tensor.placements[-1]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert is_owner(placement)
    value = local_tensor(tensor).detach().clone() if is_local(tensor) else torch.empty(tensor.shape)
    value = value.to(tensor.dtype)
    source = int(mesh.mesh[(*coordinate[:-1], placement.owner)])
    dist.broadcast(value, src=source, group=mesh.get_group(mesh.ndim - 1))
    return value


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter as a whole, on every rank."""
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def whole_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Every gradient as a whole, on every rank; None where there is none."""
    return {
        name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in model.named_parameters()
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], exact: bool, atol: float = 1e-6) -> None:
    """Equal keys and values: bit for bit, or close."""
    assert list(ours) == list(theirs)
    for name, mine in ours.items():
        if mine is None or theirs[name] is None:
            assert mine is theirs[name], f"{name}: {mine} against {theirs[name]}"
        elif exact:
            assert torch.equal(mine, theirs[name]), f"{name}: {(mine - theirs[name]).abs().max()} apart"
        else:
            torch.testing.assert_close(mine, theirs[name], atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def groups_of(model: nn.Module) -> Iterator[Any]:
    """The owner groups of a sharded model."""
    from mfsdp.fsdp.param_group import OwnerParamGroup

    for module in model.modules():
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                if isinstance(group, OwnerParamGroup):
                    yield group


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


def rank_input(width: int) -> Tensor:
    return torch.randn(3, width, generator=torch.Generator().manual_seed(dist.get_rank()))


class OnlyOwned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
