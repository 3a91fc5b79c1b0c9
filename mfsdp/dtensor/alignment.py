"""R1's premise and R2's exceptions: where the operands of an op must be before the owner can run it alone.

An op can run owner-local on a mesh dimension if the operands that have an owner there agree on it and all
others are replicated there. Otherwise operands move first, by the rules in this file and nowhere else:

- an op that writes to an operand keeps that operand where it is, and the others come to it;
- ``stack`` and ``cat`` of different owners go through a ``Partial`` that costs nothing to enter: the owner keeps its
  value, the others hold zeros. It is the kind that some operand already has on some mesh dimension (a norm's, say),
  since torch refuses two kinds in one tensor, else ``Partial("sum")``. Where operands have several kinds, or one for
  which zeros are not neutral (the maximum norm's), the owned ones are replicated together by one collective
  (:func:`mfsdp.dtensor.moving.replicated_together`);
- any other op over different owners, or over owned and sharded operands, sees the owned ones replicated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import Placement

from mfsdp.dtensor.redistribute import is_sum
from mfsdp.dtensor.specs import Owners, dim_name
from mfsdp.placements import is_owner

CONCATENATIONS = {torch.ops.aten.cat.default, torch.ops.aten.stack.default}


@dataclass(frozen=True)
class Operand:
    """One tensor argument of an op: its spec, and whether the op writes to it."""

    spec: DTensorSpec
    written: bool


@dataclass(frozen=True)
class Alignment:
    """Where the operands of an op go, and on which mesh dimensions it is then executed by an owner.

    Attributes:
        owners: per mesh dimension, the owner placement of the execution and of its outputs, or None.
        placements: per operand, where it must be; equal to what it has if nothing moves.
        moves: whether some operand is elsewhere.
    """

    owners: Owners
    placements: tuple[tuple[Placement, ...], ...]
    moves: bool

    def replicates_owned(self, specs: Sequence[DTensorSpec]) -> bool:
        """Whether an operand leaves its owner for all ranks; ``specs`` are those of the operands."""
        return any(
            is_owner(old) and isinstance(new, Replicate)
            for spec, placements in zip(specs, self.placements, strict=True)
            for old, new in zip(spec.placements, placements, strict=True)
        )


def align(op: OpOverload, operands: Sequence[Operand]) -> Alignment:
    """The alignment of an op with at least one owned operand.

    Raises:
        RuntimeError: operands on different meshes.
        NotImplementedError: the op writes to tensors of different owners.
    """
    mesh = operands[0].spec.mesh
    for operand in operands:
        if operand.spec.mesh != mesh:
            raise RuntimeError(f"{op}: operands are on different meshes, {mesh} and {operand.spec.mesh}.")
    meeting = _concatenation_partial(operands) if op in CONCATENATIONS else None
    columns = [_align_dim(op, operands, mesh_dim, meeting) for mesh_dim in range(mesh.ndim)]
    placements = tuple(zip(*(column for _, column in columns), strict=True))
    return Alignment(
        owners=tuple(owner for owner, _ in columns),
        placements=placements,
        moves=any(new != o.spec.placements for new, o in zip(placements, operands, strict=True)),
    )


def _align_dim(
    op: OpOverload, operands: Sequence[Operand], mesh_dim: int, meeting: Placement | None
) -> tuple[Placement | None, list[Placement]]:
    """The owner of the execution on one mesh dimension, and what every operand must have there."""
    here = [operand.spec.placements[mesh_dim] for operand in operands]
    owned = [placement for placement in here if is_owner(placement)]
    if not owned:
        return None, here
    written = [operand for operand in operands if operand.written]
    if written:
        return _align_to_written(op, operands, written, mesh_dim)
    agree = all(placement.owner == owned[0].owner for placement in owned)
    if agree and all(is_owner(placement) or isinstance(placement, Replicate) for placement in here):
        return owned[0], here
    if any(not (is_owner(p) or isinstance(p, Partial | Replicate)) for p in here):
        meeting = None
    return None, [(meeting or Replicate()) if is_owner(placement) else placement for placement in here]


def _align_to_written(
    op: OpOverload, operands: Sequence[Operand], written: Sequence[Operand], mesh_dim: int
) -> tuple[Placement | None, list[Placement]]:
    anchor = written[0].spec.placements[mesh_dim]
    shape = written[0].spec.shape
    if not is_owner(anchor):
        for operand in written:
            _check_same_place(op, written[0], operand, mesh_dim)
        # the written tensor stays; an owned operand of its shape goes straight to where it is
        direct = [o.spec.shape == shape and not isinstance(anchor, Partial) for o in operands]
        return None, [
            (anchor if straight else Replicate())
            if is_owner(o.spec.placements[mesh_dim])
            else o.spec.placements[mesh_dim]
            for o, straight in zip(operands, direct, strict=True)
        ]
    targets: list[Placement] = []
    for operand in operands:
        placement = operand.spec.placements[mesh_dim]
        stays = isinstance(placement, Replicate) or (is_owner(placement) and placement.owner == anchor.owner)
        if operand.written:
            _check_same_place(op, written[0], operand, mesh_dim)
        targets.append(placement if stays else anchor)
    return anchor, targets


def _check_same_place(op: OpOverload, first: Operand, other: Operand, mesh_dim: int) -> None:
    mine, theirs = first.spec.placements[mesh_dim], other.spec.placements[mesh_dim]
    if is_owner(mine) or is_owner(theirs):
        same = is_owner(mine) and is_owner(theirs) and mine.owner == theirs.owner
        if not same:
            raise NotImplementedError(
                f"{op} writes to tensors that are placed differently, {mine!r} and {theirs!r} on "
                f"{dim_name(first.spec.mesh, mesh_dim)}, so no one rank can run it. Redistribute one of them to the "
                f"placement of the other first."
            )


def _concatenation_partial(operands: Sequence[Operand]) -> Placement | None:
    kinds = {p for operand in operands for p in operand.spec.placements if isinstance(p, Partial)}
    meeting = kinds.pop() if kinds else Partial("sum")
    return meeting if is_sum(meeting) and not kinds else None
