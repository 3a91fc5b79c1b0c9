"""Muon and AdamW on owned parameters: single-process numbers, no communication, state alike on every rank."""

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.optim import AdamW, Muon
from mfsdp.placements import OwnerShard, Tail
from test_multiprocess.world import on_ranks

MATRICES = [(8, 8), (12, 4), (4, 12), (1, 5), (6, 6)]
VECTORS: list[tuple[int, ...]] = [(7,), (3, 2, 2), (), (5, 4), (1,)]


def owned(full: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``full`` in an owner placement, made of what every rank has anyway."""
    return mfsdp.distribute_tensor(full.clone(), mesh, placements, src_data_rank=None)


def tensors(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def assert_steps_like(
    optimizer: torch.optim.Optimizer,
    params: Sequence[nn.Parameter],
    reference: torch.optim.Optimizer,
    reference_params: Sequence[nn.Parameter],
    steps: int = 20,
) -> None:
    """Step both with the same gradients; what this rank owns is bit-equal after each, with no collective."""
    shapes = [tuple(param.shape) for param in params]
    for step in range(steps):
        for param, expected, grad in zip(params, reference_params, tensors(shapes, seed=step + 9), strict=True):
            expected.grad = grad.clone()
            param.grad = owned(grad, param.device_mesh, param.placements)
        with CommCounter() as comm:
            optimizer.step()
        assert (comm.collectives, comm.bytes) == (0, 0), comm
        reference.step()
    for param, expected in zip(params, reference_params, strict=True):
        if is_local(param):
            assert torch.equal(local_tensor(param), expected)
        else:
            assert local_tensor(param).numel() == 0


@on_ranks(2, 3, 4)
def test_muon_bit_equal_to_torch_on_full_matrices(mesh: DeviceMesh, world_size: int) -> None:
    full = tensors(MATRICES, seed=0)
    params = [nn.Parameter(owned(t, mesh, [OwnerShard(i % world_size)])) for i, t in enumerate(full)]
    reference = [nn.Parameter(t.clone()) for t in full]
    assert_steps_like(
        Muon(params, lr=0.02),
        params,
        torch.optim.Muon(reference, lr=0.02),
        reference,
    )


@on_ranks(4)
def test_muon_on_replicas_of_owners() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = tensors(MATRICES, seed=0)
    params = [nn.Parameter(owned(t, mesh, [Replicate(), OwnerShard(i % 2)])) for i, t in enumerate(full)]
    reference = [nn.Parameter(t.clone()) for t in full]
    assert_steps_like(Muon(params), params, torch.optim.Muon(reference), reference)


@pytest.mark.parametrize("amsgrad", [False, True])
@on_ranks(2, 3)
def test_adamw_bit_equal_to_torch_on_full_tensors(mesh: DeviceMesh, world_size: int, amsgrad: bool) -> None:
    full = tensors([*VECTORS, *MATRICES], seed=0)
    params = [
        nn.Parameter(owned(t, mesh, [(Tail if i % 3 else OwnerShard)(i % world_size)])) for i, t in enumerate(full)
    ]
    reference = [nn.Parameter(t.clone()) for t in full]
    options = {"lr": 0.01, "foreach": True, "amsgrad": amsgrad}
    optimizer = AdamW(params, **options)
    assert_steps_like(optimizer, params, torch.optim.AdamW(reference, **options), reference)
    assert {state["step"].item() for state in optimizer.state.values()} == {20.0}


@on_ranks(2)
def test_adamw_on_row_shards(mesh: DeviceMesh) -> None:
    full, grad = tensors([(5, 3), (5, 3)], seed=0)
    param = nn.Parameter(
        DTensor.from_local(
            full.chunk(2)[dist.get_rank()],
            mesh,
            [Shard(0)],
            shape=full.shape,
            stride=full.stride(),
            run_check=False,
        )
    )
    param.grad = DTensor.from_local(
        grad.chunk(2)[dist.get_rank()],
        mesh,
        [Shard(0)],
        shape=full.shape,
        stride=full.stride(),
        run_check=False,
    )
    reference = nn.Parameter(full.clone())
    reference.grad = grad
    optimizer = AdamW([param], foreach=True)
    with CommCounter() as comm:
        optimizer.step()
    assert comm.collectives == 0
    torch.optim.AdamW([reference], foreach=True).step()
    assert torch.equal(param.full_tensor(), reference)
    assert optimizer.state[param]["exp_avg"].placements == (Shard(0),)


@on_ranks(2, 3)
def test_state_has_the_same_entries_in_the_parameters_placement(mesh: DeviceMesh, world_size: int) -> None:
    matrices = [nn.Parameter(owned(t, mesh, [OwnerShard(i % world_size)])) for i, t in enumerate(tensors(MATRICES, 0))]
    tails = [nn.Parameter(owned(t, mesh, [Tail(i % world_size)])) for i, t in enumerate(tensors(VECTORS, 0))]
    for optimizer, params in ((Muon(matrices), matrices), (AdamW(tails), tails)):
        for param in params[1:]:  # the first never has a gradient
            param.grad = owned(torch.ones(param.shape), mesh, param.placements)
        optimizer.step()
        state = optimizer.state_dict()["state"]
        seen = all_gather_object({index: sorted(entries) for index, entries in state.items()})
        assert all(other == seen[0] for other in seen)
        assert sorted(state) == list(range(1, len(params)))
        for param in params[1:]:
            for name, value in optimizer.state[param].items():
                if name != "step":
                    assert isinstance(value, DTensor)
                    assert (value.shape, value.placements) == (param.shape, param.placements)
                    assert value.to_local().shape == local_tensor(param).shape

        twin = type(optimizer)(params)
        twin.load_state_dict(optimizer.state_dict())
        twin.step()


@on_ranks(2)
def test_what_no_rank_holds_whole_is_refused_on_every_rank(mesh: DeviceMesh) -> None:
    def refusal(placement: Placement, shape: tuple[int, ...] = (4, 4)) -> str:
        local = torch.ones(shape)
        param = nn.Parameter(
            DTensor.from_local(local, mesh, [placement], run_check=False, shape=local.shape, stride=local.stride())
        )
        with pytest.raises(ValueError) as refused:
            Muon([("fine", nn.Parameter(torch.ones(2, 2))), ("blocks.0.norm.weight", param)])
        return str(refused.value)

    assert_expected_inline(
        refusal(Tail(1)),
        """\
Muon: parameter 'blocks.0.norm.weight' of shape (4, 4) is a Tail(owner=1) on mesh dimension 0: not a matrix. \
Give it to AdamW, or let mfsdp.optim.build_optimizer route it there.""",
    )
    assert_expected_inline(
        refusal(Shard(0)),
        """\
Muon: parameter 'blocks.0.norm.weight' of shape (4, 4) is Shard(dim=0) on mesh dimension 0, so no rank holds \
it whole. Shard it with mfsdp.fully_shard, which places matrices as OwnerShard, or use an optimizer that \
communicates, as torch.optim.Muon does. If it is an embedding or an output head: give it to AdamW, or let \
mfsdp.optim.build_optimizer route it there.""",
    )
    assert_expected_inline(
        refusal(OwnerShard(0), shape=(4,)),
        """\
Muon: parameter 'blocks.0.norm.weight' of shape (4,) has 1 dimensions: not a matrix. Give it to AdamW, or \
let mfsdp.optim.build_optimizer route it there.""",
    )
    assert "Partial" in refusal(Partial())
