"""Choices that a user makes by name pattern: ``{"*.router.weight": Role.TAIL}``."""

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import TypeVar

from mfsdp.planning.errors import PlanError

__all__ = ["choices_by_pattern"]

Choice = TypeVar("Choice")


def choices_by_pattern(
    what: str, patterns: Mapping[str, Choice], names: Iterable[tuple[str, ...]]
) -> dict[str, Choice]:
    """Which choice is made for which parameter.

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
    chosen: dict[str, tuple[str, Choice]] = {}
    unused = set(patterns)
    for parameter in names:
        for pattern, regex, choice in compiled:
            if not any(regex.match(name) for name in parameter):
                continue
            unused.discard(pattern)
            earlier, previous = chosen.setdefault(parameter[0], (pattern, choice))
            if previous != choice:
                raise PlanError(
                    f"{what}: the patterns {earlier!r} and {pattern!r} both match {parameter[0]} and choose "
                    f"{previous} and {choice}. Make them disjoint."
                )
    if unused:
        missing = ", ".join(repr(pattern) for pattern in patterns if pattern in unused)
        raise PlanError(
            f"{what}: nothing matches {missing}. Patterns are matched against full parameter names such as "
            f"'layers.0.mlp.up.weight'."
        )
    return {name: choice for name, (_, choice) in chosen.items()}
