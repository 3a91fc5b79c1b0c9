"""What a plan says about one parameter: its role before it is placed, and its shard after."""

import math
from dataclasses import dataclass
from enum import StrEnum

import torch

from mfsdp.planning.dtypes import dtype_name
from mfsdp.planning.errors import PlanError
from mfsdp.planning.split import Split

__all__ = ["MatrixShard", "ParameterSpec", "Part", "Role", "rows_of_rank"]


class Role(StrEnum):
    """What a parameter is to the optimizer."""

    MATRIX = "matrix"
    """Lives whole on one rank and is stepped there by the matrix optimizer."""
    TAIL = "tail"
    """Not a matrix: lives whole on one rank, packed with its neighbours, stepped elementwise."""
    ROWS = "rows"
    """Large and not a matrix (an embedding, an output head): split by rows over all ranks."""


def _check(name: str, role: Role, shape: tuple[int, ...], dtype: torch.dtype, split: Split | None) -> None:
    if not dtype.is_floating_point:
        raise PlanError(
            f"{name}: a parameter of dtype {dtype_name(dtype)} cannot be planned, only floating-point ones can. "
            f"Register it as a buffer, or convert it."
        )
    for size in shape:  # a plan may have a hundred thousand entries: no generator here
        if type(size) is not int or size < 0:
            raise PlanError(f"{name}: shape {shape!r} must be a tuple of sizes, each an int of 0 or more.")
    if role is Role.MATRIX:
        if split is None and len(shape) != 2:
            raise PlanError(
                f"{name}: a parameter of shape {shape} is not a matrix by itself. Say which matrices it holds "
                f"(splits={{{name!r}: Stack()}} for a stack of them, Flatten() for a convolution), or give it the "
                f"role TAIL."
            )
    elif split is not None:
        raise PlanError(f"{name}: only a MATRIX parameter has logical matrices, not a {role.name} one.")
    if split is not None and split.numel != math.prod(shape):
        raise PlanError(f"{name}: {split} does not describe a parameter of shape {shape}.")
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
        split: its logical matrices, if it is not simply one.

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
    split: Split | None = None

    def __post_init__(self) -> None:
        _check(self.name, self.role, self.shape, self.dtype, self.split)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(how many, rows, columns) of its logical matrices, equal ones together as far as they are blocks."""
        if self.split is not None:
            return self.split.shapes()
        return ((1, self.shape[0], self.shape[1]),) if self.role is Role.MATRIX else ()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a stack of matrices: indices ``start`` to ``stop`` of dimension 0, on ``owner``."""

    owner: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class MatrixShard:
    """The plan's record for one parameter.

    Args:
        name: fully qualified name in the planned model; for a tied parameter, the first of its names.
        role: what it is to the optimizer.
        owner: coordinate of the owning rank on the last mesh dimension; None for ``ROWS``, which all own, and
            for a stack of matrices that is spread over several owners (see ``parts``).
        shape: global shape.
        dtype: dtype in which it is stored.
        resident_bytes: bytes that are kept between steps: parameter, master copy, gradient and optimizer state;
            of all ranks together, where several have a part.
        step_flops: floating-point operations of its optimizer step, likewise.
        unit: name of the module that is gathered and freed together with it; ``""`` is the root.
        aliases: its other names, if it is tied.
        trainable: False if it was frozen when it was planned.
        split: its logical matrices, if it is not simply one; the optimizer acts on each of them.
        parts: for a stack of matrices that several ranks own: who owns which indices of dimension 0, in
            order and without gaps. Empty if one rank owns it whole.

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
    trainable: bool = True
    split: Split | None = None
    parts: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        _check(self.name, self.role, self.shape, self.dtype, self.split)
        if self.resident_bytes < 0 or self.step_flops < 0:
            raise PlanError(
                f"{self.name}: resident_bytes={self.resident_bytes} and step_flops={self.step_flops} must be 0 or more."
            )
        if self.parts:
            self._check_parts()
        elif self.role is Role.ROWS:
            if self.owner is not None:
                raise PlanError(f"{self.name}: ROWS belong to all ranks; owner must be None, not {self.owner}.")
        elif type(self.owner) is not int or self.owner < 0:
            raise PlanError(
                f"{self.name}: a {self.role.name} parameter needs an owner of 0 or more, not {self.owner!r}."
            )

    def _check_parts(self) -> None:
        if self.split is None or self.split.stack != self.shape[0] or self.owner is not None:
            raise PlanError(
                f"{self.name}: only a stack of matrices along dimension 0 can have parts, and then no owner."
            )
        ends = [0, *(part.stop for part in self.parts)]
        whole = [part.start for part in self.parts] == ends[:-1] and ends[-1] == self.shape[0]
        owners = {part.owner for part in self.parts}
        if not whole or not all(map(len, self.parts)) or len(owners) < len(self.parts) or min(owners) < 0:
            raise PlanError(
                f"{self.name}: parts must cover 0 to {self.shape[0]} in order, each with an owner of its own, "
                f"not {self.parts}."
            )

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the whole parameter alone, without gradient and optimizer state."""
        return self.numel * self.dtype.itemsize

    @property
    def spec(self) -> ParameterSpec:
        """The parameter without its owner and costs."""
        return ParameterSpec(
            self.name,
            self.role,
            self.shape,
            self.dtype,
            self.unit,
            self.aliases,
            self.trainable,
            self.split,
        )

    def divide(self, amount: int, world_size: int) -> list[tuple[int, int]]:
        """(rank, its part) of an ``amount`` that is proportional to what ranks hold, rounded down.

        Only ranks that hold some of the parameter are listed; a parameter without elements is nobody's.
        """
        if self.owner is not None:
            return [(self.owner, amount)]
        whole = self.shape[0]
        if self.parts:
            return [(part.owner, amount * len(part) // whole) for part in self.parts]
        rows = ((rank, rows_of_rank(whole, rank, world_size)) for rank in range(world_size))
        return [(rank, amount * held // whole) for rank, held in rows if held]


def rows_of_rank(rows: int, rank: int, world_size: int) -> int:
    """How many of ``rows`` rows ``Shard(0)`` gives to ``rank``: equal chunks, the last ones cut short."""
    chunk = -(-rows // world_size)
    return max(0, min(chunk, rows - rank * chunk))
