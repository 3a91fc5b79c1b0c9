"""The shared worlds themselves: a failing rank is reported, and does not poison what comes after."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.fsdp.objects import all_gather_object
from test_multiprocess.world import Worlds, on_ranks


@on_ranks(2, 3)
def test_every_rank_runs(mesh: DeviceMesh, world_size: int) -> None:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    assert mesh.size() == world_size
    assert total.item() == world_size * (world_size - 1) // 2


@on_ranks(4)
def test_ranks_iterate_over_a_set_in_different_orders(mesh: DeviceMesh) -> None:
    orders = all_gather_object(list({f"layers.{index}" for index in range(8)}))
    assert len({tuple(order) for order in orders}) == 4


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("a fault of rank 1 alone")
    dist.barrier()


fail_on_rank_1.on_rank = fail_on_rank_1  # type: ignore[attr-defined]


def test_a_failing_rank_is_named_and_the_world_replaced(worlds: Worlds) -> None:
    with pytest.raises(AssertionError, match=r"--- rank 1 ---(.|\n)*a fault of rank 1 alone"):
        worlds.get(2).run(__name__, "fail_on_rank_1", {}, timeout=60)
    test_every_rank_runs(worlds=worlds, world_size=2)
