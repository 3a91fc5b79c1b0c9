"""CommCounter sees every collective, eager and functional, once and with its exact bytes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from mfsdp.comm_counter import CommCounter
from test_multiprocess.world import on_ranks

BYTES = 24  # of the 6 floats that each call below is given


def counted(call: Callable[[], object]) -> dict[str, tuple[int, int]]:
    """kind -> (calls, bytes) of one call."""
    with CommCounter() as comm:
        call()
    return {kind: (tally.calls, tally.bytes) for kind, tally in comm.by_kind.items()}


def received(call: Callable[[], object]) -> int:
    """Bytes of the output buffers of one call."""
    with CommCounter() as comm:
        call()
    return comm.received


def six() -> torch.Tensor:
    return torch.ones(6)


@on_ranks(2)
def test_eager_collectives(world_size: int) -> None:
    rank = dist.get_rank()
    x, half = six(), torch.ones(3)

    assert counted(lambda: dist.all_reduce(six())) == {"all_reduce": (1, BYTES)}
    assert counted(lambda: dist.all_reduce(six(), async_op=True).wait()) == {"all_reduce": (1, BYTES)}
    assert counted(lambda: dist.broadcast(six(), src=0)) == {"broadcast": (1, BYTES)}
    assert counted(lambda: dist.reduce(six(), dst=0)) == {"reduce": (1, BYTES)}
    assert counted(lambda: dist.all_gather([six(), six()], x)) == {"all_gather": (1, BYTES)}
    assert counted(lambda: dist.all_gather_into_tensor(torch.empty(12), x)) == {"all_gather": (1, BYTES)}
    assert counted(lambda: dist.reduce_scatter(half, list(x.split(3)))) == {"reduce_scatter": (1, BYTES)}
    assert counted(lambda: dist.reduce_scatter_tensor(half, x)) == {"reduce_scatter": (1, BYTES)}
    assert counted(lambda: dist.all_to_all_single(six(), x)) == {"all_to_all": (1, BYTES)}
    assert counted(lambda: dist.barrier()) == {"barrier": (1, 0)}

    gathered = [six(), six()] if rank == 0 else None
    assert counted(lambda: dist.gather(x, gathered, dst=0)) == {"gather": (1, BYTES)}
    pieces = [six(), six()] if rank == 0 else None
    assert counted(lambda: dist.scatter(six(), pieces, src=0)) == {"scatter": (1, 2 * BYTES * (rank == 0))}


@on_ranks(2)
def test_point_to_point() -> None:
    rank = dist.get_rank()
    if rank == 0:
        assert counted(lambda: dist.send(six(), dst=1)) == {"send": (1, BYTES)}
        assert counted(lambda: dist.isend(six(), dst=1).wait()) == {"send": (1, BYTES)}
    else:
        assert counted(lambda: dist.recv(six(), src=0)) == {"recv": (1, BYTES)}
        assert counted(lambda: dist.recv(six())) == {"recv": (1, BYTES)}

    def exchange() -> None:
        peer = 1 - rank
        both = [dist.P2POp(dist.isend, six(), peer), dist.P2POp(dist.irecv, torch.empty(3), peer)]
        if rank == 1:  # what the peer sends is what arrives
            both = [dist.P2POp(dist.isend, torch.ones(3), peer), dist.P2POp(dist.irecv, six(), peer)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    sent, received = (BYTES, 12) if rank == 0 else (12, BYTES)
    assert counted(exchange) == {"send": (1, sent), "recv": (1, received)}


@on_ranks(2)
def test_bytes_received_are_those_of_the_outputs() -> None:
    rank, x, half, group = dist.get_rank(), six(), torch.ones(3), dist.group.WORLD
    assert received(lambda: dist.all_reduce(six())) == BYTES
    assert received(lambda: dist.broadcast(six(), src=0)) == BYTES
    assert received(lambda: dist.all_gather([six(), six()], x)) == 2 * BYTES
    assert received(lambda: dist.all_gather_into_tensor(torch.empty(12), x)) == 2 * BYTES
    assert received(lambda: dist.reduce_scatter_tensor(half, x)) == BYTES // 2
    assert received(lambda: dist.all_to_all_single(six(), x)) == BYTES
    assert received(lambda: dist.gather(x, [six(), six()] if rank == 0 else None, dst=0)) == 2 * BYTES * (rank == 0)
    assert received(lambda: dist.barrier()) == 0
    assert received(lambda: dist.send(six(), dst=1) if rank == 0 else dist.recv(six(), src=0)) == BYTES * rank
    assert received(lambda: funcol.wait_tensor(funcol.all_gather_tensor(x, 0, group))) == 2 * BYTES
    assert received(lambda: funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, group))) == BYTES // 2


@on_ranks(2)
def test_coalesced_collectives() -> None:
    def three_at_once() -> None:
        with dist._coalescing_manager():
            for _ in range(3):
                dist.all_reduce(six())

    assert counted(three_at_once) == {"all_reduce": (1, 3 * BYTES)}
    functional = torch.ops._c10d_functional
    group = dist.group.WORLD.group_name
    assert counted(lambda: functional.all_reduce_coalesced([six(), six()], "sum", group)) == {
        "all_reduce": (1, 2 * BYTES)
    }


@on_ranks(2)
def test_functional_collectives() -> None:
    group, rank, x = dist.group.WORLD, dist.get_rank(), six()

    def waited(tensor: torch.Tensor) -> None:
        funcol.wait_tensor(tensor)

    assert counted(lambda: waited(funcol.all_reduce(x, "sum", group))) == {"all_reduce": (1, BYTES)}
    assert counted(lambda: waited(funcol.broadcast(x, 0, group))) == {"broadcast": (1, BYTES)}
    assert counted(lambda: waited(funcol.all_gather_tensor(x, 0, group))) == {"all_gather": (1, BYTES)}
    assert counted(lambda: waited(funcol.reduce_scatter_tensor(x, "sum", 0, group))) == {"reduce_scatter": (1, BYTES)}
    assert counted(lambda: waited(funcol.all_to_all_single(x, [3, 3], [3, 3], group))) == {"all_to_all": (1, BYTES)}

    functional, peer = torch.ops._c10d_functional, 1 - rank
    if rank == 0:
        assert counted(lambda: waited(functional.isend(x, peer, 0, group.group_name))) == {"send": (1, BYTES)}
    else:
        assert counted(lambda: waited(functional.irecv(six(), peer, 0, group.group_name))) == {"recv": (1, BYTES)}


@on_ranks(2)
def test_collectives_under_dtensor_and_in_backward(mesh: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    assert counted(lambda: sharded.full_tensor()) == {"all_gather": (1, BYTES)}
    partial = DTensor.from_local(torch.ones(3, 2), mesh, [Partial()])
    assert counted(lambda: partial.redistribute(placements=[Replicate()])) == {"all_reduce": (1, BYTES)}
    assert counted(lambda: sharded.sum().full_tensor()) == {"all_reduce": (1, 4)}

    weight = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]).requires_grad_()
    local = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    loss = local.sum()
    # the gradient of 12 floats is reduced to the shard of 6
    assert counted(lambda: loss.backward()) == {"reduce_scatter": (1, 48)}

    twice = funcol.all_gather_tensor_autograd(six().requires_grad_(), 0, dist.group.WORLD).sum()
    assert counted(lambda: twice.backward()) == {"reduce_scatter": (1, 48)}


@on_ranks(2)
def test_local_work_is_not_communication(mesh: DeviceMesh) -> None:
    sharded = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)])
    assert counted(lambda: sharded.mul_(2).add_(sharded)) == {}
