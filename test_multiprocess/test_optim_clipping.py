"""Clipping by one norm over parameters of several meshes, against a single process."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard

from mfsdp import CommCounter, OwnerShard, Tail, distribute_tensor
from mfsdp.optim import clip_grad_norm_
from test_multiprocess.world import on_ranks

DENSE: list[list[Placement]] = [[OwnerShard(0)], [OwnerShard(3)], [Tail(1)], [Shard(0)]]
EXPERTS: list[list[Placement]] = [[Shard(0), OwnerShard(1)], [OwnerShard(1), Shard(0)], [Replicate(), OwnerShard(0)]]


def parameters(meshes: tuple[DeviceMesh, DeviceMesh]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The same parameters and gradients in one process, and placed on two meshes; the last is on none."""
    places = [(meshes[0], p) for p in DENSE] + [(meshes[1], p) for p in EXPERTS]
    generator = torch.Generator().manual_seed(0)
    single, placed = [], []

    def pair(value: Tensor, gradient: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(value)
        parameter.grad = gradient
        return parameter

    for mesh, placements in [*places, (None, [])]:
        value, gradient = (torch.randn(8, 5, generator=generator) for _ in range(2))
        single.append(pair(value.clone(), gradient.clone()))
        if mesh is None:
            placed.append(pair(value.clone(), gradient.clone()))
        else:
            placed.append(pair(*(distribute_tensor(t, mesh, placements) for t in (value, gradient))))
    return single, placed


def two_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))


@on_ranks(4)
@pytest.mark.parametrize("foreach", [False, True, None])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf"), 3.5])
def test_one_norm_over_two_meshes(norm_type: float, foreach: bool | None) -> None:
    single, placed = parameters(two_meshes())
    expected = torch.nn.utils.clip_grad_norm_(single, 0.5, norm_type)
    with CommCounter() as comm:
        norm = clip_grad_norm_(placed, 0.5, norm_type, foreach=foreach)
    # a mesh of one dimension and one of two; zeros are not neutral for a maximum, so that owners need a sum of their own
    assert comm.collectives <= (7 if norm_type == float("inf") else 4), comm
    torch.testing.assert_close(norm, expected)
    for parameter, mine in zip(single, placed, strict=True):
        gradient = mine.grad if mine is placed[-1] else mine.grad.full_tensor()  # type: ignore[union-attr, operator]
        torch.testing.assert_close(gradient, parameter.grad)


@on_ranks(4)
def test_a_small_norm_scales_nothing() -> None:
    single, placed = parameters(two_meshes())
    clip_grad_norm_(placed, 1e6)
    for parameter, mine in zip(single[:-1], placed[:-1], strict=True):
        assert torch.equal(mine.grad.full_tensor(), parameter.grad)  # type: ignore[union-attr, operator]


@on_ranks(4)
def test_a_norm_that_is_not_finite_raises_on_every_rank_and_scales_nothing() -> None:
    single, placed = parameters(two_meshes())
    for index in (1, 4):  # of either mesh, on its owners alone
        placed[index].grad.to_local().view(-1)[:1] = float("nan")  # type: ignore[union-attr, operator]
        with pytest.raises(RuntimeError, match=r"norm of order 2\.0 of all gradients is nan"):
            clip_grad_norm_(placed, 0.5, error_if_nonfinite=True)
        placed[index].grad.nan_to_num_(0.0)  # type: ignore[union-attr]
    assert torch.equal(placed[0].grad.full_tensor(), single[0].grad)  # type: ignore[union-attr, operator, arg-type]


def test_without_gradients_the_norm_is_zero() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
