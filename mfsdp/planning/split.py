"""Logical matrices: how one parameter is read as several.

A fused QKV projection is three matrices (or one per head), a fused gate/up projection two, the experts of a
layer stacked into one ``(E, m, n)`` parameter are ``E``. A matrix optimizer orthogonalises each of them by
itself. A :class:`Split` says which they are, as a view of the parameter and cuts of that view::

    parameter            Split(stack, rows, columns, blocks, dim)       logical matrices
    (3d, d)              Split(1, 3d, d, (d, d, d))                     3 of (d, d)
    (d, 3d)              Split(1, d, 3d, (d, d, d), dim=1)              3 of (d, d)
    (E, m, n)            Split(E, m, n, (m,))                           E of (m, n)
    (E, 2f, n)           Split(E, 2f, n, (f, f))                        2E of (f, n)
    (out, in, kh, kw)    Split(1, out, in*kh*kw, (out,))                1 of (out, in*kh*kw)

A user names them by a rule, which makes the split from the parameter's shape: :class:`Blocks`,
:class:`EqualBlocks`, :class:`BlocksOf`, :class:`Stack`, :class:`Flatten`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mfsdp.planning.errors import PlanError

__all__ = ["Blocks", "BlocksOf", "EqualBlocks", "Flatten", "Split", "SplitRule", "Stack", "split_by"]

SplitRule = Callable[[tuple[int, ...]], "Split"]
"""Shape of a parameter -> its logical matrices."""


@dataclass(frozen=True, slots=True)
class Split:
    """A parameter read as ``(stack, rows, columns)``, each of the stacked matrices cut into blocks.

    Args:
        stack: number of matrices stacked in the leading dimensions.
        rows: rows of each.
        columns: columns of each.
        blocks: sizes of the blocks along ``dim``; they add up to ``rows`` (or ``columns``).
        dim: 0 to cut between rows, 1 to cut between columns.

    Raises:
        PlanError: the sizes contradict each other.
    """

    stack: int
    rows: int
    columns: int
    blocks: tuple[int, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim not in (0, 1):
            raise PlanError(f"{self}: dim must be 0 (cut between rows) or 1 (cut between columns).")
        if min(self.stack, self.rows, self.columns) < 0 or not self.blocks or min(self.blocks) < 1:
            raise PlanError(f"{self}: sizes must not be negative, and there must be a block of at least 1.")
        cut = self.columns if self.dim else self.rows
        if sum(self.blocks) != cut:
            what = "columns" if self.dim else "rows"
            raise PlanError(f"{self}: blocks add up to {sum(self.blocks)}, not to the {cut} {what}.")

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.stack * self.rows * self.columns

    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(how many, rows, columns) for each block: the shapes of :meth:`views`."""
        if self.dim:
            return tuple((self.stack, self.rows, block) for block in self.blocks)
        return tuple((self.stack, block, self.columns) for block in self.blocks)

    def views(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """``tensor`` as one view of shape (how many, rows, columns) for each block.

        Args:
            tensor: contiguous, of the parameter's shape, or a part of it along a stacked dimension 0, or what
                a rank holds that owns nothing (the views are then empty).
        """
        if not tensor.numel():
            return tuple(tensor.new_empty((0, rows, columns)) for _, rows, columns in self.shapes())
        whole = tensor.view(-1, self.rows, self.columns)
        return (whole,) if len(self.blocks) == 1 else whole.split(self.blocks, dim=1 + self.dim)


def split_by(rule: SplitRule, name: str, shape: tuple[int, ...]) -> Split:
    """The logical matrices that ``rule`` finds in the parameter ``name``.

    Raises:
        PlanError: the rule does not fit the shape.
    """
    try:
        return rule(shape)
    except PlanError as error:
        raise PlanError(f"splits: {name}: {error}") from None


def _matrix(shape: tuple[int, ...], rule: object) -> tuple[int, int]:
    if len(shape) != 2:
        raise PlanError(f"{rule} reads a 2-D parameter, not one of shape {shape}; use Stack({rule}) for a stack.")
    return shape[0], shape[1]


@dataclass(frozen=True)
class Blocks:
    """Blocks of given sizes, for instance q, k and v of grouped-query attention: ``Blocks((4096, 1024, 1024))``."""

    sizes: tuple[int, ...]
    dim: int = 0

    def __call__(self, shape: tuple[int, ...]) -> Split:
        rows, columns = _matrix(shape, self)
        return Split(1, rows, columns, tuple(self.sizes), self.dim)


@dataclass(frozen=True)
class EqualBlocks:
    """``count`` blocks of equal size, for instance q, k and v (3), or gate and up (2)."""

    count: int
    dim: int = 0

    def __call__(self, shape: tuple[int, ...]) -> Split:
        matrix = _matrix(shape, self)
        size = matrix[self.dim]
        if self.count < 1 or size % self.count:
            raise PlanError(f"{self} cannot cut the {size} of dimension {self.dim} of {shape} evenly.")
        return Split(1, *matrix, (size // self.count,) * self.count, self.dim)


@dataclass(frozen=True)
class BlocksOf:
    """Blocks of ``size``, as many as there are, for instance one per attention head."""

    size: int
    dim: int = 0

    def __call__(self, shape: tuple[int, ...]) -> Split:
        matrix = _matrix(shape, self)
        size = matrix[self.dim]
        if self.size < 1 or size % self.size:
            raise PlanError(f"{self} does not divide the {size} of dimension {self.dim} of {shape}.")
        return Split(1, *matrix, (self.size,) * (size // self.size), self.dim)


@dataclass(frozen=True)
class Stack:
    """``(..., m, n)``: a stack of matrices, for instance experts; each is cut further by ``inner``, if given."""

    inner: Blocks | EqualBlocks | BlocksOf | None = None

    def __call__(self, shape: tuple[int, ...]) -> Split:
        if len(shape) < 3:
            raise PlanError(f"{self} reads a parameter with 3 or more dimensions, not one of shape {shape}.")
        stack, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
        if self.inner is None:
            return Split(stack, rows, columns, (rows,))
        inner = self.inner((rows, columns))
        return Split(stack, rows, columns, inner.blocks, inner.dim)


@dataclass(frozen=True)
class Flatten:
    """``(out, ...)`` as one matrix ``(out, prod(...))``, for instance a convolution."""

    def __call__(self, shape: tuple[int, ...]) -> Split:
        if len(shape) < 2:
            raise PlanError(f"{self} reads a parameter with 2 or more dimensions, not one of shape {shape}.")
        return Split(1, shape[0], math.prod(shape[1:]), (shape[0],))
