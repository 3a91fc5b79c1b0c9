"""Kronecker factors of a gradient's second moment: their averages, inverse roots and eigenbases.

A factor is ``(k, d, d)``: one symmetric matrix for each of ``k`` logical matrices of one shape. A failed or
non-finite decomposition is told by returning None, so that the caller keeps what it had.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["RefinedBasis", "inverse_root", "refined_basis", "starting_basis", "update_factor"]


def update_factor(factor: Tensor, grad: Tensor, side: int, beta: float) -> Tensor:
    """Average ``G G^T`` (side 0) or ``G^T G`` (side 1) into ``factor``, in place, unless that is not finite.

    Args:
        factor: ``(k, d, d)``.
        grad: ``(k, m, n)``.
        side: which of the two.
        beta: factor of the average.

    Returns:
        Whether it was finite, as a 0-d bool tensor; nothing is read from the device.
    """
    grad = grad.to(factor.dtype)
    outer = grad @ grad.mT if side == 0 else grad.mT @ grad
    finite = outer.isfinite().all()
    factor.copy_(torch.where(finite, torch.lerp(outer, factor, beta), factor))
    return finite


def inverse_root(factor: Tensor, exponent: float, eps: float) -> Tensor | None:
    """``(factor + eps I) ** -exponent`` by eigendecomposition, eigenvalues below 0 taken for 0."""
    decomposed = _eigh(factor)
    if decomposed is None:
        return None
    values, vectors = decomposed
    scaled = vectors * (values.clamp(min=0) + eps).pow(-exponent).unsqueeze(-2)
    return _if_finite(scaled @ vectors.mT)


def starting_basis(factor: Tensor) -> Tensor | None:
    """The eigenvectors of ``factor``, as columns, by falling eigenvalues."""
    decomposed = _eigh(factor)
    return None if decomposed is None else decomposed[1].flip(-1)


class RefinedBasis(NamedTuple):
    """A basis ``(k, d, d)``, and where its columns were before: ``(k, d)``."""

    basis: Tensor
    order: Tensor


def refined_basis(factor: Tensor, basis: Tensor) -> RefinedBasis | None:
    """One step of orthogonal iteration: ``basis`` brought closer to the eigenvectors of ``factor``.

    Its columns are first sorted by falling ``diag(basis^T factor basis)``, the estimates of their eigenvalues.
    """
    multiplied = factor @ basis
    order = (basis * multiplied).sum(dim=-2).argsort(dim=-1, descending=True, stable=True)
    try:
        found = _if_finite(torch.linalg.qr(multiplied.take_along_dim(order.unsqueeze(-2), dim=-1)).Q)
    except torch.linalg.LinAlgError:
        return None
    return None if found is None else RefinedBasis(found, order)


def _eigh(factor: Tensor) -> tuple[Tensor, Tensor] | None:
    if not factor.isfinite().all():
        return None
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        return None
    return None if _if_finite(vectors) is None else (values, vectors)


def _if_finite(tensor: Tensor) -> Tensor | None:
    return tensor if tensor.isfinite().all() else None
