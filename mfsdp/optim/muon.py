"""Muon: momentum, orthogonalised."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import ParamsT

from mfsdp.optim.newton_schulz import QUINTIC, newton_schulz
from mfsdp.optim.owner_local import LocalUpdate, OwnerLocalOptimizer, param_label, state_like
from mfsdp.placements import OwnerShard, Tail

__all__ = ["Muon"]

_ADJUST_LR = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(OwnerLocalOptimizer):
    """Muon on whole matrices, each stepped by its owner alone, without communication.

    The signature, the defaults and, bit for bit, the numbers are those of ``torch.optim.Muon``. For a matrix
    with gradient ``G`` and momentum ``B``, learning rate ``lr`` and weight decay ``wd``::

        B <- momentum * B + (1 - momentum) * G
        U <- momentum * B + (1 - momentum) * G    with nesterov, else U <- B
        W <- (1 - lr * wd) * W - lr * adjust(rows, columns) * newton_schulz(U)

    Source: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); the
    ``"match_rms_adamw"`` adjustment: "Muon is scalable for LLM training", arXiv 2502.16982.

    Args:
        params: parameters, named parameters or groups of them. Each is 2-D, and either a plain tensor or a
            DTensor with ``OwnerShard`` or ``Replicate`` on every mesh dimension.
        lr: learning rate; a float or a tensor of one element.
        weight_decay: decoupled weight decay; it uses the unadjusted ``lr``.
        momentum: factor of the exponential moving average.
        nesterov: whether the update looks ahead by one average.
        ns_coefficients: ``(a, b, c)`` of the Newton-Schulz iteration.
        eps: smallest norm that the iteration divides by.
        ns_steps: number of Newton-Schulz iterations, less than 100.
        adjust_lr_fn: how the update is scaled by the matrix's shape: ``"original"`` (also ``None``) by
            ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, columns))``.

    Raises:
        ValueError: an option is out of range, or a parameter is not a matrix that its owner holds whole; the
            message names the parameter and says which optimizer takes it.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of matrices, after checking each of them and the group's options."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for index, param in enumerate(group["params"]):
                _check_matrix(param_label(group, index), param)
        except ValueError:
            self.param_groups.pop()
            raise

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        return {"momentum_buffer": state_like(param)}

    def _update_group(
        self, group: dict[str, Any], owned: Sequence[LocalUpdate], elsewhere: Sequence[dict[str, Any]]
    ) -> None:
        lr, momentum = group["lr"], group["momentum"]
        if isinstance(lr, Tensor):
            lr = lr.squeeze()
        adjust = _ADJUST_LR[group["adjust_lr_fn"] or "original"]
        for update in owned:
            param, grad, buffer = update.param, update.grad, update.state["momentum_buffer"]
            buffer.lerp_(grad, 1 - momentum)
            direction = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
            direction = newton_schulz(direction, group["ns_coefficients"], group["ns_steps"], group["eps"])
            param.mul_(1 - lr * group["weight_decay"])
            param.add_(direction, alpha=-lr * adjust(*param.shape))


def _check_options(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Muon: a tensor lr must have one element, but its shape is {tuple(lr.shape)}.")
    for option in ("lr", "weight_decay", "momentum", "eps"):
        if not group[option] >= 0:  # written so that NaN fails too
            raise ValueError(f"Muon: {option} must be 0 or more, but is {float(group[option])}.")
    coefficients = group["ns_coefficients"]
    if len(coefficients) != 3:
        raise ValueError(f"Muon: ns_coefficients must be three numbers (a, b, c), but is {coefficients}.")
    if not 0 <= group["ns_steps"] < 100:
        raise ValueError(f"Muon: ns_steps must be in [0, 100), but is {group['ns_steps']}.")
    if group["adjust_lr_fn"] is not None and group["adjust_lr_fn"] not in _ADJUST_LR:
        known = ", ".join(map(repr, _ADJUST_LR))
        raise ValueError(f"Muon: adjust_lr_fn must be one of {known}, but is {group['adjust_lr_fn']!r}.")


_ELSEWHERE = "ive it to AdamW, or let mfsdp.optim.build_optimizer route it there."


def _check_matrix(label: str, param: Tensor) -> None:
    label = f"{label} of shape {tuple(param.shape)}"
    placements = param.placements if isinstance(param, DTensor) else ()
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Tail):
            raise ValueError(
                f"Muon: {label} is a {placement!r} on mesh dimension {mesh_dim}: not a matrix. G{_ELSEWHERE}"
            )
        if not isinstance(placement, (OwnerShard, Replicate)):
            raise ValueError(
                f"Muon: {label} is {placement!r} on mesh dimension {mesh_dim}, so no rank holds it whole. "
                f"Shard it with mfsdp.fully_shard, which places matrices as OwnerShard, or use "
                f"torch.optim.Muon, which communicates. If it is an embedding or an output head: "
                f"g{_ELSEWHERE}"
            )
    if param.ndim != 2:
        raise ValueError(f"Muon: {label} has {param.ndim} dimensions: not a matrix. G{_ELSEWHERE}")
    if not param.is_floating_point():
        raise ValueError(f"Muon: {label} is {param.dtype}, but Muon needs a real floating-point matrix.")
