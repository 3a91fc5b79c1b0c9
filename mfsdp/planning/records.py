"""What a plan says about one parameter: its role before it is placed, and its shard after."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from mfsdp.planning.dtypes import dtype_name
from mfsdp.planning.errors import PlanError

__all__ = ["MatrixShard", "ParameterSpec", "Role", "rows_of_rank"]


class Role(StrEnum):
    """What a parameter is to the optimizer."""

    MATRIX = "matrix"
    """Lives whole on one rank and is stepped there by the matrix optimizer."""
    TAIL = "tail"
    """Not a matrix: lives whole on one rank, packed with its neighbours, stepped elementwise."""
    ROWS = "rows"
    """Large and not a matrix (an embedding, an output head): split by rows over all ranks."""


def _check_shape(name: str, role: Role, shape: tuple[int, ...]) -> None:
    if not all(type(size) is int and size >= 0 for size in shape):
        raise PlanError(f"{name}: shape {shape!r} must be a tuple of sizes, each an int of 0 or more.")
    if role is Role.MATRIX and len(shape) != 2:
        raise PlanError(
            f"{name}: a parameter of shape {shape} cannot have the role MATRIX, which is for 2-D parameters; "
            f"give it the role TAIL."
        )
    if role is Role.ROWS and not shape:
        raise PlanError(f"{name}: a 0-d parameter has no rows to shard; give it the role TAIL.")


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter as the planner sees it, before it has an owner.

    Args:
        name: fully qualified name; for a parameter with several names (tied), the first.
        role: what it is to the optimizer.
        shape: its global shape, whatever it is sharded by at the moment.
        dtype: floating-point dtype in which it is stored.
        unit: name of the module whose ``fully_shard`` call is expected to manage it; ``""`` is the root.
        aliases: its other names, if it is tied.
        trainable: False for a frozen parameter, which has neither gradient nor optimizer state.

    Raises:
        PlanError: no optimizer can step such a parameter in that role.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    unit: str = ""
    aliases: tuple[str, ...] = ()
    trainable: bool = True

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise PlanError(
                f"{self.name}: a parameter of dtype {dtype_name(self.dtype)} cannot be planned, only "
                f"floating-point ones can. Register it as a buffer, or convert it."
            )
        _check_shape(self.name, self.role, self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """The plan's record for one parameter.

    Args:
        name: fully qualified name in the planned model; for a tied parameter, the first of its names.
        role: what it is to the optimizer.
        owner: coordinate of the owning rank on the last mesh dimension; None for ``ROWS``, which all own.
        shape: global shape.
        dtype: dtype in which it is stored.
        resident_bytes: bytes that its owner keeps between steps: parameter, gradient and optimizer state
            (of a ``ROWS`` parameter: the bytes of all ranks together).
        step_flops: floating-point operations of its optimizer step (of ``ROWS``: of all ranks together).
        unit: name of the module that is gathered and freed together with it; ``""`` is the root.
        aliases: its other names, if it is tied.

    Raises:
        PlanError: the values contradict each other; the message names the parameter.
    """

    name: str
    role: Role
    owner: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    resident_bytes: int
    step_flops: int
    unit: str
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise PlanError(f"{self.name}: dtype {dtype_name(self.dtype)} is not a floating-point dtype.")
        _check_shape(self.name, self.role, self.shape)
        if self.resident_bytes < 0 or self.step_flops < 0:
            raise PlanError(
                f"{self.name}: resident_bytes={self.resident_bytes} and step_flops={self.step_flops} "
                f"must be 0 or more."
            )
        if self.role is Role.ROWS:
            if self.owner is not None:
                raise PlanError(
                    f"{self.name}: ROWS belong to all ranks; owner must be None, not {self.owner}."
                )
        elif type(self.owner) is not int or self.owner < 0:
            raise PlanError(
                f"{self.name}: a {self.role.name} parameter needs an owner of 0 or more, not {self.owner!r}."
            )

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole parameter alone, without gradient and optimizer state."""
        return self.numel * self.dtype.itemsize


def rows_of_rank(rows: int, rank: int, world_size: int) -> int:
    """How many of ``rows`` rows ``Shard(0)`` gives to ``rank``: equal chunks, the last ones cut short."""
    chunk = -(-rows // world_size)
    return max(0, min(chunk, rows - rank * chunk))
