"""Options of parameter groups: numbers and dtypes that are checked, and what of them a state dict holds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "OF_SCHEDULERS",
    "check_betas",
    "check_flags",
    "check_lr",
    "check_names",
    "check_not_negative",
    "check_numbers",
    "check_whole_numbers",
    "completed_groups",
    "dtype_name",
    "dtype_of",
    "is_number",
    "saved_groups",
]

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's learning rate schedulers put into groups, from where it gets into copies of them."""


def dtype_name(dtype: torch.dtype | str) -> str:
    """What a group holds for ``dtype``: torch's distributed state dicts take strings, but no ``torch.dtype``."""
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


def dtype_of(option: str, name: torch.dtype | str, allowed: Sequence[str] = tuple(_DTYPES)) -> torch.dtype:
    """The dtype that an option names.

    Args:
        option: its name, for the message.
        name: its value; a dtype is taken for its name.
        allowed: names that it may have.

    Raises:
        ValueError: it is none of them.
    """
    name = dtype_name(name)
    if name not in allowed:
        raise ValueError(f"{option} must be {', '.join(allowed[:-1])} or {allowed[-1]}, but is {name}.")
    return _DTYPES[name]


def is_number(value: Any, or_tensor: bool = False) -> bool:
    """Whether ``value`` is a real number; true and false, which Python takes for 1 and 0, are none.

    Args:
        value: anything.
        or_tensor: whether a tensor of one number is one too.
    """
    if isinstance(value, Tensor):
        return or_tensor and value.numel() == 1 and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def check_numbers(optimizer: str, group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that each of ``options`` is a number (or a tensor of one), and not, say, text from a configuration file.

    Raises:
        TypeError: one is not.
    """
    for option in options:
        if not is_number(group[option], or_tensor=True):
            raise TypeError(f"{optimizer}: {option} must be a number, but is {group[option]!r}.")


def check_not_negative(optimizer: str, group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that each of ``options`` is a finite number of 0 or more.

    Raises:
        TypeError: one is no number.
        ValueError: one is less than 0, or not finite.
    """
    check_numbers(optimizer, group, options)
    for option in options:
        if not group[option] >= 0:  # written so that NaN fails too
            raise ValueError(f"{optimizer}: {option} must be 0 or more, but is {float(group[option])}.")
        if group[option] == math.inf:
            raise ValueError(f"{optimizer}: {option} must be finite, but is inf.")


def check_lr(optimizer: str, group: Mapping[str, Any]) -> None:
    """Check that ``lr`` is a number of 0 or more, or a tensor of one.

    Raises:
        TypeError: it is no number.
        ValueError: it is less than 0, or several.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{optimizer}: a tensor lr must have one element, but its shape is {tuple(lr.shape)}.")
    check_not_negative(optimizer, group, ("lr",))


def check_betas(optimizer: str, group: Mapping[str, Any], tensors: bool = False) -> None:
    """Check that ``betas`` are two numbers, the factors of averages.

    Args:
        optimizer: for the message.
        group: has them.
        tensors: whether they may be tensors of one element.

    Raises:
        ValueError: they are not.
    """
    betas = group["betas"]
    if (
        not isinstance(betas, Sequence)
        or len(betas) != 2
        or not all(is_number(beta, or_tensor=tensors) for beta in betas)
        or not all(0 <= beta < 1 for beta in betas)
    ):
        raise ValueError(f"{optimizer}: betas must be two numbers in [0, 1), but is {betas!r}.")


def check_whole_numbers(optimizer: str, group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that each of ``options`` is a whole number.

    Raises:
        TypeError: one is not.
    """
    for option in options:
        if not isinstance(group[option], Integral) or not is_number(group[option]):
            raise TypeError(f"{optimizer}: {option} must be a whole number, but is {group[option]!r}.")


def check_flags(optimizer: str, group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Check that each of ``options`` is true or false, and not, say, the text "false".

    Raises:
        TypeError: one is not.
    """
    for option in options:
        if not isinstance(group[option], (bool, int)):
            raise TypeError(f"{optimizer}: {option} must be True or False, but is {group[option]!r}.")


def check_names(optimizer: Optimizer, options: Iterable[str]) -> None:
    """Refuse an option of a group that the optimizer does not have, which it would silently ignore.

    Raises:
        ValueError: there is one.
    """
    known = {*optimizer.defaults, "params", "param_names", *OF_SCHEDULERS}
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"a group has the option {unknown[0]!r}, which {type(optimizer).__name__} does not have; it has "
            f"{', '.join(sorted(optimizer.defaults))}."
        )


def saved_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` without the options that are code rather than data: ``split``, and functions."""
    groups = [
        {option: value for option, value in group.items() if option != "split" and not callable(value)}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def completed_groups(
    state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]], options: Sequence[Iterable[str]]
) -> dict[str, Any]:
    """``state_dict`` with the options that its groups lack taken from the current groups, and every ``split``.

    Args:
        state_dict: to be loaded; left as it is.
        groups: the optimizer's.
        options: which options each of these groups has.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        return state_dict  # for torch to refuse
    completed = [
        # torch adds options to an optimizer's defaults that its groups do not have
        {
            **new,
            **{option: old[option] for option in known if option in old and (option == "split" or option not in new)},
        }
        for new, old, known in zip(saved, groups, options, strict=True)
    ]
    return {**state_dict, "param_groups": completed}
