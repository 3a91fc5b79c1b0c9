"""How an orthogonal update is scaled by the shape of its matrix."""

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["ADJUST_LR", "AdjustLr", "adjustment"]

AdjustLr = str | Callable[[int, int], float]
"""A name in :data:`ADJUST_LR`, or a function of (rows, columns)."""

ADJUST_LR: dict[str, Callable[[int, int], float]] = {
    # Keller Jordan's: tall matrices have larger updates.
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    # arXiv 2502.16982: the update has the root mean square that AdamW's typically has.
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    # Bernstein, "Deriving Muon" (2025): the update has the same effect on the size of the layer's output.
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}


def adjustment(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """What the learning rate of a group is multiplied by for a matrix of ``rows`` by ``columns``."""
    chosen = group["adjust_lr_fn"] if group["adjust_lr"] is None else group["adjust_lr"]
    if callable(chosen):
        return chosen(rows, columns)
    function = ADJUST_LR.get(chosen or "original")
    if function is None:
        name = "adjust_lr_fn" if group["adjust_lr"] is None else "adjust_lr"
        raise ValueError(f"{name} must be one of {', '.join(map(repr, ADJUST_LR))}, but is {chosen!r}.")
    return function(rows, columns)
