"""Models of public shapes, to plan without having them.

The names of the parameters are ``embed.weight``, ``positions.weight``, ``layers.3.attn.q.weight``,
``layers.3.experts.7.up.weight``, ``layers.3.vectors.0``, ``vectors.0`` and ``head.weight``.
"""

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import ParameterSpec, Role

__all__ = ["catalogue_specs", "model_names"]


@cache
def _models() -> dict[str, Any]:
    text = files("mfsdp.planning").joinpath("data/model_shapes.json").read_text(encoding="utf-8")
    return {name: facts for name, facts in json.loads(text).items() if not name.startswith("_")}


def model_names() -> tuple[str, ...]:
    """The names of the models in the catalogue."""
    return tuple(_models())


def _layer(index: int, facts: dict[str, Any], dtype: torch.dtype) -> Iterator[ParameterSpec]:
    unit = f"layers.{index}"
    for name, shape in facts["per_layer"].items():
        yield ParameterSpec(f"{unit}.{name}.weight", Role.MATRIX, tuple(shape), dtype, unit)
    experts = facts.get("experts", {"count": 0})
    for expert in range(experts["count"]):
        for name in ("gate", "up", "down"):
            full_name = f"{unit}.experts.{expert}.{name}.weight"
            yield ParameterSpec(full_name, Role.MATRIX, tuple(experts[name]), dtype, unit)
    for number, size in enumerate(facts["vectors_per_layer"]):
        yield ParameterSpec(f"{unit}.vectors.{number}", Role.TAIL, (size,), dtype, unit)


def catalogue_specs(model: str, dtype: torch.dtype = torch.float32) -> list[ParameterSpec]:
    """The parameters of a model of the catalogue.

    Args:
        model: one of :func:`model_names`.
        dtype: dtype in which they are stored.

    Raises:
        PlanError: there is no such model.
    """
    try:
        facts = _models()[model]
    except KeyError:
        raise PlanError(f"unknown model {model!r}; the catalogue has {', '.join(model_names())}.") from None
    vocabulary = facts["vocab"], facts["hidden"]
    tied = ("head.weight",) if facts["tied_head"] else ()
    specs = [ParameterSpec("embed.weight", Role.ROWS, vocabulary, dtype, aliases=tied)]
    if "positions" in facts:
        shape = facts["positions"], facts["hidden"]
        specs.append(ParameterSpec("positions.weight", Role.ROWS, shape, dtype))
    for index in range(facts["layers"]):
        specs.extend(_layer(index, facts, dtype))
    for number, size in enumerate(facts["final_vectors"]):
        specs.append(ParameterSpec(f"vectors.{number}", Role.TAIL, (size,), dtype))
    if not facts["tied_head"]:
        specs.append(ParameterSpec("head.weight", Role.ROWS, vocabulary, dtype))
    return specs
