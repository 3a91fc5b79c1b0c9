"""Models described by a ``config.json`` in the style of Hugging Face, with the parameter names used there.

Families: gpt2; llama and mistral; qwen2 and qwen3; mixtral and qwen3_moe, whose experts are one module each.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mfsdp.planning.errors import PlanError
from mfsdp.planning.records import ParameterSpec, Role

__all__ = ["config_specs", "families"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Config:
    """The fields of a ``config.json``; a field that is needed and missing is an error that names it.

    Args:
        fields: the JSON object.
        source: where it is from, for errors.
    """

    fields: dict[str, Any]
    source: str

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.fields.get(name)
        if value is None:
            value = default
        if value is None:
            raise PlanError(f"{self.source}: {name!r} is missing; it must be a positive integer.")
        if type(value) is not int or value < 1:
            raise PlanError(f"{self.source}: {name!r} must be a positive integer, not {value!r}.")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        return bool(self.fields.get(name, default))


@dataclass(frozen=True)
class Family:
    """How the parameters of a family of models are named and shaped.

    Args:
        layers: name of the list of layers.
        number: name of the field with the number of layers.
        embeddings: config -> (name, shape) of the embeddings, the vocabulary first.
        layer: config -> (name within a layer, shape).
        final: config -> (name, shape) of what follows the layers, without the head.
        tied: whether the head is tied to the embedding unless the config says otherwise.
    """

    layers: str
    number: str
    embeddings: Callable[[Config], Shapes]
    layer: Callable[[Config], Shapes]
    final: Callable[[Config], Shapes]
    tied: bool = False


def _llama_embeddings(config: Config) -> Shapes:
    yield "model.embed_tokens.weight", (config.size("vocab_size"), config.size("hidden_size"))


def _llama_final(config: Config) -> Shapes:
    yield "model.norm.weight", (config.size("hidden_size"),)


def _attention(config: Config, *, qkv_bias: bool, o_bias: bool, qk_norm: bool) -> Shapes:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head = config.size("head_dim", hidden // heads)
    queries, keys = heads * head, config.size("num_key_value_heads", heads) * head
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if qkv_bias:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, queries)
    if o_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if qk_norm:
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _gated(prefix: str, names: tuple[str, str, str], hidden: int, inner: int) -> Shapes:
    gate, up, down = names
    yield f"{prefix}.{gate}.weight", (inner, hidden)
    yield f"{prefix}.{up}.weight", (inner, hidden)
    yield f"{prefix}.{down}.weight", (hidden, inner)


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _norms(config: Config) -> Shapes:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{name}.weight", (config.size("hidden_size"),)


def _llama_layer(config: Config) -> Shapes:
    bias = config.flag("attention_bias", False)
    yield from _attention(config, qkv_bias=bias, o_bias=bias, qk_norm=False)
    yield from _gated("mlp", _PROJECTIONS, config.size("hidden_size"), config.size("intermediate_size"))
    yield from _norms(config)


def _qwen2_layer(config: Config) -> Shapes:
    yield from _attention(config, qkv_bias=True, o_bias=False, qk_norm=False)
    yield from _gated("mlp", _PROJECTIONS, config.size("hidden_size"), config.size("intermediate_size"))
    yield from _norms(config)


def _qwen3_layer(config: Config) -> Shapes:
    bias = config.flag("attention_bias", False)
    yield from _attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    yield from _gated("mlp", _PROJECTIONS, config.size("hidden_size"), config.size("intermediate_size"))
    yield from _norms(config)


def _mixtral_layer(config: Config) -> Shapes:
    hidden = config.size("hidden_size")
    yield from _attention(config, qkv_bias=False, o_bias=False, qk_norm=False)
    experts = config.size("num_local_experts")
    yield "block_sparse_moe.gate.weight", (experts, hidden)
    for expert in range(experts):
        prefix = f"block_sparse_moe.experts.{expert}"
        yield from _gated(prefix, ("w1", "w3", "w2"), hidden, config.size("intermediate_size"))
    yield from _norms(config)


def _qwen3_moe_layer(config: Config) -> Shapes:
    hidden, bias = config.size("hidden_size"), config.flag("attention_bias", False)
    yield from _attention(config, qkv_bias=bias, o_bias=bias, qk_norm=True)
    experts = config.size("num_experts")
    yield "mlp.gate.weight", (experts, hidden)
    for expert in range(experts):
        yield from _gated(f"mlp.experts.{expert}", _PROJECTIONS, hidden, config.size("moe_intermediate_size"))
    yield from _norms(config)


def _gpt2_embeddings(config: Config) -> Shapes:
    width = config.size("n_embd")
    yield "transformer.wte.weight", (config.size("vocab_size"), width)
    yield "transformer.wpe.weight", (config.size("n_positions"), width)


def _gpt2_layer(config: Config) -> Shapes:
    width = config.size("n_embd")
    inner = config.size("n_inner", 4 * width)
    for norm in ("ln_1", "ln_2"):
        yield f"{norm}.weight", (width,)
        yield f"{norm}.bias", (width,)
    # this family stores its projections as (inputs, outputs)
    projections = {
        "attn.c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "mlp.c_fc": (width, inner),
        "mlp.c_proj": (inner, width),
    }
    for name, (rows, columns) in projections.items():
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (columns,)


def _gpt2_final(config: Config) -> Shapes:
    yield "transformer.ln_f.weight", (config.size("n_embd"),)
    yield "transformer.ln_f.bias", (config.size("n_embd"),)


def _llama_like(layer: Callable[[Config], Shapes]) -> Family:
    return Family("model.layers", "num_hidden_layers", _llama_embeddings, layer, _llama_final)


_FAMILIES = {
    "gpt2": Family("transformer.h", "n_layer", _gpt2_embeddings, _gpt2_layer, _gpt2_final, tied=True),
    "llama": _llama_like(_llama_layer),
    "mistral": _llama_like(_llama_layer),
    "qwen2": _llama_like(_qwen2_layer),
    "qwen3": _llama_like(_qwen3_layer),
    "mixtral": _llama_like(_mixtral_layer),
    "qwen3_moe": _llama_like(_qwen3_moe_layer),
}


def families() -> tuple[str, ...]:
    """The values of ``model_type`` that are known."""
    return tuple(_FAMILIES)


def _read(path: Path) -> Config:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: cannot be read ({error.strerror}).") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: not a JSON file ({error}).") from None
    if not isinstance(fields, dict):
        raise PlanError(f"{path}: a model config is a JSON object, not a {type(fields).__name__}.")
    return Config(fields, str(path))


def config_specs(path: Path, dtype: torch.dtype = torch.float32) -> list[ParameterSpec]:
    """The parameters of the model that a ``config.json`` describes.

    Args:
        path: the file.
        dtype: dtype in which they are stored.

    Raises:
        PlanError: the file cannot be read, is of an unknown family, or lacks a field.
    """
    config = _read(path)
    family = _FAMILIES.get(str(config.fields.get("model_type")))
    if family is None:
        raise PlanError(
            f"{path}: model_type {config.fields.get('model_type')!r} is of no known family; known are "
            f"{', '.join(families())}. Plan the module itself with --module."
        )
    embeddings = list(family.embeddings(config))
    tied = config.flag("tie_word_embeddings", family.tied)
    specs = []
    for index, (name, shape) in enumerate(embeddings):
        aliases = ("lm_head.weight",) if tied and index == 0 else ()
        specs.append(ParameterSpec(name, Role.ROWS, shape, dtype, aliases=aliases))
    layer = list(family.layer(config))
    for index in range(config.size(family.number)):
        unit = f"{family.layers}.{index}"
        specs.extend(_spec(f"{unit}.{name}", shape, dtype, unit) for name, shape in layer)
    specs.extend(_spec(name, shape, dtype, "") for name, shape in family.final(config))
    if not tied:
        specs.append(ParameterSpec("lm_head.weight", Role.ROWS, embeddings[0][1], dtype))
    return specs


def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype, unit: str) -> ParameterSpec:
    return ParameterSpec(name, Role.MATRIX if len(shape) == 2 else Role.TAIL, shape, dtype, unit)
