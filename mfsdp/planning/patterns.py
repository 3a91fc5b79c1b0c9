"""Choices that a user makes for parameters: by name pattern, or by a function."""

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import translate
from typing import TypeVar

from torch import nn

from mfsdp.planning.errors import PlanError
from mfsdp.planning.parameters import NamedParameter

__all__ = ["Chooser", "by_pattern", "chosen"]

Choice = TypeVar("Choice")
Chooser = Callable[[str, nn.Parameter, nn.Module], Choice | None]
"""Called with (name, parameter, module on which it is registered); None leaves the default."""


def by_pattern(what: str, patterns: Mapping[str, Choice], names: Sequence[tuple[str, ...]]) -> dict[str, Choice]:
    """Which choice is made for which name.

    Args:
        what: the name of the argument that ``patterns`` came in, for errors.
        patterns: shell-style pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots) -> choice.
        names: all names of each parameter, its canonical one first. A pattern may match any of them.

    Returns:
        Canonical name -> choice, for the parameters that some pattern matches.

    Raises:
        PlanError: a pattern matches nothing, or two patterns choose differently for one parameter.
    """
    compiled = [(pattern, re.compile(translate(pattern)), choice) for pattern, choice in patterns.items()]
    found: dict[str, tuple[str, Choice]] = {}
    unused = dict.fromkeys(patterns)
    for parameter in names:
        for pattern, regex, choice in compiled:
            if not any(regex.match(name) for name in parameter):
                continue
            unused.pop(pattern, None)
            earlier, previous = found.setdefault(parameter[0], (pattern, choice))
            if previous != choice:
                raise PlanError(
                    f"{what}: the patterns {earlier!r} and {pattern!r} both match {parameter[0]} and choose "
                    f"{previous} and {choice}. Make them disjoint."
                )
    if unused:
        raise PlanError(
            f"{what}: nothing matches {', '.join(map(repr, unused))}. Patterns are matched against full parameter "
            f"names such as {names[0][0] if names else 'layers.0.mlp.up.weight'!r}."
        )
    return {name: choice for name, (_, choice) in found.items()}


def chosen(
    what: str,
    choices: Chooser[Choice] | Mapping[str, Choice] | None,
    parameters: Sequence[NamedParameter],
) -> dict[str, Choice]:
    """Canonical name -> choice, for the parameters for which ``choices`` makes one.

    Raises:
        PlanError: as :func:`by_pattern`.
    """
    if choices is None:
        return {}
    if isinstance(choices, Mapping):
        return by_pattern(what, choices, [parameter.names for parameter in parameters])
    called = {
        parameter.names[0]: choices(parameter.names[0], parameter.parameter, parameter.modules[0])
        for parameter in parameters
    }
    return {name: choice for name, choice in called.items() if choice is not None}
