"""What stands in for a gradient that has been used and freed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["SpentGradient"]


class SpentGradient(Tensor):
    """A gradient whose every use raises: without it, clipping freed gradients would find none and do nothing.

    It has the shape, dtype and device that its parameter needs it to have, and memory for one element.
    """

    label: str

    @staticmethod
    def of(param: Tensor, label: str) -> "SpentGradient":
        """The one for ``param``, which messages call ``label``."""
        spent = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape).as_subclass(SpentGradient)
        spent.label = label
        return spent

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpentGradient({self.label})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: object = None
    ) -> NoReturn:
        """Refuse, whatever it is."""
        label = next(found.label for found in _tensors(args) if isinstance(found, cls))
        raise RuntimeError(
            f'overlap="backward": the gradient of {label} has been used and freed, since each parameter is stepped '
            f"during backward. To clip, unscale or read gradients, build the optimizer without overlap. To accumulate "
            f"them over several backwards, set optimizer.backward_steps.is_last_microbatch = False for all but the "
            f"last, and call optimizer.step() after that."
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
