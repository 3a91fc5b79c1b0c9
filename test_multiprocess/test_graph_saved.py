"""What autograd saves of parameters in graph style, when nothing is compiled, and when they are gathered again."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp import CommCounter
from mfsdp.dtensor import is_local
from test_multiprocess.fsdp_cases import compare, loss_of, rank_input, same_model
from test_multiprocess.graph_cases import shard_graph
from test_multiprocess.world import on_ranks


class Viewing(nn.Module):
    """Backward needs its matrices in another dtype than theirs, conjugated or negated, and not as they are."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("complex", "conjugated", "negated", "bits"):
            setattr(self, name, nn.Parameter(torch.randn(4, 4)))
        self.bits.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(-1, 2, 2))
        for each in (torch.view_as_complex(self.complex.view(4, 2, 2))[1], self._conjugated()):
            pairs = pairs * each
        x = torch.view_as_real(pairs).flatten(1)
        negated = torch.view_as_complex(self.negated.view(4, 2, 2)).conj().imag
        assert negated.is_neg()
        return x @ self.bits.view(torch.complex64).real.repeat(1, 2) * negated.flatten()[:4]

    def _conjugated(self) -> Tensor:
        conjugated = torch.view_as_complex(self.conjugated.view(4, 2, 2))[2].conj()
        assert conjugated.is_conj()
        return conjugated


class Model(nn.Module):
    """Blocks of one class, and a unit around them."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class OnlyViewed(nn.Module):
    """Its matrix is used through a complex view alone: what backward asks for first, and last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(-1, 2, 2))
        return torch.view_as_real(pairs * torch.view_as_complex(self.weight.view(4, 2, 2))[1]).flatten(1)


@pytest.mark.parametrize("block", [OnlyViewed, Viewing])
@on_ranks(2)
def test_views_of_another_dtype_are_gathered_again(mesh: DeviceMesh, block: type[nn.Module]) -> None:
    reference = same_model(lambda: Model(block))
    model = copy.deepcopy(reference)
    made = shard_graph(model, mesh)
    with CommCounter() as comm:
        model(rank_input(4).requires_grad_()).square().sum().backward()
    model.zero_grad()
    compare(model, reference, lambda m: m(rank_input(4)).square().sum(), world_size=2)
    blocks = 4 * sum(entry.numel for entry in made.entries.values() if entry.unit)
    root = 4 * sum(entry.numel for entry in made.entries.values() if not entry.unit)
    assert comm.by_kind["broadcast"].bytes == 2 * blocks + root


@on_ranks(1)
def test_one_rank_alone(mesh: DeviceMesh) -> None:
    for reshard_after_forward in (None, True, False):
        reference = same_model()
        model = copy.deepcopy(reference)
        shard_graph(model, mesh, reshard_after_forward=reshard_after_forward)
        assert all(is_local(parameter) for parameter in model.parameters())
        for step in range(2):
            compare(model, reference, lambda m, step=step: loss_of(m, step), world_size=1)


class SavesOpaque(torch.autograd.Function):
    """``tensor * 2``; it saves another tensor, whatever its layout."""

    @staticmethod
    def forward(ctx, tensor: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(other)
        return tensor * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (other,) = ctx.saved_tensors
        assert other.layout is not torch.strided
        return grad * 2, None


class Mixing(nn.Module):
    """A linear layer whose rows are mixed by a sparse matrix; it saves tensors that have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mixing = torch.eye(len(x)) + torch.ones(len(x), len(x)).triu()
        for layout in (torch.sparse_coo, torch.sparse_csr):
            x = torch.sparse.mm(mixing.to_sparse(layout=layout), self.linear(x))
        return SavesOpaque.apply(x, mixing.to_mkldnn())


@on_ranks(2)
def test_saved_tensors_without_a_storage(mesh: DeviceMesh) -> None:
    reference = same_model(lambda: Model(Mixing))
    model = copy.deepcopy(reference)
    shard_graph(model, mesh)
    compare(model, reference, lambda m: m(rank_input(4)).square().sum(), world_size=2)
