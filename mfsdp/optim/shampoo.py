"""Shampoo: momentum between the inverse roots of the second moments of rows and columns."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mfsdp.optim.factors import inverse_root
from mfsdp.optim.group_options import check_not_negative
from mfsdp.optim.preconditioned import Block, PreconditionedOptimizer, PreconditionerOptions, decay

__all__ = ["Shampoo"]

_GRAFTINGS = (None, "sgd", "adam")


class Shampoo(PreconditionedOptimizer):
    """Shampoo on whole matrices, each stepped by its owner alone, without communication.

    For a matrix with gradient ``G``, average ``M`` and factors ``L`` and ``R``, ``c_i = 1 - beta_i^t``::

        M <- beta1 * M + (1 - beta1) * G
        L <- beta2 * L + (1 - beta2) * G G^T,   R <- beta2 * R + (1 - beta2) * G^T G
        U <- (L / c2 + eps I)^(-1/4) (M / c1) (R / c2 + eps I)^(-1/4)
        U <- U * ||A||_F / ||U||_F                                      with grafting
        W <- (1 - lr * weight_decay) * W - lr * U

    The roots are computed in the first step and every ``precondition_frequency`` steps. Where one side is too
    large for a factor, the other's exponent is -1/2. With ``grafting="adam"`` ``A`` is Adam's update of the
    same gradients, with ``"sgd"`` it is ``M / c1``.

    Sources: Gupta, Koren and Singer, "Shampoo: preconditioned stochastic tensor optimization", arXiv
    1802.09568; averages, bias correction and grafting as in Shi et al., "A distributed data-parallel PyTorch
    implementation of the distributed Shampoo optimizer", arXiv 2309.06497.

    Args:
        params: parameters, named parameters or groups of them; any option may be given per group. Each is 2-D
            unless there is a ``split``, and a plain tensor or a DTensor with ``OwnerShard`` or ``Replicate`` on
            every mesh dimension.
        lr: learning rate.
        betas: factors of the averages: of the gradient, and of all second moments.
        eps: added to the eigenvalues of the factors.
        weight_decay: decoupled weight decay.
        precondition_frequency: steps from one computation of the roots to the next; 10 by default.
        max_preconditioner_dim: a side with more rows (or columns) than this has no factor; 8192 by default.
        grafting: whose update's norm is taken: ``"adam"``, ``"sgd"``, or None for Shampoo's own.
        grafting_eps: added to the root of the second moment in Adam's update.
        factor_dtype: of factors, roots and their arithmetic: float32 or float64, or such a name, which groups hold.
        split: what the logical matrices of a parameter are, see :class:`~mfsdp.optim.Muon`.

    Raises:
        TypeError: an option that is a number is given as something else.
        ValueError: an option is out of range, or a parameter is not a matrix that its owner holds whole.
    """

    moment_names = ("exp_avg", "exp_avg_sq")
    base_name = "root"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-12,
        weight_decay: float = 0.01,
        *,
        grafting: str | None = "adam",
        grafting_eps: float = 1e-8,
        **options: Unpack[PreconditionerOptions],
    ) -> None:
        own = {"grafting": grafting, "grafting_eps": grafting_eps}
        super().__init__(params, lr, betas, eps, weight_decay, own, **options)

    def _check_options(self, group: dict[str, Any]) -> None:
        super()._check_options(group)
        check_not_negative("Shampoo", group, ["grafting_eps"])
        if group["grafting"] not in _GRAFTINGS:
            known = ", ".join(map(repr, _GRAFTINGS))
            raise ValueError(f"Shampoo: grafting must be one of {known}, but is {group['grafting']!r}.")

    def _step_block(self, group: dict[str, Any], block: Block, step: int) -> None:
        beta1, beta2 = group["betas"]
        average, square = block.moments["exp_avg"], block.moments["exp_avg_sq"]
        average.lerp_(block.grad.to(average.dtype), 1 - beta1)
        self._update_factors(block, beta2)
        if step == 1 or step % group["precondition_frequency"] == 0:
            self._update_roots(group, block, 1 - beta2**step)
        gradient = average.to(block.grad.dtype) / (1 - beta1**step)
        update = gradient
        if 0 in block.bases:
            update = block.bases[0] @ update
        if 1 in block.bases:
            update = update @ block.bases[1]
        if group["grafting"] == "adam":
            square.lerp_(block.grad.square().to(square.dtype), 1 - beta2)
            adam = gradient / ((square.to(gradient.dtype) / (1 - beta2**step)).sqrt() + group["grafting_eps"])
            update = _with_norm_of(update, adam)
        elif group["grafting"] == "sgd":
            update = _with_norm_of(update, gradient)
        decay(group, block)
        block.param.sub_(group["lr"] * update)

    def _update_roots(self, group: dict[str, Any], block: Block, correction: float) -> None:
        exponent = 0.5 / len(block.factors) if block.factors else 0.0
        for side, factor in block.factors.items():
            if not block.bases[side].any():  # the first time: something to keep if it fails
                block.bases[side].copy_(torch.eye(factor.size(-1), dtype=factor.dtype))
            self._replace_base(block, side, inverse_root(factor / correction, exponent, group["eps"]))


def _with_norm_of(update: Tensor, other: Tensor) -> Tensor:
    """Each matrix of ``update``, scaled to the norm of the matrix of ``other``; zero matrices stay zero."""
    norm = update.norm(dim=(-2, -1), keepdim=True)
    return update * (other.norm(dim=(-2, -1), keepdim=True) / norm.clamp(min=torch.finfo(norm.dtype).tiny))
