"""How an orthogonal update is scaled by the shape of its matrix."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from mfsdp.optim.group_options import is_number

__all__ = ["ADJUST_LR", "AdjustLr", "adjust_function", "adjustment"]

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


def adjust_function(group: Mapping[str, Any]) -> Callable[[int, int], float]:
    """The function of (rows, columns) that a group has chosen.

    Raises:
        ValueError: it is a name that is not known.
    """
    chosen = group["adjust_lr_fn"] if group["adjust_lr"] is None else group["adjust_lr"]
    if callable(chosen):
        return chosen
    if chosen is None:
        return ADJUST_LR["original"]
    if not isinstance(chosen, str) or chosen not in ADJUST_LR:
        name = "adjust_lr_fn" if group["adjust_lr"] is None else "adjust_lr"
        raise ValueError(f"{name} must be one of {', '.join(map(repr, ADJUST_LR))}, but is {chosen!r}.")
    return ADJUST_LR[chosen]


def adjustment(group: Mapping[str, Any], rows: int, columns: int) -> float:
    """What the learning rate of a group is multiplied by for a matrix of ``rows`` by ``columns``.

    Raises:
        ValueError: a function gives no finite number.
    """
    factor = adjust_function(group)(rows, columns)
    if not is_number(factor) or not math.isfinite(factor):
        raise ValueError(
            f"adjust_lr must give a finite number, but gives {factor!r} for {rows} rows, {columns} columns."
        )
    return float(factor)
