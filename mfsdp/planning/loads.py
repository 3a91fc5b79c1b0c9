"""How much each rank has to keep and to do, and how even that is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import MatrixShard, Role

__all__ = ["Imbalance", "RankLoad", "imbalance_of", "loads_of"]


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank keeps between steps and does in the optimizer step.

    Args:
        resident_bytes: parameters, gradients and optimizer state.
        step_flops: floating-point operations of the optimizer step.
        matrices: number of ``MATRIX`` parameters that it owns.

    Raises:
        PlanError: a negative number.
    """

    resident_bytes: int = 0
    step_flops: int = 0
    matrices: int = 0

    def __post_init__(self) -> None:
        if self.resident_bytes < 0 or self.step_flops < 0 or self.matrices < 0:
            raise PlanError(f"a load must not be negative: {self}.")

    def __add__(self, other: "RankLoad") -> "RankLoad":
        return RankLoad(
            self.resident_bytes + other.resident_bytes,
            self.step_flops + other.step_flops,
            self.matrices + other.matrices,
        )


@dataclass(frozen=True, slots=True)
class Imbalance:
    """Largest load over mean load, per measure; 1.0 is even, and so is a measure that is 0 everywhere."""

    resident_bytes: float
    step_flops: float
    matrices: float


def loads_of(entries: Iterable[MatrixShard], world_size: int) -> tuple[RankLoad, ...]:
    """What each of ``world_size`` ranks has of ``entries``."""
    nbytes, flops, matrices = ([0] * world_size for _ in range(3))
    for entry in entries:
        if entry.owner is not None:
            nbytes[entry.owner] += entry.resident_bytes
            flops[entry.owner] += entry.step_flops
            matrices[entry.owner] += entry.role is Role.MATRIX
            continue
        for rank, part in entry.divide(entry.resident_bytes, world_size):
            nbytes[rank] += part
            matrices[rank] += entry.role is Role.MATRIX
        for rank, part in entry.divide(entry.step_flops, world_size):
            flops[rank] += part
    return tuple(map(RankLoad, nbytes, flops, matrices))


def _max_over_mean(values: Sequence[int]) -> float:
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def imbalance_of(loads: Sequence[RankLoad]) -> Imbalance:
    """The imbalance of ``loads``, one entry per rank."""
    return Imbalance(
        resident_bytes=_max_over_mean([load.resident_bytes for load in loads]),
        step_flops=_max_over_mean([load.step_flops for load in loads]),
        matrices=_max_over_mean([load.matrices for load in loads]),
    )
