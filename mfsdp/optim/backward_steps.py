"""Stepping parameters during backward, one by one, as their gradients arrive."""

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.optim import Optimizer

from mfsdp.optim.owner_local import OwnerLocalOptimizer, param_label
from mfsdp.optim.spent_gradient import SpentGradient

__all__ = ["BackwardSteps"]


class BackwardSteps:
    """Steps each parameter of some optimizers when its gradient is there, and frees the gradient.

    ``fully_shard`` calls the hooks of a parameter when its gradient has arrived on its owner, while backward
    goes on with earlier units. From then until the end of the step its ``grad`` is one that raises on any use, so
    that ``torch.nn.utils.clip_grad_norm_``, a ``GradScaler`` or a log of norms cannot take it for zero. After the
    step it is None, as it is after ``zero_grad``.

    Args:
        parts: the optimizers, by what to call them.

    Attributes:
        is_last_microbatch: set it to False while gradients are accumulated: they are then left alone.

    Raises:
        ValueError: one of the optimizers cannot step parameters one by one.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.is_last_microbatch = True
        self._stepped: set[Tensor] = set()
        own: list[OwnerLocalOptimizer] = []
        for name, part in parts.items():
            if not isinstance(part, OwnerLocalOptimizer):
                raise ValueError(
                    f'build_optimizer: overlap="backward" cannot step {type(part).__name__}, the {name} optimizer, one '
                    f"parameter at a time; use one of mfsdp.optim's own."
                )
            own.append(part)
        self._hooks = [
            param.register_post_accumulate_grad_hook(self._hook_of(part, group_index, param_index))
            for part in own
            for group_index, group in enumerate(part.param_groups)
            for param_index, param in enumerate(group["params"])
            if param.requires_grad
        ]

    def end_step(self) -> None:
        """Be ready for the next backward."""
        for param in self._stepped:
            param.grad = None
        self._stepped.clear()

    def remove(self) -> None:
        """Step in backward no longer."""
        for hook in self._hooks:
            hook.remove()

    def _hook_of(self, part: OwnerLocalOptimizer, group_index: int, param_index: int) -> Callable[[Tensor], None]:
        label = param_label(part.param_groups[group_index], param_index)

        def hook(param: Tensor) -> None:
            if not self.is_last_microbatch:
                return
            if param in self._stepped:
                raise RuntimeError(
                    'overlap="backward": a second backward since the last optimizer.step(), whose gradients were to be '
                    "accumulated with those of the first, which have been used. Call optimizer.step() after each "
                    "backward, or set optimizer.backward_steps.is_last_microbatch = False for all but the last."
                )
            self._stepped.add(param)
            part.step_one(group_index, param_index)
            param.grad = SpentGradient.of(param, label)

        return hook
