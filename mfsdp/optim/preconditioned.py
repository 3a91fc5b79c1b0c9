"""What Shampoo and SOAP share: their options, their state, and what happens when a decomposition fails."""

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from mfsdp.optim.factors import update_factor
from mfsdp.optim.group_options import (
    check_betas,
    check_lr,
    check_not_negative,
    check_numbers,
    check_whole_numbers,
    dtype_name,
    dtype_of,
)
from mfsdp.optim.logical import check_matrix, split_of
from mfsdp.optim.owner_local import LocalUpdate, OwnerLocalOptimizer, param_label, state_like
from mfsdp.planning.split import Split, SplitRule

__all__ = ["Block", "PreconditionedOptimizer", "PreconditionerOptions"]

SIDES = ("row", "column")

OptionalSplit = Split | SplitRule | None


class PreconditionerOptions(TypedDict, total=False):
    """Options that Shampoo and SOAP have in common, besides those of every optimizer; see there."""

    precondition_frequency: int
    max_preconditioner_dim: int
    factor_dtype: torch.dtype | str
    split: OptionalSplit


@dataclass(frozen=True, slots=True)
class Block:
    """The logical matrices of one shape in one parameter, as views of what the owner holds.

    Attributes:
        param: ``(k, m, n)``; likewise ``grad`` and the entries of ``moments``.
        grad: the gradient, in the dtype of the factors.
        moments: the elementwise averages of the state, by name.
        factors: for each preconditioned side (0 rows, 1 columns) its factor ``(k, d, d)``.
        bases: for each preconditioned side what is derived from its factor, likewise.
        label: what to call the parameter.
        failures: ``(1,)``, counted up when a factor or a decomposition was not finite or failed.
    """

    param: Tensor
    grad: Tensor
    moments: dict[str, Tensor]
    factors: dict[int, Tensor]
    bases: dict[int, Tensor]
    label: str
    failures: Tensor


class PreconditionedOptimizer(OwnerLocalOptimizer):
    """Base of the optimizers that keep second moments of a matrix's rows and columns.

    Subclasses name the elementwise averages they keep, and say how a block is stepped.
    """

    dtype_options = ("factor_dtype",)
    moment_names: tuple[str, ...] = ()
    base_name: str = ""
    """What the state calls what is derived from a factor."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        own: dict[str, Any] | None = None,
        *,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 8192,
        factor_dtype: torch.dtype | str = torch.float32,
        split: OptionalSplit = None,
    ) -> None:
        self._warned: set[str] = set()
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "factor_dtype": dtype_name(factor_dtype),
            "split": split,
        }
        super().__init__(params, {**options, **(own or {})})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._warned = set()
        super().__setstate__(state)

    def _check_group(self, group: dict[str, Any]) -> None:
        self._check_options(group)
        for index, param in enumerate(group["params"]):
            check_matrix(type(self).__name__, param_label(group, index), param, group["split"])

    @abstractmethod
    def _step_block(self, group: dict[str, Any], block: Block, step: int) -> None:
        """Update ``block`` in its ``step``-th step, which is 1 for the first."""

    def _check_options(self, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_lr(name, group)
        check_not_negative(name, group, ("weight_decay", "eps"))
        check_numbers(name, group, ["max_preconditioner_dim"])
        check_whole_numbers(name, group, ["precondition_frequency"])
        check_betas(name, group)
        for option in ("precondition_frequency", "max_preconditioner_dim"):
            if not group[option] >= 1:
                raise ValueError(f"{name}: {option} must be at least 1, but is {group[option]}.")
        try:
            _factor_dtype(group)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        dtype = _factor_dtype(group)
        state: dict[str, Any] = {"step": torch.zeros(())}
        state.update((name, state_like(param)) for name in self.moment_names)
        state["failures"] = state_like(param, (1,), torch.float32)
        if not param.numel():
            return state
        for index, (count, *dims) in enumerate(split_of(group["split"], param.shape).shapes()):
            for side in preconditioned_sides(dims, group["max_preconditioner_dim"]):
                shape = (count, dims[side], dims[side])
                for what in ("factor", self.base_name):
                    state[f"{SIDES[side]}_{what}_{index}"] = state_like(param, shape, dtype)
        return state

    def _update_group(
        self, group: dict[str, Any], owned: Sequence[LocalUpdate], elsewhere: Sequence[dict[str, Any]]
    ) -> None:
        steps = [state["step"] for state in (*elsewhere, *(update.state for update in owned))]
        if steps:
            torch._foreach_add_(steps, 1)
        for update in owned:
            if update.param.numel():
                for block in self._blocks(group, update):
                    self._step_block(group, block, int(update.state["step"]))

    def _blocks(self, group: dict[str, Any], update: LocalUpdate) -> list[Block]:
        split: Split = split_of(group["split"], update.param.shape)
        params, grads = split.views(update.param), split.views(update.grad.contiguous())
        moments = {name: split.views(update.state[name]) for name in self.moment_names}
        label = param_label(group, update.index)
        blocks = []
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            sides = preconditioned_sides(param.shape[1:], group["max_preconditioner_dim"])
            blocks.append(
                Block(
                    param=param,
                    grad=grad.to(_factor_dtype(group)),
                    moments={name: views[index] for name, views in moments.items()},
                    factors={side: update.state[f"{SIDES[side]}_factor_{index}"] for side in sides},
                    bases={side: update.state[f"{SIDES[side]}_{self.base_name}_{index}"] for side in sides},
                    label=label,
                    failures=update.state["failures"],
                )
            )
        return blocks

    def _update_factors(self, block: Block, beta: float) -> None:
        for side, factor in block.factors.items():
            finite = update_factor(factor, block.grad, side, beta)
            block.failures.add_(finite.logical_not())

    def _replace_base(self, block: Block, side: int, found: Tensor | None) -> None:
        """Take ``found`` for what is derived from a factor, or keep the old one, count, and warn once."""
        if found is not None:
            block.bases[side].copy_(found)
            return
        block.failures.add_(1)
        if block.label not in self._warned:
            self._warned.add(block.label)
            warnings.warn(
                f"{type(self).__name__}: the decomposition of the {SIDES[side]} factor of {block.label} failed or "
                f"was not finite; the previous one is kept. Further failures are only counted, in its state's "
                f"'failures'.",
                stacklevel=2,
            )


def preconditioned_sides(dims: Sequence[int], largest: int) -> list[int]:
    """The sides of a matrix of ``dims`` that have a factor: those of at most ``largest``."""
    return [side for side, dim in enumerate(dims) if dim <= largest]


def _factor_dtype(group: dict[str, Any]) -> torch.dtype:
    return dtype_of("factor_dtype", group["factor_dtype"], ("float32", "float64"))


def decay(group: dict[str, Any], block: Block) -> None:
    """Decoupled weight decay."""
    if group["weight_decay"]:
        block.param.mul_(1 - group["lr"] * group["weight_decay"])
