"""QK-clip: attention logits kept in bounds by scaling the projections they come from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from mfsdp.dtensor import is_local, local_tensor
from mfsdp.optim.group_options import is_number
from mfsdp.placements import is_owner

__all__ = ["QKClip"]


@dataclass(frozen=True)
class _Attention:
    query: Tensor
    key: Tensor
    max_logits: Callable[[], Tensor]

    def checked_logits(self) -> Tensor:
        """The largest logits, after checking that the weights consist of as many heads."""
        logits, rows = self.max_logits(), self.query.size(0)
        if logits.ndim != 1 or isinstance(logits, DTensor):
            given = f"a {type(logits).__name__} of shape {tuple(logits.shape)}"
            raise ValueError(f"QKClip: max_logits must give a plain tensor of shape (heads,), but gives {given}.")
        heads = logits.numel()
        if not heads or rows % heads:
            raise ValueError(f"QKClip: a query of {rows} rows does not have {heads} heads.")
        if self.key.size(0) % (rows // heads):
            raise ValueError(
                f"QKClip: a key of {self.key.size(0)} rows does not have heads of {rows // heads} rows, as the query "
                "has."
            )
        return logits


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
        if not is_number(threshold) or not threshold > 0:
            raise ValueError(f"QKClip: threshold must be positive, but is {threshold}.")
        self.threshold = threshold
        self._attentions: list[_Attention] = []

    def add(self, query: Tensor, key: Tensor, max_logits: Callable[[], Tensor]) -> None:
        """Watch one attention; to be called after ``fully_shard``, which replaces the weights.

        Args:
            query: weight of shape ``(heads * head_dim, n)``, the rows of a head together.
            key: weight of shape ``(heads * head_dim, n)``, or with fewer heads of the same size.
            max_logits: called after each step; the largest logit of each query head, a plain tensor ``(heads,)``,
                the same on every rank (over the data of all ranks: all-reduce it with MAX).

        Raises:
            ValueError: a weight is not a matrix of which a rank has all rows or none, or the two do not fit.
        """
        for name, weight in (("query", query), ("key", key)):
            _check_rows(name, weight)
        if key.size(0) > query.size(0):
            raise ValueError(f"QKClip: the key has {key.size(0)} rows, more than the query, {query.size(0)}.")
        if not key.size(0) or query.size(0) % key.size(0):
            raise ValueError(
                f"QKClip: a query of {query.size(0)} rows and a key of {key.size(0)} do not share heads evenly: the "
                "rows of the key must divide those of the query."
            )
        self._attentions.append(_Attention(query, key, max_logits))

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Scale what exceeds the threshold.

        Raises:
            ValueError: some weights do not have as many heads as there are logits; none of any was scaled.
        """
        for attention, logits in [(attention, attention.checked_logits()) for attention in self._attentions]:
            exceeding = logits.isfinite() & (logits > self.threshold)
            factor = torch.where(exceeding, self.threshold / logits, 1.0).to(torch.float32)
            if attention.query.size(0) == attention.key.size(0):
                factor = factor.sqrt()
                _scale_heads(attention.key, factor)
            _scale_heads(attention.query, factor)


def _check_rows(name: str, weight: Tensor) -> None:
    if weight.ndim != 2:
        raise ValueError(f"QKClip: the {name} must be a matrix, but its shape is {tuple(weight.shape)}.")
    for mesh_dim, placement in enumerate(weight.placements if isinstance(weight, DTensor) else ()):
        if not (is_owner(placement) or placement.is_replicate() or placement == Shard(1)):
            raise ValueError(
                f"QKClip: the {name} of shape {tuple(weight.shape)} is {placement!r} on mesh dimension "
                f"{mesh_dim}, where a rank may hold a part of a head. Place it as OwnerShard, as fully_shard does."
            )


def _scale_heads(weight: Tensor, factor: Tensor) -> None:
    if is_local(weight):
        local = local_tensor(weight)
        local.unflatten(0, (factor.numel(), -1)).mul_(factor.to(local)[:, None, None])
