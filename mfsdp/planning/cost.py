"""What it costs to keep a parameter and to step it.

A :class:`CostModel` turns a parameter into bytes and floating-point operations. The planner knows nothing
else about an optimizer. One multiplication and one addition count as two operations.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import ParameterSpec, Role

__all__ = ["ADAMW_FLOPS", "CostModel", "MuonCost", "newton_schulz_flops"]

ADAMW_FLOPS = 14
"""Operations of AdamW for one element: decay 1, first moment 3, second moment 4, denominator 3, update 3."""


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Operations of ``steps`` quintic Newton-Schulz iterations on one matrix.

    With ``m = min(rows, columns)`` and ``n = max(rows, columns)``, an iteration computes the Gram matrix
    ``A = X X^T`` (``2 m^2 n``), its square (``2 m^3``) and ``(b A + c A^2) X`` (``2 m^2 n``). Terms of
    lower order are left out. Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024.
    """
    small, large = min(rows, columns), max(rows, columns)
    return steps * (4 * small * small * large + 2 * small**3)


class CostModel(ABC):
    """What keeping and stepping one parameter costs, over all ranks that have a part of it.

    A frozen parameter costs its own bytes and nothing else; implementations only see trainable ones.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the optimizer, with what distinguishes this model from others; it is part of the plan."""

    @abstractmethod
    def state_bytes(self, spec: ParameterSpec) -> int:
        """Bytes of optimizer state. Step counters of a few bytes are not counted."""

    @abstractmethod
    def flops(self, spec: ParameterSpec) -> int:
        """Floating-point operations of one optimizer step."""

    def resident_bytes(self, spec: ParameterSpec) -> int:
        """Bytes kept between steps: parameter, gradient and optimizer state."""
        parameter = spec.numel * spec.dtype.itemsize
        return 2 * parameter + self.state_bytes(spec) if spec.trainable else parameter

    def step_flops(self, spec: ParameterSpec) -> int:
        """Floating-point operations of one optimizer step; 0 for a frozen parameter."""
        return self.flops(spec) if spec.trainable else 0


@dataclass(frozen=True)
class MuonCost(CostModel):
    """Muon for ``MATRIX`` parameters (one momentum buffer), AdamW for all others (two moments).

    Args:
        ns_steps: Newton-Schulz iterations of a step.

    Raises:
        PlanError: ``ns_steps`` is negative.
    """

    ns_steps: int = 5

    def __post_init__(self) -> None:
        if self.ns_steps < 0:
            raise PlanError(f"ns_steps={self.ns_steps} must be 0 or more.")

    @property
    def name(self) -> str:
        return "muon" if self.ns_steps == 5 else f"muon(ns_steps={self.ns_steps})"

    def state_bytes(self, spec: ParameterSpec) -> int:
        buffers = 1 if spec.role is Role.MATRIX else 2
        return buffers * spec.numel * spec.dtype.itemsize

    def flops(self, spec: ParameterSpec) -> int:
        if spec.role is not Role.MATRIX:
            return ADAMW_FLOPS * spec.numel
        rows, columns = spec.shape
        return newton_schulz_flops(rows, columns, self.ns_steps)
