"""What cannot be done raises on every rank alike, says what and why and what to do, and leaves nobody waiting."""

import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement

import mfsdp
from mfsdp import CommCounter, OwnerShard, Tail
from mfsdp.dtensor.redistribute import redistribute_local_tensor
from mfsdp.fsdp.objects import all_gather_object
from test_multiprocess.world import on_ranks


def impatient(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh over a group that gives up after a few seconds: nothing here may leave a rank waiting."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=mesh.mesh_dim_names)


def error_of(function: Callable[[], Any]) -> str:
    """The error's text, the same on every rank, raised before anything is communicated."""
    text = "no error"
    with CommCounter() as comm:
        try:
            function()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    assert comm.collectives == 0, comm
    texts = all_gather_object(text)
    assert texts == [text] * len(texts), texts
    return text


class Unknown(Placement):
    """A placement that nobody implements."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unknown)

    def __hash__(self) -> int:
        return 5

    def __repr__(self) -> str:
        return "Unknown()"


@on_ranks(2, 3)
def test_transitions_that_do_not_exist(mesh: DeviceMesh) -> None:
    mesh = impatient(mesh)
    owned = mfsdp.distribute_tensor(torch.ones(4, 2), mesh, [OwnerShard(1)])
    named = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("data",))

    def to(placement: Placement, on: DeviceMesh = mesh) -> None:
        meta = TensorMeta(owned.shape, owned.stride(), owned.dtype)
        source = DTensorSpec(on, (OwnerShard(1),), tensor_meta=meta)
        redistribute_local_tensor(owned.to_local(), source, DTensorSpec(on, (placement,), tensor_meta=meta))

    size = mesh.size()
    assert_expected_inline(
        error_of(lambda: to(Partial("max"))).replace(f"size {size}", "size W"),
        """NotImplementedError: redistribute from OwnerShard(owner=1) to Partial(max) on mesh dimension 0 of size W is not implemented. See the transition table in mfsdp.placements; going through Replicate() works from every placement that torch can replicate.""",
    )
    assert_expected_inline(
        error_of(lambda: to(Unknown(), named)).replace(f"size {size}", "size W"),
        """NotImplementedError: redistribute from OwnerShard(owner=1) to Unknown() on mesh dimension 0 ('data') of size W is not implemented. See the transition table in mfsdp.placements; going through Replicate() works from every placement that torch can replicate.""",
    )
    # torch's own: before 2.14, and from then on
    theirs = ("redistributing to Partial is for internal use only", "only Shard to Partial(sum)")
    message = error_of(lambda: owned.redistribute(placements=[Partial()]))
    assert any(part in message for part in theirs), message


@on_ranks(2, 3)
def test_owners_outside_the_mesh(mesh: DeviceMesh) -> None:
    mesh = impatient(mesh)
    size = mesh.size()
    expected = (
        f"OwnerShard(owner={size}) lies outside mesh dimension 0 of size {size}. Owners are coordinates on that "
        f"dimension: choose one from 0 to {size - 1}."
    )
    full = torch.ones(4, 2)
    owned = mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)])
    for name, function in {
        "distribute_tensor": lambda: mfsdp.distribute_tensor(full, mesh, [OwnerShard(size)]),
        "redistribute": lambda: owned.redistribute(placements=[OwnerShard(size)]),
    }.items():
        assert error_of(function) == f"ValueError: {name}: {expected}"
    assert error_of(lambda: distribute_tensor(full, mesh, [OwnerShard(size)])).endswith(expected)


@on_ranks(2, 3)
def test_ops_that_no_one_rank_can_run(mesh: DeviceMesh) -> None:
    mesh = impatient(mesh)
    size = mesh.size()
    mine = mfsdp.distribute_tensor(torch.ones(4, 2), mesh, [OwnerShard(0)])
    theirs = mfsdp.distribute_tensor(torch.ones(4, 2), mesh, [OwnerShard(1)])
    index = mfsdp.distribute_tensor(torch.zeros(4, 2, dtype=torch.int64), mesh, [OwnerShard(1)])
    assert_expected_inline(
        error_of(lambda: torch.max(torch.ones_like(mine), 0, out=(mine[0], index[0]))).replace(
            f"size {size}", "size W"
        ),
        """NotImplementedError: aten.max.dim_max writes to tensors that are placed differently, OwnerShard(owner=0) and OwnerShard(owner=1) on mesh dimension 0 of size W, so no one rank can run it. Redistribute one of them to the placement of the other first.""",
    )
    for function in (
        lambda: mine.add_(mfsdp.distribute_tensor(torch.ones(5, 2), mesh, [OwnerShard(0)], src_data_rank=None)),
        lambda: mine @ mine,
        lambda: mine.view(3, 3),
        lambda: torch._foreach_add_([mine, theirs], [mine, theirs.t()]),
    ):
        text = error_of(function)
        assert "RuntimeError" in text, text
        assert text != "no error"
    plain = torch.ones(4, 2)
    assert "mixed torch.Tensor and DTensor" in error_of(lambda: mine + plain)


@on_ranks(4)
def test_sharded_operands_that_dtensor_cannot_bring_together() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh("cpu", (4,))
    owned = mfsdp.distribute_tensor(torch.ones(4, 2), mesh, [OwnerShard(0), Shard(0)])
    elsewhere = mfsdp.distribute_tensor(torch.ones(4, 2), other, [OwnerShard(0)])
    assert "are on different meshes" in error_of(lambda: owned + elsewhere)
    with_tail = mfsdp.distribute_tensor(torch.ones(4, 2), mesh, [Tail(0), Replicate()])
    assert torch.equal((owned + with_tail).full_tensor(), torch.full((4, 2), 2.0))


@on_ranks(2)
def test_distribute_tensor_refuses(mesh: DeviceMesh) -> None:
    mesh = impatient(mesh)
    full = torch.ones(4, 2)
    placed = mfsdp.distribute_tensor(full, mesh, [OwnerShard(1)])
    non_leaf = torch.ones(4, 2, requires_grad=True) * 2
    assert_expected_inline(
        "\n".join(
            error_of(function)
            for function in (
                lambda: mfsdp.distribute_tensor(full, mesh, [OwnerShard(1), Replicate()]),
                lambda: mfsdp.distribute_tensor(placed, mesh, [OwnerShard(0)]),
                lambda: mfsdp.distribute_tensor(non_leaf, mesh, [OwnerShard(0)]),
                lambda: DTensor.from_local(full, mesh, [OwnerShard(0)], run_check=False),
            )
        ),
        """\
ValueError: distribute_tensor: 2 placements for a mesh of 1 dimensions.
ValueError: distribute_tensor: the tensor is distributed already, as (OwnerShard(owner=1),) on DeviceMesh((2,), 'cpu', stride=(1,)). Call its redistribute() to place it as (OwnerShard(owner=0),).
RuntimeError: distribute_tensor takes leaf tensors; inside autograd use DTensor.from_local(...).redistribute(...).
ValueError: DTensor.from_local with placements [OwnerShard(owner=0)]: ranks that own nothing cannot tell the global shape from an empty local tensor. Pass shape= and stride= of the global tensor on every rank.""",
    )


@on_ranks(2, 3)
def test_a_value_that_the_owner_cannot_give(mesh: DeviceMesh) -> None:
    """The owner raises what the op raised, the others that it did; nobody waits for a value."""
    mesh = impatient(mesh)
    owned = mfsdp.distribute_tensor(torch.ones(4, 3), mesh, [OwnerShard(1)])
    double = owned.double()
    try:
        torch.allclose(owned, double)
    except RuntimeError as error:
        text = str(error)
    if mesh.get_coordinate() == (1,):
        assert "Float did not match Double" in text
    else:
        assert text == "aten.allclose.default failed on the owner of its operands, O(1); that rank says why."
    dist.barrier(group=mesh.get_group())
    wrong = mfsdp.distribute_tensor(torch.full((3,), -1), mesh, [OwnerShard(1)])
    try:
        torch.bincount(wrong)
    except RuntimeError as error:
        text = str(error)
    assert ("non-negative" if mesh.get_coordinate() == (1,) else "failed on the owner") in text
    dist.barrier(group=mesh.get_group())
    small = mfsdp.distribute_tensor(torch.empty(2, 2), mesh, [OwnerShard(1)])
    assert "Owned tensors are not resized" in error_of(lambda: torch.add(owned, owned, out=small))


_AFTER_THE_END = """
import torch, torch.distributed as dist, mfsdp
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("gloo", init_method="file://{path}", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
weight = mfsdp.distribute_tensor(torch.ones(2, 2), mesh, [mfsdp.OwnerShard(0)])
dist.destroy_process_group()
print(float((weight * 2).to_local().sum()))  # owner-local work needs no group
weight.sum().item()
"""


def test_use_after_the_process_group_is_gone(tmp_path: Path) -> None:
    script = _AFTER_THE_END.format(path=tmp_path / "rendezvous")
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout.strip() == "8.0"
    assert run.returncode == 1
    assert "group" in run.stderr.strip().splitlines()[-1].lower(), run.stderr
