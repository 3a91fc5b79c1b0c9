"""The same model, ranks and optimizer under four ways to shard them.

- ``zero3``: FSDP2 with the optimizer as it is. Everything is sharded evenly by rows. In the step every rank
  gathers each matrix gradient in turn and computes the whole update, keeping its rows.
- ``zero1-owner``: parameters and gradients on all ranks; master copies and optimizer state with the owner,
  who sends the new parameters to all.
- ``gather-once``: FSDP2; at the start of the step all matrix gradients are gathered, on all ranks, from a buffer
  that holds a rank's own rows.
- ``mfsdp``: what the plan says.

Bytes moved are those that the busiest rank receives in one optimizer step, at least: gathering ``n`` bytes
from ``W`` ranks receives ``n (W - 1) / W``. Elementwise steps are sharded evenly, or as planned, throughout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mfsdp.planning.cost import ADAMW_FLOPS, CostModel, Stepped
from mfsdp.planning.records import ParameterSpec, Role, rows_of_rank
from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["Scheme", "compare", "step_peaks"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to shard.

    Args:
        name: see above.
        resident_bytes: what the fullest rank keeps between steps.
        peak_bytes: the most that some rank holds during the step.
        moved_bytes: bytes that the busiest rank receives in the step.
        step_flops: operations of the busiest rank.
    """

    name: str
    resident_bytes: int
    peak_bytes: int
    moved_bytes: int
    step_flops: int


def step_peaks(plan: ShardPlan, cost_model: CostModel) -> list[int]:
    """The most bytes that each rank holds during the optimizer step: what it keeps, and what the step needs.

    The matrix optimizer steps first, and then everything elementwise at once.
    """
    matrices: list[list[Stepped]] = [[] for _ in range(plan.world_size)]
    elementwise = [0] * plan.world_size
    for entry in plan.entries.values():
        spec = entry.spec
        if not spec.trainable:
            continue
        if entry.role is not Role.MATRIX:
            for rank, part in entry.divide(cost_model.transient_bytes(spec), plan.world_size):
                elementwise[rank] += part
            continue
        itemsize = cost_model.precision.state_size(spec.dtype)
        for count, rows, columns in spec.matrices():
            for rank, part in entry.divide(count, plan.world_size):
                matrices[rank].append(Stepped(part, rows, columns, itemsize))
    return [
        load.resident_bytes + max(cost_model.rank_transient(owned), more)
        for load, owned, more in zip(plan.loads(), matrices, elementwise, strict=True)
    ]


@dataclass(frozen=True)
class _Totals:
    """Sums over the model that the evenly sharded schemes need; bytes unless said otherwise."""

    even: int
    gradients: int
    largest_gradient: int
    largest_transient: int
    elementwise_transient: int
    replicated: int
    parameters: int
    flops: int


def _totals(specs: Sequence[ParameterSpec], cost_model: CostModel, ranks: int) -> _Totals:
    precision = cost_model.precision
    even = replicated = parameters = flops = elementwise = elements = 0
    gradients, transients = [0], [0]
    for spec in specs:
        rows = max(1, spec.shape[0] if spec.shape else 1)
        even += cost_model.resident_bytes(spec) * rows_of_rank(rows, 0, ranks) // rows
        gradient = (precision.gradient or spec.dtype).itemsize if spec.trainable else 0
        parameters += spec.numel * spec.dtype.itemsize
        replicated += spec.numel * (spec.dtype.itemsize + gradient)
        if spec.role is Role.MATRIX:
            gradients.append(spec.numel * gradient)
            transients.append(cost_model.transient_bytes(spec))
            flops += cost_model.step_flops(spec)
        else:
            elementwise += cost_model.transient_bytes(spec)
            elements += spec.numel if spec.trainable else 0
    return _Totals(
        even,
        sum(gradients),
        max(gradients),
        max(transients),
        elementwise // ranks,
        replicated,
        parameters,
        flops + ADAMW_FLOPS * elements // ranks,
    )


def compare(plan: ShardPlan, cost_model: CostModel) -> list[Scheme]:
    """The four schemes for the model, ranks and optimizer of ``plan``; per replica, where there are several.

    Args:
        plan: who owns what.
        cost_model: the one that the plan was made with.
    """
    specs = [entry.spec for entry in plan.entries.values()]
    ranks = plan.world_size
    totals = _totals(specs, cost_model, ranks)
    loads = plan.loads()
    owned = max(load.resident_bytes for load in loads)
    # the owner's own part of parameters and gradients is in ``owned`` already
    zero1 = max(
        load.resident_bytes + totals.replicated - kept
        for load, kept in zip(loads, _kept(plan, cost_model), strict=True)
    )
    peaks = step_peaks(plan, cost_model)
    transient = max(peak - load.resident_bytes for peak, load in zip(peaks, loads, strict=True))
    busiest = max(load.step_flops for load in loads)

    def received(nbytes: int) -> int:
        return nbytes * (ranks - 1) // ranks

    whole = max(totals.largest_gradient + totals.largest_transient, totals.elementwise_transient)
    own_rows = totals.gradients // ranks
    at_once = max(totals.gradients + max(own_rows, totals.largest_transient), totals.elementwise_transient)
    return [
        Scheme("zero3", totals.even, totals.even + whole, received(totals.gradients), totals.flops),
        Scheme("zero1-owner", zero1, zero1 + transient, received(totals.parameters), busiest),
        Scheme("gather-once", totals.even, totals.even + at_once, received(totals.gradients), totals.flops),
        Scheme("mfsdp", owned, max(peaks), 0, busiest),
    ]


def _kept(plan: ShardPlan, cost_model: CostModel) -> list[int]:
    """Bytes of parameters and gradients that each rank owns."""
    precision = cost_model.precision
    found = [0] * plan.world_size
    for entry in plan.entries.values():
        gradient = (precision.gradient or entry.dtype).itemsize if entry.trainable else 0
        for rank, part in entry.divide(entry.numel * (entry.dtype.itemsize + gradient), plan.world_size):
            found[rank] += part
    return found
