"""Muon: momentum, orthogonalised; and its variants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mfsdp.optim.adjust_lr import AdjustLr, adjust_function, adjustment
from mfsdp.optim.batching import batches, orthogonalize
from mfsdp.optim.elementwise import Average, Step
from mfsdp.optim.group_options import (
    check_flags,
    check_lr,
    check_not_negative,
    check_numbers,
    check_whole_numbers,
    dtype_name,
    dtype_of,
)
from mfsdp.optim.logical import check_matrix, split_of
from mfsdp.optim.newton_schulz import QUINTIC, Coefficients, NewtonSchulz, Workspace
from mfsdp.optim.owner_local import LocalUpdate, OwnerLocalOptimizer, param_label, state_like
from mfsdp.optim.slow_dtypes import warn_of_slow_dtype
from mfsdp.planning.split import Split, SplitRule

__all__ = ["Muon"]

_MOMENTUM_STYLES = ("ema", "heavy_ball")
_SECOND_MOMENT_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class _Logical:
    """One logical matrix, or ``k`` of one shape: views of shape ``(k, m, n)`` of what the owner holds.

    ``second_moment`` is ``(k, m, 1)``, or None where there is none.
    """

    param: Tensor
    grad: Tensor
    momentum: Tensor
    second_moment: Tensor | None


class Muon(OwnerLocalOptimizer):
    """Muon on whole matrices, each stepped by its owner alone, without communication.

    The positional arguments, the defaults and the numbers are those of ``torch.optim.Muon``; the options after
    them are its published variants. For a matrix with gradient ``G``, momentum ``B``, learning rate ``lr`` and
    weight decay ``wd``::

        B <- momentum * B + (1 - momentum) * G                      "heavy_ball": momentum * B + G
        U <- momentum * B + (1 - momentum) * G   (nesterov)         "heavy_ball": momentum * B + G
             B                                   (otherwise)
        O <- newton_schulz(U)
        W <- (1 - lr * wd) * W - lr * adjust(rows, columns) * O

    With ``second_moment=beta`` (NorMuon) ``O`` is divided, row by row, by the root of an average of its squares,
    and scaled to the norm of an orthogonal matrix::

        v <- beta * v + (1 - beta) * mean over columns of O * O
        O <- O / (sqrt(v) + 1e-8)
        O <- O * sqrt(min(rows, columns)) / ||O||_F

    Sources: Keller Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024); "Muon is
    scalable for LLM training", arXiv 2502.16982 (``"match_rms_adamw"``); "NorMuon", arXiv 2510.05491, which is
    ``nesterov=False, second_moment=0.95, adjust_lr="match_rms_adamw"``; "Cautious weight decay", arXiv
    2510.12402.

    Args:
        params: parameters, named parameters or groups of them; any option may be given per group. Each is 2-D
            unless there is a ``split``, and either a plain tensor or a DTensor with ``OwnerShard`` or
            ``Replicate`` on every mesh dimension.
        lr: learning rate; a float or a tensor of one element.
        weight_decay: decoupled weight decay; it uses the unadjusted ``lr``.
        momentum: factor of the average.
        nesterov: whether the update looks ahead by one average.
        ns_coefficients: of the Newton-Schulz iteration: ``(a, b, c)``, one such triple for each step in turn (the
            last is repeated), or ``"quintic"``, ``"polar_express"``, ``"cubic"``.
        eps: smallest norm that the iteration divides by.
        ns_steps: number of Newton-Schulz iterations, less than 100.
        adjust_lr_fn: torch's name for ``adjust_lr``; give one of the two.
        adjust_lr: how the update is scaled by the shape of the (logical) matrix: ``"original"`` (the default)
            by ``sqrt(max(1, rows / columns))``, ``"match_rms_adamw"`` by ``0.2 * sqrt(max(rows, columns))``,
            ``"spectral"`` by ``sqrt(rows / columns)``, or a function of (rows, columns).
        momentum_style: ``"ema"``, or ``"heavy_ball"`` for the sum of gradients.
        cautious: whether weight decay is left out where it opposes the update, that is where the signs of ``W``
            and ``O`` differ.
        second_moment: NorMuon's ``beta``; None for none.
        ns_dtype: in which the iteration computes: bfloat16, float16, float32 or float64, or such a name, which
            is what groups hold. On an x86 CPU without AVX-512 the first two are tens of times slower than float32,
            which is logged once.
        split: what the logical matrices of a parameter are, for instance
            ``mfsdp.planning.EqualBlocks(3)`` for a fused QKV projection, or ``Stack()`` for experts
            ``(E, m, n)``; each is orthogonalised and scaled by itself.
        batched: whether matrices of one shape are orthogonalised together: faster where they are small or many,
            but rounded as batched products are, so no longer bit-equal to one by one.
        foreach: whether each elementwise operation before and after the iteration is one for all matrices of a batch:
            the same numbers in fewer calls, with memory for the updates of the whole batch. Off unless asked for:
            on a CPU it is slower than one matrix after another, which stays in the cache from one operation to the
            next. With ``cautious``, ``capturable`` or a tensor ``lr`` what comes after the iteration is one by one.
        compile: whether the elementwise work before and after the iteration runs compiled, each in one pass over
            memory; shapes are dynamic, and neither ``lr`` nor ``momentum`` is part of what is compiled.
        capturable: whether the step may be captured in a CUDA graph; a tensor ``lr`` is then read on the device.

    Raises:
        TypeError: an option that is a number is given as something else.
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
        ns_coefficients: str | Coefficients | Sequence[Coefficients] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        *,
        adjust_lr: AdjustLr | None = None,
        momentum_style: str = "ema",
        cautious: bool = False,
        second_moment: float | None = None,
        ns_dtype: torch.dtype | str = torch.bfloat16,
        split: Split | SplitRule | None = None,
        batched: bool = False,
        foreach: bool | None = None,
        compile: bool = False,
        capturable: bool = False,
    ) -> None:
        self._workspace = Workspace()
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adjust_lr": adjust_lr,
            "momentum_style": momentum_style,
            "cautious": cautious,
            "second_moment": second_moment,
            "ns_dtype": dtype_name(ns_dtype),
            "split": split,
            "batched": batched,
            "foreach": foreach,
            "compile": compile,
            "capturable": capturable,
        }
        super().__init__(params, options)

    dtype_options = ("ns_dtype",)

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_options(group)
        for index, param in enumerate(group["params"]):
            check_matrix("Muon", param_label(group, index), param, group["split"])
            if param.numel():  # a function for adjust_lr must not fail later, on one rank
                for _, rows, columns in split_of(group["split"], param.shape).shapes():
                    _told_of_muon(adjustment, group, rows, columns)
        if group["ns_steps"]:
            warn_of_slow_dtype(group["ns_dtype"], group["params"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._workspace = Workspace()
        super().__setstate__(state)

    def _release(self) -> None:
        self._workspace.release()

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        state = {"momentum_buffer": state_like(param)}
        if group["second_moment"] is not None and param.numel():
            split = split_of(group["split"], param.shape)
            columns = len(split.blocks) if split.dim else 1
            state["second_moment"] = state_like(param, (split.stack * split.rows, columns))
        return state

    def _update_group(
        self, group: dict[str, Any], owned: Sequence[LocalUpdate], elsewhere: Sequence[dict[str, Any]]
    ) -> None:
        logical = [
            matrix for update in owned if update.param.numel() for matrix in _logical_matrices(update, group["split"])
        ]
        iteration = _iteration(group)
        for batch in batches([matrix.param for matrix in logical], group["batched"]):
            self._update_batch(group, [logical[index] for index in batch], iteration)

    def _update_batch(self, group: dict[str, Any], batch: Sequence[_Logical], iteration: NewtonSchulz) -> None:
        updates = self._factors(group, batch, iteration)
        if group["second_moment"] is not None:
            updates = [
                _normalised_rows(update, matrix.second_moment, group["second_moment"])
                for update, matrix in zip(updates, batch, strict=True)
            ]
        _apply(group, batch, updates, self._workspace)

    def _factors(self, group: dict[str, Any], batch: Sequence[_Logical], iteration: NewtonSchulz) -> list[Tensor]:
        """The averages, orthogonalised; valid until the workspace is used again."""
        average = Average(
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            heavy_ball=group["momentum_style"] == "heavy_ball",
            compiled=group["compile"],
        )

        shapes, device = [matrix.param.shape for matrix in batch], batch[0].param.device
        if group["foreach"]:
            directions = average.of_all([matrix.grad for matrix in batch], [matrix.momentum for matrix in batch])

            def write(index: int, out: Tensor) -> None:
                out.copy_(directions[index])
        else:

            def write(index: int, out: Tensor) -> None:
                average.into(out, batch[index].grad, batch[index].momentum, self._workspace)

        return orthogonalize(write, shapes, device, iteration, self._workspace)


def _iteration(group: dict[str, Any]) -> NewtonSchulz:
    dtype = dtype_of("ns_dtype", group["ns_dtype"])
    return NewtonSchulz(group["ns_coefficients"], group["ns_steps"], group["eps"], dtype)


def _logical_matrices(update: LocalUpdate, rule: Split | SplitRule | None) -> list[_Logical]:
    split = split_of(rule, update.param.shape)
    moments: Sequence[Tensor | None] = [None] * len(split.blocks)
    if "second_moment" in update.state:
        rows = update.state["second_moment"].view(split.stack, split.rows, -1)
        moments = rows.split(1, dim=2) if split.dim else rows.split(split.blocks, dim=1)
    return [
        _Logical(*views)
        for views in zip(
            split.views(update.param),
            split.views(update.grad.contiguous()),
            split.views(update.state["momentum_buffer"]),
            moments,
            strict=True,
        )
    ]


def _normalised_rows(update: Tensor, second_moment: Tensor | None, beta: float) -> Tensor:
    """NorMuon's update of the factors ``(k, m, n)``, in the dtype of the second moment."""
    assert second_moment is not None
    update = update.to(second_moment.dtype)
    second_moment.lerp_(update.square().mean(dim=-1, keepdim=True), 1 - beta)
    update = update / (second_moment.sqrt() + _SECOND_MOMENT_EPS)
    norm = update.norm(dim=(-2, -1), keepdim=True).clamp(min=_SECOND_MOMENT_EPS)
    return update * (min(update.shape[1:]) ** 0.5 / norm)


def _apply(group: dict[str, Any], batch: Sequence[_Logical], updates: Sequence[Tensor], workspace: Workspace) -> None:
    """Weight decay, then the step along ``updates``."""
    step = Step(
        lr=group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"],
        weight_decay=group["weight_decay"],
        cautious=group["cautious"],
        capturable=group["capturable"],
        compiled=group["compile"],
    )
    params = [matrix.param for matrix in batch]
    adjustments = [adjustment(group, param.size(1), param.size(2)) for param in params]
    if group["foreach"]:
        step.along_all(updates, params, adjustments, workspace)
        return
    for update, param, factor in zip(updates, params, adjustments, strict=True):
        step.along(update, param, factor, workspace)


def _check_options(group: dict[str, Any]) -> None:
    check_lr("Muon", group)
    check_not_negative("Muon", group, ("weight_decay", "momentum", "eps"))
    check_numbers("Muon", group, ["ns_steps"])
    check_whole_numbers("Muon", group, ["ns_steps"])
    check_flags("Muon", group, ("nesterov", "cautious", "batched", "compile", "capturable"))
    beta = group["second_moment"]
    if beta is not None:
        check_numbers("Muon", group, ["second_moment"])
        if not 0 <= beta < 1:
            raise ValueError(f"Muon: second_moment must be None or in [0, 1), but is {beta}.")
    if group["momentum_style"] not in _MOMENTUM_STYLES:
        known = ", ".join(map(repr, _MOMENTUM_STYLES))
        raise ValueError(f"Muon: momentum_style must be one of {known}, but is {group['momentum_style']!r}.")
    if group["adjust_lr_fn"] is not None and group["adjust_lr"] is not None:
        raise ValueError("Muon: adjust_lr_fn and adjust_lr are two names of one option; give one of them.")
    if group["foreach"] is not None:
        check_flags("Muon", group, ["foreach"])
        if group["foreach"] and group["compile"]:
            raise ValueError("Muon: foreach=True and compile=True are two ways to do one thing; give one of them.")
    _told_of_muon(_iteration, group)
    _told_of_muon(adjust_function, group)


def _told_of_muon(check: Callable[..., object], *args: Any) -> None:
    """Call ``check``, whose messages are to name the optimizer."""
    try:
        check(*args)
    except ValueError as error:
        raise ValueError(f"Muon: {error}") from None
