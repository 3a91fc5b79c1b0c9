"""What it costs to keep a parameter and to step it.

A :class:`CostModel` turns a parameter into bytes and floating-point operations; the planner knows nothing
else about an optimizer. There is one implementation per optimizer here, and writing another takes three
methods. One multiplication and one addition count as two operations, and terms of lower order than a matrix
product are left out where there is a matrix product.

Below, a matrix is ``(m, n)``; where only the smaller and the larger of the two matter they are ``s`` and ``l``.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch

from mfsdp.planning.dtypes import dtype_name
from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import ParameterSpec, Role

__all__ = [
    "ADAMW_FLOPS",
    "COST_MODELS",
    "AdamWCost",
    "CostModel",
    "MuonCost",
    "Precision",
    "ShampooCost",
    "SoapCost",
    "Stepped",
    "newton_schulz_flops",
]

ADAMW_FLOPS = 14
"""Operations of AdamW for one element: decay 1, first moment 3, second moment 4, denominator 3, update 3."""

EIGH_FLOPS = 9
"""``eigh`` of a ``(k, k)`` matrix with vectors takes about ``9 k^3`` operations (Golub and Van Loan, "Matrix
Computations", 4th edition, section 8.3: tridiagonal QR with accumulation)."""


@dataclass(frozen=True)
class Precision:
    """The dtypes in which things are kept beside the parameter, which has its own.

    Args:
        master: dtype of a second copy, which the optimizer steps; None if there is none.
        gradient: dtype in which gradients are kept; by default the parameter's.
        state: dtype of the optimizer state; by default that of the master copy, or the parameter's.
    """

    master: torch.dtype | None = None
    gradient: torch.dtype | None = None
    state: torch.dtype | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            dtype = getattr(self, entry.name)
            if dtype is not None and not dtype.is_floating_point:
                raise PlanError(f"{entry.name}={dtype}: only floating-point dtypes can be kept.")

    def __str__(self) -> str:
        chosen = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        return ", ".join(f"{name}={dtype_name(dtype)}" for name, dtype in chosen if dtype is not None)

    def kept_bytes(self, dtype: torch.dtype, trainable: bool) -> int:
        """Bytes per element of parameter, master copy and gradient."""
        if not trainable:
            return dtype.itemsize
        master = self.master.itemsize if self.master else 0
        return dtype.itemsize + master + (self.gradient or dtype).itemsize

    def state_size(self, dtype: torch.dtype) -> int:
        """Bytes per element of a state tensor."""
        return (self.state or self.master or dtype).itemsize


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Operations of ``steps`` quintic Newton-Schulz iterations on one matrix: ``steps (4 s^2 l + 2 s^3)``.

    An iteration computes the Gram matrix ``A = X X^T`` (``2 s^2 l``), its square (``2 s^3``) and
    ``(b A + c A^2) X`` (``2 s^2 l``). Source: Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024.
    """
    small, large = min(rows, columns), max(rows, columns)
    return steps * (4 * small * small * large + 2 * small**3)


@dataclass(frozen=True, slots=True)
class Stepped:
    """Matrices that lie together in one parameter and are stepped by one rank.

    Args:
        count: how many.
        rows, columns: the shape of each.
        itemsize: bytes per element of the tensor that is stepped.
    """

    count: int
    rows: int
    columns: int
    itemsize: int

    @property
    def numel(self) -> int:
        """Number of elements of all of them."""
        return self.count * self.rows * self.columns


def _over_matrices(spec: ParameterSpec, cost: Callable[[int, int], int]) -> int:
    """The sum of ``cost(rows, columns)`` over the logical matrices of a parameter."""
    if spec.split is None:  # most of a hundred thousand parameters
        return cost(spec.shape[0], spec.shape[1])
    return sum(count * cost(rows, columns) for count, rows, columns in spec.matrices())


@dataclass(frozen=True)
class CostModel(ABC):
    """What keeping and stepping one parameter costs, over all ranks that have a part of it.

    ``MATRIX`` parameters are stepped by the matrix optimizer that a subclass describes, one logical matrix
    at a time; all others by AdamW, elementwise.

    Args:
        precision: the dtypes in which things are kept.
    """

    precision: Precision = field(default_factory=Precision, kw_only=True)

    @property
    @abstractmethod
    def optimizer(self) -> str:
        """Name of the optimizer and of the options that its costs depend on."""

    @abstractmethod
    def matrix_state(self, rows: int, columns: int) -> int:
        """Elements of state that the optimizer keeps for one matrix. Step counters are not counted."""

    @abstractmethod
    def matrix_flops(self, rows: int, columns: int) -> int:
        """Operations of one step of one matrix; work that is done every k steps counts with 1/k."""

    @abstractmethod
    def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
        """Bytes that are alive at once while one matrix is stepped, beside what is kept.

        Args:
            itemsize: bytes per element of the tensor that is stepped.
        """

    def rank_transient(self, matrices: Sequence[Stepped]) -> int:
        """Bytes alive at once while one rank steps ``matrices``, beside what is kept; one by one unless overridden."""
        return max(
            (self.matrix_transient(matrix.rows, matrix.columns, matrix.itemsize) for matrix in matrices), default=0
        )

    @property
    def name(self) -> str:
        """What the plan records about the cost model it was made with."""
        precision = str(self.precision)
        return f"{self.optimizer} ({precision})" if precision else self.optimizer

    def resident_bytes(self, spec: ParameterSpec) -> int:
        """Bytes kept between steps: parameter, master copy, gradient and optimizer state."""
        kept = spec.numel * self.precision.kept_bytes(spec.dtype, spec.trainable)
        if not spec.trainable:
            return kept
        if spec.role is Role.MATRIX:
            elements = _over_matrices(spec, self.matrix_state)
        else:
            elements = 2 * spec.numel
        return kept + elements * self.precision.state_size(spec.dtype)

    def step_flops(self, spec: ParameterSpec) -> int:
        """Floating-point operations of one optimizer step; 0 for a frozen parameter."""
        if not spec.trainable:
            return 0
        if spec.role is not Role.MATRIX:
            return ADAMW_FLOPS * spec.numel
        return _over_matrices(spec, self.matrix_flops)

    def transient_bytes(self, spec: ParameterSpec) -> int:
        """Bytes alive at once while the parameter is stepped, beside what is kept.

        Logical matrices are stepped one after the other. AdamW makes one temporary, the denominator.
        """
        if not spec.trainable:
            return 0
        itemsize = self.precision.state_size(spec.dtype)
        if spec.role is not Role.MATRIX:
            return spec.numel * itemsize
        return max(self.matrix_transient(rows, columns, itemsize) for _, rows, columns in spec.matrices())


@dataclass(frozen=True)
class MuonCost(CostModel):
    """Muon: one momentum buffer, and Newton-Schulz in 16 bits.

    Transient, of one matrix: the update that goes into Newton-Schulz, in the stepped dtype; two copies of it and
    two Gram matrices ``(s, s)`` in 16 bits, which is what an iteration holds while it makes the next iterate.

    Transient, of all matrices of a rank: as :class:`mfsdp.optim.Muon` does it. The memory for the iteration is
    that of the largest matrix, used again for each, and freed when all are stepped; beside it there is the
    update, and a copy in 16 bits of one that is tall, to be transposed. With ``batched=True`` read batch for
    matrix: of matrices of one shape, up to transposition; with ``foreach`` there are the updates of all of a batch.

    Args:
        ns_steps: Newton-Schulz iterations of a step.
        batch_elements: a batch has at most so many elements, or is one parameter's; 0 without batches.
        foreach: whether the elementwise work is done for all matrices of a batch at once.

    Raises:
        PlanError: a negative number.
    """

    ns_steps: int = 5
    batch_elements: int = 0
    foreach: bool = False

    def __post_init__(self) -> None:
        if self.ns_steps < 0 or self.batch_elements < 0:
            raise PlanError(f"ns_steps={self.ns_steps}, batch_elements={self.batch_elements} must be 0 or more.")

    @property
    def optimizer(self) -> str:
        return "muon" if self.ns_steps == 5 else f"muon(ns_steps={self.ns_steps})"

    def matrix_state(self, rows: int, columns: int) -> int:
        return rows * columns

    def matrix_flops(self, rows: int, columns: int) -> int:
        return newton_schulz_flops(rows, columns, self.ns_steps)

    def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
        return rows * columns * (itemsize + 2 * 2) + 2 * 2 * min(rows, columns) ** 2

    def rank_transient(self, matrices: Sequence[Stepped]) -> int:
        updates = tall_copies = iterates = squares = 0
        for batch in _batches(matrices, self.batch_elements):
            # else one update at a time: each is read before the next one is made
            at_once = sum if self.foreach else max
            updates = max(updates, at_once(matrix.numel * matrix.itemsize for matrix in batch))
            tall_copies = max([tall_copies, *(matrix.numel for matrix in batch if matrix.rows > matrix.columns)])
            iterates = max(iterates, sum(matrix.numel for matrix in batch))
            squares = max(squares, sum(matrix.count * min(matrix.rows, matrix.columns) ** 2 for matrix in batch))
        return updates + 2 * (tall_copies + 2 * iterates + 2 * squares)


def _batches(matrices: Sequence[Stepped], most: int) -> Iterator[list[Stepped]]:
    """Matrices of one shape, up to transposition, in batches of at most ``most`` elements or one entry."""
    shapes: defaultdict[tuple[int, ...], list[Stepped]] = defaultdict(list)
    for matrix in matrices:
        if matrix.numel:
            shapes[tuple(sorted((matrix.rows, matrix.columns)))].append(matrix)
    for alike in shapes.values():
        batch: list[Stepped] = []
        for matrix in alike:
            if batch and sum(other.numel for other in batch) + matrix.numel > most:
                yield batch
                batch = []
            batch.append(matrix)
        yield batch


@dataclass(frozen=True)
class _Preconditioned(CostModel):
    """What Shampoo and SOAP share: a factor ``(k, k)`` for each side that is not too large.

    Args:
        interval: steps between two updates of roots or bases.
        max_preconditioner_dim: a side longer than this has no factor.
    """

    interval: int = 10
    max_preconditioner_dim: int = 8192

    def __post_init__(self) -> None:
        if self.interval < 1 or self.max_preconditioner_dim < 0:
            raise PlanError(
                f"interval={self.interval} must be 1 or more, max_preconditioner_dim="
                f"{self.max_preconditioner_dim} 0 or more."
            )

    def options(self) -> str:
        """The options that costs depend on, as part of the name."""
        return f"(interval={self.interval}, max_preconditioner_dim={self.max_preconditioner_dim})"

    def sides(self, rows: int, columns: int) -> list[int]:
        """The lengths of the sides that have a factor."""
        return [side for side in (rows, columns) if side <= self.max_preconditioner_dim]


@dataclass(frozen=True)
class ShampooCost(_Preconditioned):
    """Shampoo with grafting onto Adam.

    State: for each side ``k`` the factor and its root, ``2 k^2``; momentum and the second moment of the
    graft, ``2 m n``. Operations: for each side the factor's update ``2 k m n`` and the root applied
    ``2 k m n``, and every ``interval`` steps the root itself, ``9 k^3`` for ``eigh`` and ``2 k^3`` to put it
    together; AdamW's for the graft. Source: Gupta, Koren and Singer, "Shampoo: Preconditioned Stochastic
    Tensor Optimization", 2018; Anil et al., "Scalable Second Order Optimization for Deep Learning", 2020.

    Transient: the preconditioned update and its half-way product, ``2 m n``, or while a root is made three
    matrices of the largest side, ``3 k^2``, whichever is more.
    """

    @property
    def optimizer(self) -> str:
        return "shampoo" + self.options()

    def matrix_state(self, rows: int, columns: int) -> int:
        return 2 * rows * columns + sum(2 * side**2 for side in self.sides(rows, columns))

    def matrix_flops(self, rows: int, columns: int) -> int:
        flops = ADAMW_FLOPS * rows * columns
        for side in self.sides(rows, columns):
            flops += 4 * side * rows * columns + (EIGH_FLOPS + 2) * side**3 // self.interval
        return flops

    def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
        largest = max(self.sides(rows, columns), default=0)
        return itemsize * max(2 * rows * columns, 3 * largest**2)


@dataclass(frozen=True)
class SoapCost(_Preconditioned):
    """SOAP: Adam in the eigenbasis of Shampoo's factors.

    State: for each side ``k`` the factor and its basis, ``2 k^2``; two moments, ``2 m n``. Operations: for
    each side the factor's update ``2 k m n``; gradient and momentum rotated and the update rotated back,
    ``6 k m n``; and every ``interval`` steps the basis by one power iteration and QR, ``2 k^3 + 8/3 k^3``;
    AdamW's in the basis. Source: Vyas et al., "SOAP: Improving and Stabilizing Shampoo using Adam", 2024,
    algorithm 3; Golub and Van Loan, section 5.2, for QR with its factor formed.

    Transient: the rotated gradient, the rotated momentum and the update, ``3 m n``, or while a basis is made
    three matrices of the largest side, ``3 k^2``, whichever is more.
    """

    @property
    def optimizer(self) -> str:
        return "soap" + self.options()

    def matrix_state(self, rows: int, columns: int) -> int:
        return 2 * rows * columns + sum(2 * side**2 for side in self.sides(rows, columns))

    def matrix_flops(self, rows: int, columns: int) -> int:
        flops = ADAMW_FLOPS * rows * columns
        for side in self.sides(rows, columns):
            flops += 8 * side * rows * columns + 14 * side**3 // (3 * self.interval)
        return flops

    def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
        largest = max(self.sides(rows, columns), default=0)
        return itemsize * max(3 * rows * columns, 3 * largest**2)


@dataclass(frozen=True)
class AdamWCost(CostModel):
    """AdamW for matrices as for everything else: two moments, and the denominator as the only temporary."""

    @property
    def optimizer(self) -> str:
        return "adamw"

    def matrix_state(self, rows: int, columns: int) -> int:
        return 2 * rows * columns

    def matrix_flops(self, rows: int, columns: int) -> int:
        return ADAMW_FLOPS * rows * columns

    def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
        return rows * columns * itemsize


COST_MODELS: dict[str, type[CostModel]] = {
    "adamw": AdamWCost,
    "muon": MuonCost,
    "shampoo": ShampooCost,
    "soap": SoapCost,
}
"""The cost model of each optimizer that the library has, by the optimizer's name."""
