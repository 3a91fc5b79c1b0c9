"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mfsdp.optim.factors import refined_basis, starting_basis
from mfsdp.optim.preconditioned import Block, PreconditionedOptimizer, PreconditionerOptions, decay

__all__ = ["SOAP"]


class SOAP(PreconditionedOptimizer):
    """SOAP on whole matrices, each stepped by its owner alone, without communication.

    For a matrix with gradient ``G``, averages ``M`` and ``V``, factors ``L`` and ``R`` and orthogonal bases ``P``
    (of ``L``) and ``Q`` (of ``R``)::

        M <- beta1 * M + (1 - beta1) * G
        V <- beta2 * V + (1 - beta2) * (P^T G Q)^2                      elementwise
        U <- P [ (P^T M Q) / c1 / (sqrt(V / c2) + eps) ] Q^T            c_i = 1 - beta_i^t
        W <- (1 - lr * weight_decay) * W - lr * U
        L <- beta2 * L + (1 - beta2) * G G^T,   R <- beta2 * R + (1 - beta2) * G^T G
        every ``precondition_frequency`` steps:  P <- orthonormal factor of qr(L P), Q <- that of qr(R Q)

    The first gradient only makes ``L`` and ``R``, and ``P`` and ``Q`` of their eigenvectors: it moves nothing, since
    in its own eigenbasis it says nothing of the variance of others; ``t`` counts the steps after it. The columns of
    ``P`` and ``Q`` are in the order of falling eigenvalues, which orthogonal iteration converges to: in another it
    would turn a direction of small gradients, whose ``V`` is small, into one of large ones. Before ``P`` is
    refined its columns are sorted by ``diag(P^T L P)``, and the rows of ``V`` with them; likewise ``Q``.

    Source: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", arXiv 2409.11321, algorithms 3
    and 4, with Adam's bias correction; the first step and the order of columns as its authors' code has them.

    Args:
        params: parameters, named parameters or groups of them; any option may be given per group. Each is 2-D
            unless there is a ``split``, and a plain tensor or a DTensor with ``OwnerShard`` or ``Replicate`` on
            every mesh dimension.
        lr: learning rate.
        betas: factors of the averages: of the gradient, and of all second moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        precondition_frequency: steps from one refinement of the bases to the next; 10 by default.
        max_preconditioner_dim: a side with more rows (or columns) than this keeps the standard basis; 8192 by default.
        factor_dtype: of factors, bases and their arithmetic: float32 or float64, or such a name, which groups hold.
        split: what the logical matrices of a parameter are, see :class:`~mfsdp.optim.Muon`.

    Raises:
        TypeError: an option that is a number is given as something else.
        ValueError: an option is out of range, or a parameter is not a matrix that its owner holds whole.
    """

    moment_names = ("exp_avg", "exp_avg_sq")
    base_name = "basis"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **options: Unpack[PreconditionerOptions],
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **options)

    def _step_block(self, group: dict[str, Any], block: Block, step: int) -> None:
        beta2 = group["betas"][1]
        if step == 1:
            self._update_factors(block, beta2)
            for side, factor in block.factors.items():
                block.bases[side].copy_(torch.eye(factor.size(-1), dtype=factor.dtype))
                self._replace_base(block, side, starting_basis(factor))
            return
        self._move(group, block, step - 1)
        self._update_factors(block, beta2)
        if (step - 1) % group["precondition_frequency"] == 0:
            for side, factor in block.factors.items():
                self._refine(block, side, factor)

    def _move(self, group: dict[str, Any], block: Block, step: int) -> None:
        """Adam's step in the bases, the ``step``-th."""
        beta1, beta2 = group["betas"]
        average, square = block.moments["exp_avg"], block.moments["exp_avg_sq"]
        average.lerp_(block.grad.to(average.dtype), 1 - beta1)
        rotated = _into_bases(block, block.grad)
        square.lerp_(rotated.square().to(square.dtype), 1 - beta2)
        numerator = _into_bases(block, average.to(rotated.dtype)) / (1 - beta1**step)
        direction = numerator / ((square.to(rotated.dtype) / (1 - beta2**step)).sqrt() + group["eps"])
        decay(group, block)
        block.param.sub_(group["lr"] * _out_of_bases(block, direction))

    def _refine(self, block: Block, side: int, factor: Tensor) -> None:
        """Bring a basis closer to the eigenvectors, and ``V`` into the order of its columns."""
        found = refined_basis(factor, block.bases[side])
        self._replace_base(block, side, None if found is None else found.basis)
        if found is not None:
            square = block.moments["exp_avg_sq"]
            order = found.order.unsqueeze(-1 if side == 0 else -2)
            square.copy_(square.take_along_dim(order, dim=-2 if side == 0 else -1))


def _into_bases(block: Block, matrix: Tensor) -> Tensor:
    """``P^T matrix Q``."""
    if 0 in block.bases:
        matrix = block.bases[0].mT @ matrix
    return matrix @ block.bases[1] if 1 in block.bases else matrix


def _out_of_bases(block: Block, matrix: Tensor) -> Tensor:
    """``P matrix Q^T``."""
    if 0 in block.bases:
        matrix = block.bases[0] @ matrix
    return matrix @ block.bases[1].mT if 1 in block.bases else matrix
