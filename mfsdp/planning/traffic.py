"""What gathering and reducing a unit moves, and what replicas exchange."""

from collections import defaultdict
from dataclasses import dataclass

from mfsdp.planning.cost import Precision
from mfsdp.planning.records import MatrixShard, Role
from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["UnitTraffic", "replica_bytes", "unit_traffic"]


@dataclass(frozen=True, slots=True)
class UnitTraffic:
    """What one unit moves.

    Args:
        unit: its name; ``""`` is the root.
        gather_bytes: bytes of its full parameters, which each rank has to have for forward and for backward,
            its own part included.
        reduce_bytes: bytes of its full gradients.
        owners: number of ranks that own some of its matrices or tails.
        largest_share: part of those that the rank with most of it owns; ``1 / owners`` is even. 0.0 if the
            unit has only ``ROWS``.
    """

    unit: str
    gather_bytes: int
    reduce_bytes: int
    owners: int
    largest_share: float


def _itemsizes(entry: MatrixShard, precision: Precision) -> tuple[int, int]:
    """Bytes per element of parameter and gradient."""
    gradient = (precision.gradient or entry.dtype).itemsize
    return entry.dtype.itemsize, gradient if entry.trainable else 0


def unit_traffic(plan: ShardPlan, precision: Precision | None = None) -> list[UnitTraffic]:
    """The traffic of each unit, in the order of the plan.

    Args:
        plan: who owns what.
        precision: the dtype of gradients; by default that of each parameter.
    """
    precision = precision or Precision()
    gather: defaultdict[str, int] = defaultdict(int)
    reduce: defaultdict[str, int] = defaultdict(int)
    held: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for entry in plan.entries.values():
        parameter, gradient = _itemsizes(entry, precision)
        gather[entry.unit] += entry.numel * parameter
        reduce[entry.unit] += entry.numel * gradient
        if entry.role is Role.ROWS:
            continue
        for rank, part in entry.divide(entry.numel * parameter, plan.world_size):
            held[entry.unit][rank] += part
    found = []
    for unit in gather:
        owned = held[unit].values()
        share = max(owned) / sum(owned) if sum(owned) else 0.0
        found.append(UnitTraffic(unit, gather[unit], reduce[unit], len(owned), share))
    return found


def replica_bytes(plan: ShardPlan, precision: Precision | None = None) -> list[int]:
    """Bytes of gradients that each owner all-reduces with its replicas in a step, per rank; 0 without any.

    A ring all-reduce among ``G`` replicas sends ``2 (G - 1) / G`` times as much from every rank.
    """
    precision = precision or Precision()
    found = [0] * plan.world_size
    if plan.replicas == 1:
        return found
    for entry in plan.entries.values():
        _, gradient = _itemsizes(entry, precision)
        for rank, part in entry.divide(entry.numel * gradient, plan.world_size):
            found[rank] += part
    return found
