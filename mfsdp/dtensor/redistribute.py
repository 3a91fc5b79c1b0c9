"""Redistribution from, to and between owner placements: the table of :mod:`mfsdp.placements`, executed.

A redistribution over several mesh dimensions is a sequence of steps, each of which changes one thing and leaves a
valid placement behind:

1. *enter*: dimensions that become owner-placed (or change owner). Early, because it makes data smaller.
2. *plain*: dimensions without an owner on either side, by torch's own code, on the owner's coordinate alone.
3. *leave*: dimensions that stop being owner-placed. Before step 2 instead, if step 2 makes the data larger.

While a dimension is owner-placed, only the ranks at the owner's coordinate take part in the steps of the other
dimensions; their peers in those steps (a TP group, say) share that coordinate, so groups never split.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mfsdp.dtensor import transfer
from mfsdp.dtensor.layout import WireLayout
from mfsdp.dtensor.shapes import torch_local_shape
from mfsdp.dtensor.specs import (
    check_owners,
    dim_name,
    empty_shape,
    has_owner,
    holds,
    owners_of,
    replace_placements,
    without_owners,
)
from mfsdp.placements import is_owner

# torch's own, from before the seams replaced it: everything that involves no owner goes there
_torch_redistribute: Callable[..., Tensor] = _redistribute.redistribute_local_tensor

_REMEDY = (
    "See the transition table in mfsdp.placements; going through Replicate() works from every placement "
    "that torch can replicate."
)


def redistribute_local_tensor(
    local_tensor: Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    **torch_options: Any,
) -> Tensor:
    """torch's function of this name, extended to owner placements.

    Args:
        local_tensor: what this rank holds under ``current_spec``.
        async_op: the result may be an ``AsyncCollectiveTensor`` that waits when it is first used.

    Raises:
        NotImplementedError: a transition that does not exist, before anything is moved, on every rank.
        ValueError: an owner outside the mesh.
    """
    if not (has_owner(current_spec) or has_owner(target_spec)):
        return _torch_redistribute(local_tensor, current_spec, target_spec, async_op=async_op, **torch_options)
    mesh = current_spec.mesh
    if mesh != target_spec.mesh:
        raise NotImplementedError(f"redistribute from {mesh} to {target_spec.mesh}: both must be the same mesh.")
    check_owners(target_spec.placements, mesh, "redistribute")
    for mesh_dim, pair in enumerate(zip(current_spec.placements, target_spec.placements, strict=True)):
        _check_transition(*pair, mesh, mesh_dim)
    if mesh.get_coordinate() is None:
        return local_tensor
    state = _State(local_tensor, current_spec)
    for step in _steps(current_spec, target_spec):
        state = step(state)
    local = state.local
    if not async_op and isinstance(local, funcol.AsyncCollectiveTensor):
        local = local.wait()
    return local


@dataclass(frozen=True)
class _State:
    """A local tensor and the spec that it has so far."""

    local: Tensor
    spec: DTensorSpec

    def moved(self, local: Tensor, mesh_dim: int, placement: Placement) -> "_State":
        placements = list(self.spec.placements)
        placements[mesh_dim] = placement
        return replace(self, local=local, spec=replace_placements(self.spec, placements))

    def holds(self, except_dim: int | None = None) -> bool:
        """Whether this rank has data, whatever its coordinate on ``except_dim``."""
        owners = list(owners_of(self.spec.placements))
        if except_dim is not None:
            owners[except_dim] = None
        return holds(self.spec.mesh, tuple(owners))

    def empty_shape(self) -> tuple[int, ...]:
        return empty_shape(self.spec.tensor_meta.shape)  # type: ignore[union-attr]

    def empty(self) -> Tensor:
        return self.local.new_empty(self.empty_shape())

    def here(self, mesh_dim: int) -> int:
        return self.spec.mesh.get_coordinate()[mesh_dim]  # type: ignore[index]


_Step = Callable[[_State], _State]


def _check_transition(current: Placement, target: Placement, mesh: DeviceMesh, mesh_dim: int) -> None:
    if not (is_owner(current) or is_owner(target)) or (is_owner(current) and is_owner(target)):
        return
    other = target if is_owner(current) else current
    known = isinstance(other, Replicate) or _is_shard(other) or isinstance(other, Partial)
    if is_owner(current) and isinstance(other, Partial):
        known = is_sum(other)
    if not known:
        raise NotImplementedError(
            f"redistribute from {current!r} to {target!r} on {dim_name(mesh, mesh_dim)} is not implemented. {_REMEDY}"
        )


def is_sum(placement: Placement) -> bool:
    """Whether zeros on all ranks but one leave the value of that one: a sum, or the sum inside a norm."""
    return type(placement) in (Partial, _NormPartial) and placement.reduce_op == "sum"  # type: ignore[attr-defined]


def _is_shard(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


# Order of steps #


def _steps(current: DTensorSpec, target: DTensorSpec) -> list[_Step]:
    """The steps from one spec to the other; the same list on every rank."""
    pairs = list(zip(current.placements, target.placements, strict=True))
    enter = [dim for dim, (old, new) in enumerate(pairs) if is_owner(new) and old != new]
    leave = [dim for dim, (old, new) in enumerate(pairs) if is_owner(old) and not is_owner(new)]
    steps: list[_Step] = []

    # a tensor dimension that several mesh dimensions shard comes apart only from the inside
    nested = [dim for dim in enter if _shares_tensor_dim(pairs[dim][0], dim, current.placements)]
    middle = list(current.placements)
    for dim in nested:
        for other, placement in enumerate(current.placements):
            if _is_shard(placement) and placement.dim == current.placements[dim].dim:  # type: ignore[attr-defined]
                middle[other] = Replicate()
    if nested:
        steps.append(_plain_step(middle))
    for dim in enter:
        steps.append(_enter_step(dim, pairs[dim][1]))
        middle[dim] = pairs[dim][1]

    after_plain = [old if is_owner(old) else new for old, new in zip(middle, target.placements, strict=True)]
    leave_steps: list[_Step] = []
    for dim in leave:
        new = pairs[dim][1]
        if _is_shard(new) and (not isinstance(new, Shard) or _shares_tensor_dim(new, dim, middle, target.placements)):
            new = Replicate()  # torch's code splits it correctly afterwards
        leave_steps.append(_leave_step(dim, new))
    shrinks = _numel(current, after_plain) < _numel(current, middle)
    if shrinks:
        steps += [_plain_step(after_plain), *leave_steps]
    else:
        steps += leave_steps
    steps.append(_plain_step(target.placements))
    return steps


def _plain_step(placements: Sequence[Placement]) -> _Step:
    fixed = tuple(placements)
    return lambda state: _plain(state, fixed)


def _enter_step(mesh_dim: int, owner: Placement) -> _Step:
    return lambda state: _enter(state, mesh_dim, owner)


def _leave_step(mesh_dim: int, target: Placement) -> _Step:
    return lambda state: _leave(state, mesh_dim, target)


def _shares_tensor_dim(placement: Placement, mesh_dim: int, *states: Sequence[Placement]) -> bool:
    """Whether another mesh dimension shards, in one of ``states``, the tensor dimension of ``placement``."""
    if not _is_shard(placement):
        return False
    if not isinstance(placement, Shard):
        return True  # a strided shard exists only because of another mesh dimension
    return any(
        _is_shard(other) and other.dim == placement.dim  # type: ignore[attr-defined]
        for placements in states
        for index, other in enumerate(placements)
        if index != mesh_dim
    )


def _numel(spec: DTensorSpec, placements: Sequence[Placement]) -> int:
    """Elements of the largest shard: the same number on every rank, for decisions that all must take alike."""
    plain = without_owners(replace_placements(spec, placements))
    origin = [0] * plain.mesh.ndim
    shape, _ = torch_local_shape(plain.shape, plain.mesh.shape, origin, plain.placements, skip_offset=True)
    return math.prod(shape)


def _held_shape(spec: DTensorSpec) -> tuple[int, ...]:
    """Local shape at the owners' coordinates."""
    plain = without_owners(spec)
    return compute_local_shape_and_global_offset(plain.shape, plain.mesh, plain.placements, skip_offset=True)[0]


# The steps #


def _plain(state: _State, placements: Sequence[Placement]) -> _State:
    """Change the dimensions without owners by torch's own code, where there is data."""
    target = replace_placements(state.spec, placements)
    if target.placements == state.spec.placements:
        return state
    if state.holds():
        local = _torch_redistribute(state.local, without_owners(state.spec), without_owners(target))
    else:
        local = state.empty()
    return replace(state, local=local, spec=target)


def _enter(state: _State, mesh_dim: int, owner: Placement) -> _State:
    """Bring what a mesh dimension holds to ``owner``."""
    assert is_owner(owner)
    source = state.spec.placements[mesh_dim]
    local = state.local
    if is_owner(source) and source.owner == owner.owner:
        return state.moved(local, mesh_dim, owner)  # a new label
    if not state.holds(except_dim=mesh_dim):
        return state.moved(state.empty(), mesh_dim, owner)
    if is_owner(source):
        local = _send(state, mesh_dim, source.owner, owner.owner)
    elif isinstance(source, Shard):
        local = _gather(state, mesh_dim, source.dim, owner.owner)
    elif isinstance(source, Partial):
        local = _reduce(state, mesh_dim, source, owner.owner)
    elif state.here(mesh_dim) == owner.owner:
        local = local.clone()  # as Replicate to Shard does: the two must not share memory
    else:
        return state.moved(state.empty(), mesh_dim, owner)
    if state.here(mesh_dim) != owner.owner:
        # Made from what the collective returned, since in a compiled graph nothing may look unused on some ranks
        # only; and a copy, since it must not keep that memory.
        local = local.reshape(-1)[:0].reshape(state.empty_shape()).clone()
    return state.moved(local, mesh_dim, owner)


def _leave(state: _State, mesh_dim: int, target: Placement) -> _State:
    """Bring what the owner of a mesh dimension holds to ``target`` on that dimension."""
    source = state.spec.placements[mesh_dim]
    assert is_owner(source)
    if not state.holds(except_dim=mesh_dim):
        return state.moved(state.empty(), mesh_dim, target)
    is_root = state.here(mesh_dim) == source.owner
    if isinstance(target, Partial):
        local = state.local.clone() if is_root else state.local.new_zeros(_held_shape(state.spec))
    elif isinstance(target, Shard):
        local = _scatter(state, mesh_dim, target.dim, source.owner)
    else:
        local = _broadcast(state, mesh_dim, source.owner)
    return state.moved(local, mesh_dim, target)


def _broadcast(state: _State, mesh_dim: int, owner: int) -> Tensor:
    mesh, layout = state.spec.mesh, _layout(state.spec)
    if mesh.size(mesh_dim) == 1:
        return state.local
    if layout.numel == 0:
        return layout.empty(state.local)
    if state.here(mesh_dim) == owner:
        flat = transfer.broadcast(layout.flatten(state.local), None, mesh, mesh_dim, owner)
    else:
        flat = transfer.broadcast(None, state.local.new_empty(layout.numel), mesh, mesh_dim, owner)
    return layout.unflatten(flat)


def _send(state: _State, mesh_dim: int, source: int, destination: int) -> Tensor:
    mesh, layout, here = state.spec.mesh, _layout(state.spec), state.here(mesh_dim)
    if layout.numel == 0:
        return layout.empty(state.local)
    ranks = transfer.group_ranks(mesh, mesh_dim)
    send, receive = [0] * len(ranks), [0] * len(ranks)
    out = state.local.new_empty(0)
    if here == source:
        out, send[ranks[destination]] = layout.flatten(state.local), layout.numel
    if here == destination:
        receive[ranks[source]] = layout.numel
    received = transfer.exchange(out, send, receive, mesh, mesh_dim)
    return layout.unflatten(received) if here == destination else received


def _gather(state: _State, mesh_dim: int, tensor_dim: int, owner: int) -> Tensor:
    mesh = state.spec.mesh
    whole = list(_held_shape(_replicated(state.spec, mesh_dim)))
    if math.prod(whole) == 0:
        return state.local.new_empty(whole)
    is_root = state.here(mesh_dim) == owner
    sizes = _piece_sizes(whole, tensor_dim, mesh.size(mesh_dim))
    # the sharded dimension leads on the wire, so that the pieces of all ranks follow one another
    out = state.local.movedim(tensor_dim, 0).contiguous().view(-1)
    send = [0] * len(sizes)
    send[transfer.group_ranks(mesh, mesh_dim)[owner]] = out.numel()
    received = transfer.exchange(out, send, sizes if is_root else [0] * len(sizes), mesh, mesh_dim)
    if not is_root:
        return received
    leading = [whole[tensor_dim], *(n for dim, n in enumerate(whole) if dim != tensor_dim)]
    return received.view(leading).movedim(0, tensor_dim).contiguous()


def _scatter(state: _State, mesh_dim: int, tensor_dim: int, owner: int) -> Tensor:
    mesh = state.spec.mesh
    whole = list(_held_shape(state.spec))
    ranks = transfer.group_ranks(mesh, mesh_dim)
    mine = ranks[state.here(mesh_dim)]
    leading = [n for dim, n in enumerate(whole) if dim != tensor_dim]
    rows = _shard_sizes(whole[tensor_dim], len(ranks))[mine]
    if math.prod(whole) == 0:
        return state.local.new_empty([*whole[:tensor_dim], rows, *whole[tensor_dim + 1 :]])
    sizes = _piece_sizes(whole, tensor_dim, len(ranks))
    is_root = state.here(mesh_dim) == owner
    out = state.local.movedim(tensor_dim, 0).contiguous().view(-1) if is_root else state.local.new_empty(0)
    receive = [0] * len(ranks)
    receive[ranks[owner]] = sizes[mine]
    received = transfer.exchange(out, sizes if is_root else [0] * len(ranks), receive, mesh, mesh_dim)
    return received.view([rows, *leading]).movedim(0, tensor_dim).contiguous()


def _reduce(state: _State, mesh_dim: int, partial: Partial, owner: int) -> Tensor:
    mesh = state.spec.mesh
    if type(partial) is not Partial:
        # a reduction with its own arithmetic around it (a norm's): torch knows it, as an all-reduce
        return partial._reduce_value(state.local, mesh, mesh_dim)
    layout = _layout(state.spec)
    if layout.numel == 0 or mesh.size(mesh_dim) == 1:
        return state.local
    return layout.unflatten(transfer.reduce(layout.flatten(state.local), partial.reduce_op, mesh, mesh_dim, owner))


# Layout on the wire #


def _replicated(spec: DTensorSpec, mesh_dim: int) -> DTensorSpec:
    placements = list(spec.placements)
    placements[mesh_dim] = Replicate()
    return replace_placements(spec, placements)


def _shard_sizes(size: int, chunks: int) -> list[int]:
    """Sizes of ``torch.chunk``'s pieces, as ``Shard`` splits."""
    return [Shard.local_shard_size_and_offset(size, chunks, chunk)[0] for chunk in range(chunks)]


def _piece_sizes(whole: Sequence[int], tensor_dim: int, chunks: int) -> list[int]:
    """Elements of each shard of a tensor of shape ``whole``, by group rank: torch's order of shards."""
    rest = math.prod(size for dim, size in enumerate(whole) if dim != tensor_dim)
    return [size * rest for size in _shard_sizes(whole[tensor_dim], chunks)]


def _layout(spec: DTensorSpec) -> WireLayout:
    meta = spec.tensor_meta
    assert meta is not None
    return WireLayout.of(_held_shape(spec), meta.shape, meta.stride)
