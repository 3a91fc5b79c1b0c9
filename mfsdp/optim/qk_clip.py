"""QK-clip: attention logits kept in bounds by scaling the projections they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfsdp.dtensor import is_local, local_tensor

__all__ = ["QKClip"]


@dataclass(frozen=True)
class _Attention:
    query: Tensor
    key: Tensor
    max_logits: Callable[[], Tensor]


class QKClip:
    """A hook for after the optimizer's step that scales query and key weights of heads with large logits.

    For each head whose largest attention logit ``s`` of the step exceeds the threshold ``t``, its rows of the
    query weight and of the key weight are multiplied by ``sqrt(t / s)``. Where several query heads share a key
    head, the query's rows are multiplied by ``t / s`` and the key is left alone. Each weight is scaled by its
    owner, on its own. A head whose largest logit is not finite is left alone.

    Source: "Kimi K2", arXiv 2507.20534, section 2.1 (MuonClip).

    Example::

        clip = QKClip(threshold=100.0)
        for block in model.blocks:
            clip.add(block.query.weight, block.key.weight, lambda block=block: block.max_logits)
        optimizer.register_step_post_hook(clip)

    Args:
        threshold: largest logit that is left alone.

    Raises:
        ValueError: the threshold is not positive.
    """

    def __init__(self, threshold: float = 100.0) -> None:
        if not threshold > 0:
            raise ValueError(f"QKClip: threshold must be positive, but is {threshold}.")
        self.threshold = threshold
        self._attentions: list[_Attention] = []

    def add(self, query: Tensor, key: Tensor, max_logits: Callable[[], Tensor]) -> None:
        """Watch one attention.

        Args:
            query: weight of shape ``(heads * head_dim, n)``, the rows of a head together.
            key: weight of shape ``(heads * head_dim, n)``, or with fewer heads of the same size.
            max_logits: called after each step; the largest logit of each query head, shape ``(heads,)``, the
                same on every rank (over the data of all ranks: all-reduce it with MAX).
        """
        self._attentions.append(_Attention(query, key, max_logits))

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scale what exceeds the threshold."""
        for attention in self._attentions:
            logits = attention.max_logits()
            exceeding = logits.isfinite() & (logits > self.threshold)
            factor = torch.where(exceeding, self.threshold / logits, 1.0).to(torch.float32)
            if attention.query.size(0) == attention.key.size(0):
                factor = factor.sqrt()
                _scale_heads(attention.key, factor)
            _scale_heads(attention.query, factor)


def _scale_heads(weight: Tensor, factor: Tensor) -> None:
    if weight.size(0) % factor.numel():
        raise ValueError(f"QKClip: a weight of {weight.size(0)} rows does not have {factor.numel()} heads.")
    if is_local(weight):
        local = local_tensor(weight)
        local.view(factor.numel(), -1, local.size(1)).mul_(factor.to(local)[:, None, None])
