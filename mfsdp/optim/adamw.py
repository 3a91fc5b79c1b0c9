"""AdamW for what is not a matrix, on the local tensors of this rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from mfsdp.optim.group_options import check_betas, check_flags, check_lr, check_not_negative
from mfsdp.optim.owner_local import LocalUpdate, OwnerLocalOptimizer, state_like

__all__ = ["AdamW"]


class AdamW(OwnerLocalOptimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` (arguments, state and numbers alike), stepping local tensors only.

    The update is elementwise, so that it may be done on whatever part of a parameter a rank holds: the
    whole of a :class:`~mfsdp.Tail` or :class:`~mfsdp.OwnerShard` on its owner, the shard of a ``Shard(0)``.

    All tensors of a group are stepped in one call, where they are. For many small tails ``fused=True`` takes less than
    half the time of ``foreach=True``. One flat tensor, filled from where the model has its parameters and gradients
    and copied back, would take less than half of that again (``examples/benchmark/tails.py`` on 2 cores: 200 tails of
    768 elements, 4.8, 1.9 and 0.9 ms); but the state of a parameter would be a view that loading and copying have to
    mend: torch's ``load_state_dict`` puts a tensor of its own in its place.

    Raises:
        TypeError: an option that is a number is given as something else.
        ValueError: an option is out of range, or is none that a step on a part of a parameter can do; a group is then
            not added.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        # Not torch.optim.AdamW's: with fused=True that tells a GradScaler to leave unscaling and skipping to the step,
        # which would have to skip the counts of what other ranks own too.
        Optimizer.__init__(self, params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        check_lr("AdamW", group)
        check_not_negative("AdamW", group, ("weight_decay", "eps"))
        check_betas("AdamW", group, tensors=True)
        group["betas"] = tuple(beta.squeeze() if isinstance(beta, Tensor) else beta for beta in group["betas"])
        check_flags("AdamW", group, ("amsgrad", "maximize", "capturable", "differentiable"))
        check_flags("AdamW", group, [option for option in ("foreach", "fused") if group[option] is not None])
        if group["foreach"] and group["fused"]:
            raise ValueError("AdamW: foreach=True and fused=True are two ways to do one thing; give one of them.")
        if group["differentiable"]:  # the step works in place on local tensors
            raise ValueError("AdamW: differentiable=True is not supported; use torch.optim.AdamW.")
        if not group["decoupled_weight_decay"]:
            raise ValueError("AdamW: decoupled_weight_decay=False is not supported; use torch.optim.Adam.")
        # What torch would tell in the step, and there on the owners only.
        tensors = [number for number in (group["lr"], *group["betas"]) if isinstance(number, Tensor)]
        if group["foreach"] and not group["capturable"] and tensors:
            raise ValueError("AdamW: foreach=True takes lr and betas as tensors only together with capturable=True.")
        if group["capturable"] and any(param.device.type == "cpu" for param in group["params"]):
            raise ValueError("AdamW: capturable=True is for CUDA graphs, and not for parameters on the CPU.")

    def _new_state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        on_device = group["capturable"] or group["fused"]
        double = torch.get_default_dtype() == torch.float64 and not group["fused"]
        step = torch.zeros(
            (), dtype=torch.float64 if double else torch.float32, device=param.device if on_device else "cpu"
        )
        state = {"step": step, "exp_avg": state_like(param), "exp_avg_sq": state_like(param)}
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = state_like(param)
        return state

    def _update_group(
        self, group: dict[str, Any], owned: Sequence[LocalUpdate], elsewhere: Sequence[dict[str, Any]]
    ) -> None:
        if elsewhere:  # so that every rank has the same count to save
            torch._foreach_add_([state["step"] for state in elsewhere], 1)
        if not owned:
            return
        amsgrad = group["amsgrad"]
        adamw(
            [update.param for update in owned],
            [update.grad for update in owned],
            [update.state["exp_avg"] for update in owned],
            [update.state["exp_avg_sq"] for update in owned],
            [update.state["max_exp_avg_sq"] for update in owned] if amsgrad else [],
            [update.state["step"] for update in owned],
            has_complex=any(update.param.is_complex() for update in owned),
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            **{key: group[key] for key in _PASSED_ON},
        )


_PASSED_ON = (
    "lr",
    "weight_decay",
    "eps",
    "amsgrad",
    "maximize",
    "foreach",
    "capturable",
    "differentiable",
    "fused",
)
