"""Every way to gather: right values, exact bytes, and the rule by which one is chosen."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.comm_counter import CommCounter
from mfsdp.fsdp import strategy
from mfsdp.fsdp.collectives import BroadcastGather, Gather, Pending, Piece, ShardGroup, Shipment
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from mfsdp.fsdp.segments import UnitLayout
from test_multiprocess.fsdp_cases import (
    TinyLM,
    assert_same,
    groups_of,
    loss_of,
    same_model,
    shard,
    whole_gradients,
)
from test_multiprocess.world import on_ranks

# (owner, elements) of each segment, for any number of ranks
LAYOUTS = {
    "one owner": [(1, 25)],
    "even": [(0, 12), (1, 12), (2, 12), (3, 12)],
    "uneven": [(0, 1), (1, 17), (2, 3), (3, 9)],
    "fewer elements than ranks": [(1, 2)],
    "a rest of two owners": [(0, 21), (1, 1), (2, 1)],
    "nothing": [],
}


def segments(layout: str, world_size: int) -> list[tuple[int, int]]:
    return [(owner, size) for owner, size in LAYOUTS[layout] if owner < world_size]


def value(owner: int, size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32) + 1000 * (owner + 1)


def ship(sizes: Sequence[tuple[int, int]], here: int) -> Shipment:
    """The segments in one tensor, own ones filled, the others full of garbage."""
    whole = torch.full((sum(size for _, size in sizes),), -1.0)
    flats = whole.split([size for _, size in sizes]) if sizes else ()
    for (owner, size), flat in zip(sizes, flats, strict=True):
        if owner == here:
            flat.copy_(value(owner, size))
    return Shipment(tuple(Piece(owner, flat) for (owner, _), flat in zip(sizes, flats, strict=True)), whole)


def make(name: str, ranks: ShardGroup) -> Gather:
    if name == "broadcast":
        return BroadcastGather()
    lane = Lane.of(ranks)
    return ChainGather(lane, chunk_bytes=16) if name == "chain" else ResplitGather(lane)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["broadcast", "chain", "resplit"])
@on_ranks(2, 3, 4)
def test_all_ranks_get_all_segments(mesh: DeviceMesh, world_size: int, name: str, layout: str) -> None:
    ranks = ShardGroup.of(mesh, 0)
    gather = make(name, ranks)
    sizes = segments(layout, world_size)
    shipments = [ship(sizes, ranks.coordinate) for _ in range(3)]  # several under way
    pending = [gather.start(ranks, shipment, "a test") for shipment in shipments]
    for one in pending:
        one.wait()
    for shipment in shipments:
        for piece in shipment.pieces:
            assert torch.equal(piece.flat, value(piece.owner, piece.flat.numel()))


@pytest.mark.parametrize("name", ["broadcast", "chain", "resplit"])
@on_ranks(3)
def test_coordinates_are_not_ranks(mesh: DeviceMesh, name: str) -> None:
    ranks = ShardGroup.of(DeviceMesh("cpu", [2, 0, 1]), 0)
    assert ranks.ranks[ranks.coordinate] == dist.get_rank()
    shipment = ship(segments("uneven", 3), ranks.coordinate)
    make(name, ranks).start(ranks, shipment, "a test").wait()
    for piece in shipment.pieces:
        assert torch.equal(piece.flat, value(piece.owner, piece.flat.numel()))


def summed(number: int) -> int:
    total = torch.tensor(number)
    dist.all_reduce(total)
    return int(total.item())


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2, 3, 4)
def test_a_chain_moves_every_segment_once_per_receiving_rank(mesh: DeviceMesh, world_size: int, layout: str) -> None:
    ranks = ShardGroup.of(mesh, 0)
    sizes = segments(layout, world_size)
    gather = make("chain", ranks)
    assert isinstance(gather, ChainGather)
    with CommCounter() as comm:
        gather.move(ranks, ship(sizes, ranks.coordinate))
    received = 4 * sum(size for owner, size in sizes if owner != ranks.coordinate)
    last_of = (ranks.coordinate + 1) % world_size  # whose segments end here
    sent = 4 * sum(size for owner, size in sizes if owner != last_of)
    assert (comm.by_kind["recv"].bytes if received else 0) == received
    assert (comm.by_kind["send"].bytes if sent else 0) == sent
    assert set(comm.by_kind) <= {"send", "recv"}


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(2, 3, 4)
def test_resplitting_moves_every_element_once_per_step(mesh: DeviceMesh, world_size: int, layout: str) -> None:
    ranks = ShardGroup.of(mesh, 0)
    sizes = segments(layout, world_size)
    if not sizes:
        return
    total = sum(size for _, size in sizes)
    rest = total % world_size
    gather = make("resplit", ranks)
    assert isinstance(gather, ResplitGather)
    with CommCounter() as comm:
        gather.move(ranks, ship(sizes, ranks.coordinate))
    # the rest, fewer elements than ranks, goes to all at once instead of being padded to a slice
    assert summed(comm.by_kind["all_to_all"].bytes) == 4 * (total - rest + world_size * rest)
    if total >= world_size:
        assert comm.by_kind["all_gather"].bytes == 4 * (total // world_size)
    assert comm.collectives == 1 + (total >= world_size)


@pytest.mark.parametrize("name", ["chain", "resplit"])
@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@on_ranks(3, 4)
def test_training_does_not_depend_on_the_gather(
    mesh: DeviceMesh, world_size: int, name: str, compute_dtype: torch.dtype | None
) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(compute_dtype, torch.float32)
    model, reference = (same_model(lambda: TinyLM(depth=4)) for _ in range(2))
    for module in (model, reference):
        shard(module, mesh, mp_policy=policy)
    for group in groups_of(model):
        group.use_gather(make(name, group._ranks))
    for step in range(3):
        assert torch.equal(loss_of(model, step), loss_of(reference, step))
        for module in (model, reference):
            module.reset_iter_state()
            loss_of(module, step).backward()
        assert_same(whole_gradients(model), whole_gradients(reference), exact=True)


@on_ranks(4)
def test_the_choice_follows_the_rule(mesh: DeviceMesh) -> None:
    ranks = ShardGroup.of(mesh, 0)
    small, spread, lopsided = (
        UnitLayout.of([torch.Size((size,)) for size in sizes], [0, 2, 3])
        for sizes in ((8, 8, 8), (10**5, 10**5, 10**5), (10**6, 10**5, 10**5))
    )

    def chosen(layout: UnitLayout, group: ShardGroup = ranks) -> type[Gather]:
        return type(strategy.choose_gather(group, layout, 4, torch.device("cpu")))

    assert [chosen(layout) for layout in (small, spread, lopsided)] == [BroadcastGather] * 3  # one host
    strategy._one_host[ranks.group] = False
    try:
        assert [chosen(layout) for layout in (small, spread, lopsided)] == [
            BroadcastGather,
            ChainGather,
            ChainGather,
        ]
    finally:
        del strategy._one_host[ranks.group]


@on_ranks(2)
def test_what_a_lanes_job_raises_is_raised_where_it_is_waited_for(mesh: DeviceMesh) -> None:
    lane = Lane.of(ShardGroup.of(mesh, 0))

    def fail() -> None:
        raise RuntimeError("a fault in the lane")

    pending = Pending("gather of unit layers.3", [lane.run(fail)])
    with pytest.raises(RuntimeError, match=r"gather of unit layers.3 did not complete.*a fault in the lane"):
        pending.wait()
    done: list[int] = []
    lane.run(lambda: done.append(1)).wait()  # it goes on
    assert done == [1]


@on_ranks(4)
def test_ranks_may_be_in_different_numbers_of_groups(mesh: DeviceMesh) -> None:
    """A lane is made all the same: torch's hashed names of groups count the groups that a rank is in."""
    for some in ([1, 3], [3, 1], [2, 0, 1]):
        DeviceMesh("cpu", some)
    lane = Lane(ShardGroup.of(mesh, 0))
    total = torch.ones(1)
    dist.all_reduce(total, group=lane.group)
    assert total.item() == 4
