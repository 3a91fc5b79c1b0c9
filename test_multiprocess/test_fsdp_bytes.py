"""What is resident and what travels, counted to the byte."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.fsdp import fully_shard
from mfsdp.fsdp.buffers import BufferState
from mfsdp.planning import Role, ShardPlan, plan
from test_multiprocess.fsdp_cases import TinyLM, groups_of, loss_of, same_model, shard
from test_multiprocess.world import on_ranks


def owned_bytes(made: ShardPlan, owner: int | None = None) -> int:
    """Bytes of the plan's owned parameters: all of them, or those of one owner."""
    return sum(
        entry.parameter_bytes
        for entry in made.entries.values()
        if entry.role is not Role.ROWS and (owner is None or entry.owner == owner)
    )


@on_ranks(1, 2, 3, 4)
def test_resident_shards_are_one_copy_of_the_model(mesh: DeviceMesh, world_size: int) -> None:
    model = same_model()
    elements = sum(parameter.numel() for parameter in model.parameters())
    made = shard(model, mesh)
    loss_of(model, 0).backward()  # a first round, so that anything that is kept is there
    held = Counter[str]()
    for name, parameter in model.named_parameters():
        role = made.entries[name].role
        assert is_local(parameter) or local_tensor(parameter).numel() == 0
        held["owned" if role is not Role.ROWS else "rows"] += local_tensor(parameter).numel()
    assert held["owned"] * 4 == owned_bytes(made, owner=dist.get_rank())
    resident = sum(group._resident.flat.untyped_storage().nbytes() for group in groups_of(model))
    assert resident == owned_bytes(made, owner=dist.get_rank())
    total = torch.tensor(held["owned"] + held["rows"])
    dist.all_reduce(total)
    assert total.item() == elements


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@on_ranks(2, 3, 4)
def test_gather_and_reduction_move_the_units_bytes(
    mesh: DeviceMesh, world_size: int, compute_dtype: torch.dtype | None
) -> None:
    model = same_model()
    made = shard(model, mesh, mp_policy=MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32))
    unit_bytes = owned_bytes(made)
    root_bytes = sum(made.entries[name].parameter_bytes for name in ("norm.weight", "norm.bias"))
    loss_of(model, 0).backward()
    gather_itemsize, reduce_itemsize = (2, 4) if compute_dtype else (4, 4)
    with CommCounter() as forward:
        loss = loss_of(model, 1)
    with CommCounter() as backward:
        loss.backward()
    assert forward.by_kind["broadcast"].bytes == unit_bytes * gather_itemsize // 4
    # the root's full parameters are kept for backward
    assert backward.by_kind["broadcast"].bytes == (unit_bytes - root_bytes) * gather_itemsize // 4
    assert backward.by_kind["reduce"].bytes == unit_bytes * reduce_itemsize // 4
    # what is left is FSDP2's, for embedding and head
    assert set(forward.by_kind) == {"broadcast", "all_gather"}
    assert set(backward.by_kind) <= {"broadcast", "reduce", "all_gather", "reduce_scatter"}


@on_ranks(4)
def test_replicas_move_only_what_their_owner_has(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = same_model(lambda: OnlyMatrices(3))
    made = shard(model, hsdp)
    loss = model(torch.ones(2, 5)).sum()
    with CommCounter() as backward:
        loss.backward()
    own = hsdp.get_local_rank("shard")
    assert backward.by_kind["reduce"].bytes == owned_bytes(made)
    assert backward.by_kind["all_reduce"].bytes == owned_bytes(made, owner=own)


class OnlyMatrices(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(4)
def test_a_segment_without_elements_sends_no_message(mesh: DeviceMesh) -> None:
    model = same_model(lambda: OnlyMatrices(2))
    model.layers[1].empty = nn.Parameter(torch.empty(0))
    made = plan(model, mesh)
    fully_shard(model, mesh=mesh, plan=made)
    owners = {entry.owner for entry in made.entries.values() if entry.numel}
    with CommCounter() as comm:
        model(torch.ones(2, 5)).sum().backward()
    assert len(owners) == 2  # of four ranks
    assert comm.by_kind["broadcast"].calls == comm.by_kind["reduce"].calls == 2
    assert set(comm.by_kind) == {"broadcast", "reduce"}


@pytest.mark.parametrize("cast", [False, True])
@on_ranks(2)
def test_full_parameters_are_freed_and_the_owners_pinned(mesh: DeviceMesh, cast: bool) -> None:
    model = same_model(lambda: TinyLM(depth=2))
    shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16 if cast else None))
    loss = loss_of(model, 0)
    layers = [group for group in groups_of(model) if group._module_fqn]
    for group in layers:
        for segment, buffer in zip(group._layout.segments, group._memory.buffers, strict=True):
            mine = segment.owner == mesh.get_local_rank()
            assert buffer.state is (BufferState.PINNED if mine and not cast else BufferState.FREED)
            assert buffer.nbytes == 0
    loss.backward()
    assert sum(group._memory.nbytes for group in groups_of(model)) == 0


@on_ranks(2)
def test_what_autograd_saved_does_not_keep_freed_memory(mesh: DeviceMesh) -> None:
    model = same_model(lambda: TinyLM(depth=2))
    shard(model, mesh)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = loss_of(model, 0)
    group = next(group for group in groups_of(model) if group._module_fqn == "layers.0")
    storages = {
        buffer.flat.untyped_storage()._cdata: buffer
        for segment, buffer in zip(group._layout.segments, group._memory.buffers, strict=True)
        if segment.owner != mesh.get_local_rank()
    }
    aliases = [t for t in saved if t.untyped_storage()._cdata in storages]
    assert aliases  # of the transposed weights
    assert all(t.untyped_storage().nbytes() == 0 for t in aliases)
    before = {key: buffer.flat for key, buffer in storages.items()}
    loss.backward()
    assert all(storages[key].flat is flat for key, flat in before.items())
