"""Every transition of the table in mfsdp.placements, against the values that torch or arithmetic gives."""

import random
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import mfsdp
from mfsdp import CommCounter, OwnerShard, Tail
from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.placements import is_owner
from test_multiprocess.world import on_ranks

SHAPES = [(7, 3), (3, 5), (1, 4), (0, 4), (), (5,), (4, 2, 3), (2, 3, 2, 5)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.int16, torch.complex64]


def values(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The same tensor on every rank, with a different number in every element as far as the dtype allows."""
    numel = max(1, torch.Size(shape).numel())
    counting = torch.arange(numel)[: torch.Size(shape).numel()].reshape(tuple(shape))
    return counting % 2 == 0 if dtype is torch.bool else counting.to(dtype)


def targets(tensor: Tensor, world_size: int) -> list[Placement]:
    owners = [OwnerShard(0), OwnerShard(world_size - 1), Tail(world_size // 2)]
    return [*owners, Replicate(), *(Shard(dim) for dim in range(tensor.ndim))]


def check_local(tensor: DTensor, mesh: DeviceMesh) -> None:
    """On a 1-D mesh: the owner has the whole tensor, the others the documented empty shape."""
    (placement,) = tensor.placements
    if isinstance(placement, OwnerShard | Tail):
        whole = mesh.get_coordinate() == (placement.owner,)
        assert tensor.to_local().shape == (tensor.shape if whole else (0, *tensor.shape[1:]))


@on_ranks(2, 3, 4)
def test_all_pairs_keep_shape_dtype_and_values(mesh: DeviceMesh, world_size: int) -> None:
    for dtype in DTYPES:
        for shape in SHAPES if dtype is torch.float32 else SHAPES[:2]:
            full = values(shape, dtype)
            for source in targets(full, world_size):
                # from torch's own placements without communication, which gloo refuses for some dtypes
                root = 0 if is_owner(source) else None
                placed = mfsdp.distribute_tensor(full, mesh, [source], src_data_rank=root)
                check_local(placed, mesh)
                for target in targets(full, world_size):
                    if not (is_owner(source) or is_owner(target)):
                        continue  # torch's own business
                    moved = placed.redistribute(placements=[target])
                    assert moved.placements == (target,)
                    assert moved.dtype == dtype
                    assert moved.shape == full.shape
                    check_local(moved, mesh)
                    back = moved.redistribute(placements=[Tail(0)])
                    assert torch.equal(back.full_tensor(), full), (source, target, shape, dtype)


@on_ranks(2, 3)
@pytest.mark.parametrize("op", ["sum", "avg", "min", "max", "product"])
def test_partial_is_reduced_to_the_owner(mesh: DeviceMesh, world_size: int, op: str) -> None:
    def of_rank(rank: int) -> Tensor:
        return values((5, 3)).sub(7).mul(rank + 1)

    every = torch.stack([of_rank(rank) for rank in range(world_size)])
    expected = {
        "sum": every.sum(0),
        "avg": every.sum(0) / world_size,
        "min": every.amin(0),
        "max": every.amax(0),
        "product": every.prod(0),
    }[op]
    mine = of_rank(dist.get_rank())
    partial = DTensor.from_local(mine, mesh, [Partial(op)], run_check=False)
    for owner in (OwnerShard(0), Tail(world_size - 1)):
        assert torch.equal(partial.redistribute(placements=[owner]).full_tensor(), expected)
    assert torch.equal(mine, of_rank(dist.get_rank()))  # the source is not written to


@on_ranks(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.int16, torch.bool])
def test_partial_of_other_dtypes(mesh: DeviceMesh, world_size: int, dtype: torch.dtype) -> None:
    full = values((4, 2), dtype)
    partial = DTensor.from_local(full, mesh, [Partial()], run_check=False)
    expected = full if dtype is torch.bool else full * world_size
    reduced = partial.redistribute(placements=[OwnerShard(1)])
    assert reduced.dtype == dtype
    assert torch.equal(reduced.full_tensor(), expected)


@on_ranks(2, 3)
def test_owner_to_partial_costs_nothing(mesh: DeviceMesh, world_size: int) -> None:
    """torch keeps redistribution to Partial to its own use; clip_grad_norm_ over owned tensors rests on it."""
    full = values((3, 2)).sub(2)
    owned = mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)])
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    with CommCounter() as comm:
        local = redistribute_local_tensor(
            owned.to_local(), owned._spec, DTensorSpec(mesh, (Partial("sum"),), tensor_meta=meta)
        )
    assert comm.collectives == 0
    assert torch.equal(DTensor.from_local(local, mesh, [Partial()], run_check=False).full_tensor(), full)
    target = DTensorSpec(mesh, (Partial("avg"),), tensor_meta=meta)
    with pytest.raises(NotImplementedError, match=r"OwnerShard\(owner=1\) to Partial\(avg\) on mesh dimension 0"):
        redistribute_local_tensor(owned.to_local(), owned._spec, target)


@on_ranks(2, 3, 4)
def test_bytes_on_the_wire_are_those_of_the_tensor(mesh: DeviceMesh, world_size: int) -> None:
    """Input bytes of the collectives, summed over ranks: never padded, never an all-reduce or all-gather."""
    full = values((7, 3))
    nbytes = full.numel() * full.element_size()

    def total(source: DTensor, target: Placement) -> dict[str, int]:
        with CommCounter() as comm:
            source.redistribute(placements=[target])
        sums = {}
        for kind, tally in comm.by_kind.items():
            number = torch.tensor([tally.calls, tally.bytes])
            dist.all_reduce(number)
            assert number[0] == world_size  # every rank enters it once
            sums[kind] = int(number[1])
        return sums

    owned = mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)])
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    partial = DTensor.from_local(full, mesh, [Partial()], run_check=False)
    replicated = distribute_tensor(full, mesh, [Replicate()])
    assert total(owned, Replicate()) == {"broadcast": world_size * nbytes}  # every rank's buffer counts as input
    assert total(owned, Shard(0)) == {"all_to_all": nbytes}
    assert total(owned, Shard(1)) == {"all_to_all": nbytes}
    assert total(owned, OwnerShard(0)) == {"all_to_all": nbytes}
    assert total(owned, Tail(1)) == {}
    assert total(replicated, OwnerShard(0)) == {}
    assert total(sharded, OwnerShard(1)) == {"all_to_all": nbytes}
    assert total(partial, OwnerShard(1)) == {"reduce": world_size * nbytes}


@on_ranks(2, 3)
def test_strides_survive(mesh: DeviceMesh) -> None:
    """A transposed weight travels in its own memory order and arrives transposed."""
    full = values((6, 4)).t()
    owned = mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)])
    assert owned.stride() == full.stride()
    for target in (Replicate(), OwnerShard(0), Tail(1)):
        moved = owned.redistribute(placements=[target])
        assert torch.equal(moved.full_tensor(), full)
        assert moved.full_tensor().stride() == full.stride()
    strided_view = values((6, 8))[:, ::2]  # not dense: becomes contiguous
    owned = mfsdp.distribute_tensor(strided_view, mesh, [OwnerShard(1)])
    assert torch.equal(owned.full_tensor(), strided_view)


@on_ranks(2)
def test_results_share_no_memory_with_sources(mesh: DeviceMesh) -> None:
    full = values((3, 2))
    for source, target in [(Replicate(), OwnerShard(0)), (OwnerShard(0), Replicate()), (OwnerShard(0), Shard(0))]:
        placed = mfsdp.distribute_tensor(full, mesh, [source])
        moved = placed.redistribute(placements=[target])
        moved.mul_(0)
        assert torch.equal(placed.full_tensor(), values((3, 2))), (source, target)
        assert torch.equal(full, values((3, 2)))


@on_ranks(2, 3)
def test_gradients_flow_back(mesh: DeviceMesh, world_size: int) -> None:
    full = values((5, 3))
    weight = values((5, 3)).add(1).div(3)
    for source in targets(full, world_size):
        for target in targets(full, world_size):
            placed = mfsdp.distribute_tensor(full, mesh, [source]).requires_grad_()
            factor = mfsdp.distribute_tensor(weight, mesh, [target])
            (placed.redistribute(placements=[target]) * factor).sum().backward()
            assert placed.grad is not None
            assert placed.grad.placements == (source,)
            assert torch.equal(placed.grad.full_tensor(), weight), (source, target)


@on_ranks(2, 3)
def test_partial_gradients_are_averaged_on_the_owner(mesh: DeviceMesh, world_size: int) -> None:
    """The data-parallel pattern: replicated weight in forward, averaged gradient on the owner."""
    weight = mfsdp.distribute_tensor(values((4, 3)), mesh, [OwnerShard(1)]).requires_grad_()
    full = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])
    (full * (dist.get_rank() + 1)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.placements == (OwnerShard(1),)
    mean = sum(range(1, world_size + 1)) / world_size
    assert torch.equal(weight.grad.full_tensor(), torch.full((4, 3), mean))


@on_ranks(2)
def test_dtypes_of_forward_and_backward(mesh: DeviceMesh) -> None:
    owned = mfsdp.distribute_tensor(values((4, 2)), mesh, [OwnerShard(1)]).requires_grad_()
    moved = owned.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    assert moved.dtype == torch.bfloat16
    moved.sum().backward()
    assert owned.grad is not None
    assert owned.grad.dtype == torch.float32
    assert torch.equal(owned.grad.full_tensor(), torch.ones(4, 2))


@on_ranks(2, 3)
def test_async_redistribution(mesh: DeviceMesh, world_size: int) -> None:
    full = values((5, 4))
    for source in targets(full, world_size):
        placed = mfsdp.distribute_tensor(full, mesh, [source])
        for target in targets(full, world_size):
            moved = placed.redistribute(placements=[target], async_op=True)
            assert torch.equal((moved * 2).full_tensor(), full * 2), (source, target)


# Meshes of several dimensions #

TWO_DIMS: list[list[Placement]] = [
    [Replicate(), OwnerShard(1)],
    [OwnerShard(0), Replicate()],
    [OwnerShard(1), Shard(0)],
    [OwnerShard(1), Shard(1)],
    [Shard(0), Tail(1)],
    [OwnerShard(1), OwnerShard(0)],
    [Tail(0), OwnerShard(1)],
    [Replicate(), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(0), Shard(1)],
    [Replicate(), Shard(0)],
]


def coordinates_that_hold(placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    here = mesh.get_coordinate()
    assert here is not None
    return all(
        coordinate == placement.owner
        for coordinate, placement in zip(here, placements, strict=True)
        if isinstance(placement, OwnerShard | Tail)
    )


@on_ranks(4)
def test_two_dimensional_meshes(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in [(7, 3), (1, 4), (4, 4)]:
        full = values(shape)
        for source in TWO_DIMS:
            placed = mfsdp.distribute_tensor(full, mesh, source)
            if not coordinates_that_hold(source, mesh):
                assert placed.to_local().shape == (0, *shape[1:])
            assert torch.equal(placed.full_tensor(), full), (source, shape)
            for target in TWO_DIMS:
                moved = placed.redistribute(placements=target)
                expected = distribute_tensor(full, mesh, target)
                assert torch.equal(moved.to_local(), expected.to_local()), (source, target, shape)


@on_ranks(4)
def test_strided_shards(world_size: int) -> None:
    """What FSDP over TP makes of a dimension that both shard."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = values((8, 3))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    placed = distribute_tensor(full, mesh, strided)
    for target in ([OwnerShard(1), Replicate()], [OwnerShard(1), Shard(0)], [Replicate(), OwnerShard(1)]):
        moved = placed.redistribute(placements=target)
        assert torch.equal(moved.to_local(), distribute_tensor(full, mesh, target).to_local()), target
        assert torch.equal(moved.full_tensor(), full)


@on_ranks(8)
def test_three_dimensional_meshes(world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    full = values((5, 6))
    choices: list[list[Placement]] = [
        [Replicate(), OwnerShard(1), Shard(0)],
        [OwnerShard(1), OwnerShard(0), Shard(1)],
        [Shard(0), OwnerShard(0), Tail(1)],
        [Replicate(), Shard(0), Shard(1)],
    ]
    for source in choices:
        placed = mfsdp.distribute_tensor(full, mesh, source)
        for target in choices:
            moved = placed.redistribute(placements=target)
            assert torch.equal(moved.to_local(), distribute_tensor(full, mesh, target).to_local()), (source, target)


@on_ranks(4)
def test_random_round_trips(mesh: DeviceMesh, world_size: int) -> None:
    square = init_device_mesh("cpu", (2, 2))
    generator = random.Random(17)
    for _ in range(60):
        shape = tuple(generator.randint(1, 6) for _ in range(generator.randint(1, 4)))
        on = generator.choice([mesh, square])

        def placement(size: int, ndim: int = len(shape)) -> Placement:
            kind = generator.randrange(4)
            if kind == 0:
                return OwnerShard(generator.randrange(size))
            if kind == 1:
                return Tail(generator.randrange(size))
            return Replicate() if kind == 2 else Shard(generator.randrange(ndim))

        full = values(shape)
        path = [[placement(size) for size in on.shape] for _ in range(4)]
        tensor = mfsdp.distribute_tensor(full, on, path[0])
        for placements in path[1:]:
            tensor = tensor.redistribute(placements=placements)
        assert torch.equal(tensor.full_tensor(), full), (path, shape)


@on_ranks(4)
def test_owners_are_mesh_coordinates_not_ranks(world_size: int) -> None:
    full = values((5, 2))
    for ranks in ([1, 3], [3, 1], [2, 3, 0]):
        mesh = DeviceMesh("cpu", ranks)
        for owner in range(len(ranks)):
            placed = mfsdp.distribute_tensor(full * (dist.get_rank() + 1), mesh, [OwnerShard(owner)])
            if dist.get_rank() not in ranks:
                assert placed.to_local().numel() == 0
                continue
            first = full * (ranks[0] + 1)  # coordinate 0 has the values that count
            holds = dist.get_rank() == ranks[owner]
            assert placed.to_local().shape == ((5, 2) if holds else (0, 2))
            for target in (Replicate(), Shard(0), Shard(1), OwnerShard(0), OwnerShard(len(ranks) - 1)):
                moved = placed.redistribute(placements=[target])
                assert torch.equal(moved.redistribute(placements=[OwnerShard(0)]).full_tensor(), first), (ranks, target)
            shards = placed.redistribute(placements=[Shard(0)]).to_local()
            # torch orders the shards of such a mesh by rank, not by coordinate
            expected = first.chunk(len(ranks))[sorted(ranks).index(dist.get_rank())]
            assert torch.equal(shards, expected)
            if len(ranks) == 2:
                even = first[:4]
                sharded = distribute_tensor(even, mesh, [Shard(0)])
                assert torch.equal(
                    sharded.redistribute(placements=[OwnerShard(owner)]).full_tensor(), sharded.full_tensor()
                )


@on_ranks(3)
def test_distribute_tensor_sources(mesh: DeviceMesh, world_size: int) -> None:
    rank = dist.get_rank()
    mine = torch.full((3, 2), float(rank))
    for source in range(world_size):
        placed = mfsdp.distribute_tensor(mine, mesh, [OwnerShard(1)], src_data_rank=source)
        assert torch.equal(placed.full_tensor(), torch.full((3, 2), float(source)))
    with CommCounter() as comm:
        own = mfsdp.distribute_tensor(mine, mesh, [OwnerShard(2)], src_data_rank=None)
    assert comm.collectives == 0
    own.zero_()
    assert torch.equal(mine, torch.full((3, 2), float(rank)))  # no alias
    meta = mfsdp.distribute_tensor(torch.empty(3, 2, device="meta"), mesh, [OwnerShard(2)])
    assert meta.is_meta
    assert meta.to_local().shape == ((3, 2) if rank == 2 else (0, 2))
    parameter = mfsdp.distribute_tensor(torch.nn.Parameter(mine), mesh, [OwnerShard(2)])
    assert parameter.requires_grad
    assert torch.equal(distribute_tensor(mine, mesh, [Tail(1)]).full_tensor(), torch.zeros(3, 2))
    again = mfsdp.distribute_tensor(own, mesh, [OwnerShard(2)])
    assert again is own


@on_ranks(2, 3)
def test_empty_locals_keep_no_memory(mesh: DeviceMesh, world_size: int) -> None:
    full = values((64, 64))
    sources = [
        DTensor.from_local(full, mesh, [Partial()], run_check=False),
        distribute_tensor(full, mesh, [Shard(0)]),
        distribute_tensor(full, mesh, [Shard(1)]),
        distribute_tensor(full, mesh, [Replicate()]),
        mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)]),
    ]
    for source in sources:
        local = source.redistribute(placements=[OwnerShard(0)]).to_local()
        expected = full.numel() * full.element_size() if dist.get_rank() == 0 else 0
        assert local.untyped_storage().nbytes() == expected, source.placements
