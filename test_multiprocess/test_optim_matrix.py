"""Every matrix optimizer on owned parameters is what it is on plain tensors, without a collective."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.optim import SOAP, Muon, QKClip, Shampoo
from mfsdp.planning.split import EqualBlocks, Stack
from test_multiprocess.world import on_ranks

SHAPES = [(8, 8), (12, 4), (4, 12), (8, 8), (6, 6)]

OPTIMIZERS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "muon": (Muon, {"lr": 0.02}),
    # in fp32: a rank's batches are parts of the whole list's, and are rounded in another way
    "muon in batches": (Muon, {"batched": True, "ns_dtype": torch.float32}),
    "normuon": (Muon, {"second_moment": 0.9, "adjust_lr": "match_rms_adamw", "cautious": True}),
    "muon of blocks": (Muon, {"split": EqualBlocks(2)}),
    "shampoo": (Shampoo, {"precondition_frequency": 2}),
    "soap": (SOAP, {"precondition_frequency": 2}),
    "soap of blocks": (SOAP, {"precondition_frequency": 2, "split": EqualBlocks(2, dim=1)}),
}


def owned(full: Tensor, mesh: DeviceMesh, owner: int) -> DTensor:
    return mfsdp.distribute_tensor(full.clone(), mesh, [mfsdp.OwnerShard(owner)], src_data_rank=None)


def tensors(shapes: list[tuple[int, ...]], seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class Pair:
    """The same parameters, owned and plain, each with an optimizer of its own."""

    def __init__(self, mesh: DeviceMesh, make: Callable[[Any], Any], shapes: list[tuple[int, ...]], dtype: torch.dtype):
        self.mesh, self.shapes, self.dtype = mesh, shapes, dtype
        full = tensors(shapes, 0, dtype)
        self.owned = [nn.Parameter(owned(t, mesh, i % mesh.size())) for i, t in enumerate(full)]
        self.plain = [nn.Parameter(t.clone()) for t in full]
        self.optimizer, self.reference = make(self.owned), make(self.plain)

    def step(self, number: int, spoil: Callable[[int, Tensor], Tensor] = lambda index, grad: grad) -> CommCounter:
        """One step of both, with gradients that ``spoil`` may change; what that of the owned ones communicated."""
        grads = [spoil(index, t) for index, t in enumerate(tensors(self.shapes, number + 1, self.dtype))]
        for index, (param, plain, grad) in enumerate(zip(self.owned, self.plain, grads, strict=True)):
            param.grad, plain.grad = owned(grad, self.mesh, index % self.mesh.size()), grad
        with CommCounter() as comm:
            self.optimizer.step()
        self.reference.step()
        return comm

    def assert_equal(self) -> None:
        for param, plain in zip(self.owned, self.plain, strict=True):
            if is_local(param):
                tolerance = {"rtol": 1e-5, "atol": 1e-6} if self.dtype is torch.float32 else {}
                torch.testing.assert_close(local_tensor(param), plain.detach(), equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@on_ranks(2, 4)
def test_as_on_plain_tensors(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    pair = Pair(mesh, lambda params: optimizer_class(params, **options), SHAPES, dtype)
    for number in range(20):
        comm = pair.step(number)
        assert (comm.collectives, comm.bytes) == (0, 0), comm
    pair.assert_equal()


@pytest.mark.parametrize("name", ["muon in batches", "normuon", "shampoo", "soap"])
@on_ranks(2)
def test_odd_matrices_and_gradients_are_as_on_plain_tensors(mesh: DeviceMesh, name: str) -> None:
    """Rows, columns, empty ones, a gradient of zeros and one with NaN, which spoils its own matrix alone."""
    optimizer_class, options = OPTIMIZERS[name]
    shapes: list[tuple[int, ...]] = [(4, 4), (4, 4), (4, 4), (4, 4), (1, 5), (5, 1), (1, 1), (0, 4), (4, 0)]
    pair = Pair(mesh, lambda params: optimizer_class(params, weight_decay=0.0, **options), shapes, torch.float32)

    def spoil(index: int, grad: Tensor) -> Tensor:
        return grad * {0: 0.0, 1: float("nan")}.get(index, 1.0)

    zero = pair.plain[0].detach().clone()
    for number in range(3):
        comm = pair.step(number, spoil)
        assert (comm.collectives, comm.bytes) == (0, 0), comm
    pair.assert_equal()
    assert torch.equal(pair.plain[0], zero)
    assert [bool(param.isfinite().all()) for param in pair.plain] == [index != 1 for index in range(len(shapes))]
    assert not torch.equal(pair.plain[2], tensors(shapes, 0, torch.float32)[2])


@pytest.mark.parametrize("name", ["normuon", "shampoo", "soap"])
@on_ranks(2, 3)
def test_state_is_alike_on_every_rank_and_resumes(mesh: DeviceMesh, world_size: int, name: str) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    pair = Pair(mesh, lambda params: optimizer_class(params, **options), SHAPES, torch.float32)
    for number in range(3):
        pair.step(number)

    described = {
        (index, key): (tuple(value.shape), str(value.dtype))
        for index, state in pair.optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }
    seen = all_gather_object(described)
    assert all(other == seen[0] for other in seen)
    for param in pair.owned:
        for key, value in pair.optimizer.state[param].items():
            if key != "step":
                assert value.placements == param.placements

    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.optimizer = optimizer_class(pair.owned, **options)
    pair.optimizer.load_state_dict(saved)
    for number in range(3, 6):
        pair.step(number)
    pair.assert_equal()


@on_ranks(2, 4)
def test_muon_is_bit_equal_to_plain_torch(mesh: DeviceMesh) -> None:
    pair = Pair(mesh, Muon, SHAPES, torch.float32)
    pair.reference = torch.optim.Muon(pair.plain)
    for number in range(20):
        assert pair.step(number).collectives == 0
    for param, plain in zip(pair.owned, pair.plain, strict=True):
        assert not is_local(param) or torch.equal(local_tensor(param), plain)


@on_ranks(2)
def test_stacks_of_experts(mesh: DeviceMesh) -> None:
    shapes: list[tuple[int, ...]] = [(3, 4, 6), (3, 6, 4)]
    pair = Pair(mesh, lambda params: Muon(params, split=Stack()), shapes, torch.float32)
    for number in range(3):
        assert pair.step(number).collectives == 0
    pair.assert_equal()


@on_ranks(2)
def test_qk_clip_scales_on_owners_and_refuses_rows(mesh: DeviceMesh) -> None:
    plain = {name: torch.randn(4, 3, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("qk")}
    logits = torch.tensor([1.0, 4.0])
    weights = {name: owned(weight, mesh, i) for i, (name, weight) in enumerate(plain.items())}
    clip = QKClip(2.0)
    clip.add(weights["q"], weights["k"], lambda: logits)
    with CommCounter() as comm:
        clip(Muon(list(weights.values())), (), {})
    assert comm.collectives == 0
    factors = torch.tensor([1.0, 1.0, 0.5**0.5, 0.5**0.5])[:, None]
    for name, weight in plain.items():
        assert torch.equal(weights[name].full_tensor(), weight * factors), name
    for placement in (Shard(0), Partial()):
        rows = DTensor.from_local(plain["k"], mesh, [placement], shape=(4, 3), stride=(3, 1))
        with pytest.raises(ValueError, match=r"QKClip: the key of shape \(4, 3\) is .* on mesh dimension 0"):
            QKClip().add(weights["q"], rows, lambda: logits)
