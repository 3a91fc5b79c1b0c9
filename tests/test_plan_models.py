"""Models that need not exist: the catalogue, config files, and that real modules are planned alike."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

from mfsdp.planning import ParameterSpec, PlanError, Role, plan, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.configs import config_specs, families

# As published with the models: the sum of numel() over their parameters, tied ones once.
PARAMETERS = {
    "gpt2-124m": 124_439_808,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257, "n_inner": None}
CONFIGS: list[tuple[dict[str, Any], int]] = [
    (LLAMA, PARAMETERS["llama3-8b"]),
    (QWEN3_MOE, PARAMETERS["qwen3-30b-a3b"]),
    (GPT2, PARAMETERS["gpt2-124m"]),
    (
        {
            "model_type": "mixtral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "num_local_experts": 8,
            "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    (
        {
            "model_type": "qwen3",
            "hidden_size": 5120,
            "head_dim": 128,
            "intermediate_size": 17408,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "num_hidden_layers": 40,
            "vocab_size": 151936,
        },
        PARAMETERS["qwen3-14b"],
    ),
    (
        {
            "model_type": "mistral",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
        },
        7_241_732_096,
    ),
]


def written(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def costs(specs: list[ParameterSpec]) -> list[tuple[Role, tuple[int, ...], str]]:
    """What a plan depends on, beside names, in a form that does not depend on the order within a unit."""
    return sorted((spec.role, spec.shape, spec.unit.rpartition(".")[2]) for spec in specs)


class TestCatalogue:
    def test_parameters_are_the_published_number(self) -> None:
        assert {name: sum(spec.numel for spec in catalogue_specs(name)) for name in model_names()} == PARAMETERS

    def test_a_config_file_gives_the_same_parameters(self, tmp_path: Path) -> None:
        for config, name in ((LLAMA, "llama3-8b"), (QWEN3_MOE, "qwen3-30b-a3b")):
            assert costs(config_specs(written(tmp_path, config))) == costs(catalogue_specs(name))


class TestConfigs:
    @pytest.mark.parametrize(("config", "published"), CONFIGS, ids=[config["model_type"] for config, _ in CONFIGS])
    def test_parameters_are_the_published_number(self, config: dict[str, Any], published: int, tmp_path: Path) -> None:
        specs = config_specs(written(tmp_path, config), torch.bfloat16)
        assert sum(spec.numel for spec in specs) == published
        assert {spec.dtype for spec in specs} == {torch.bfloat16}
        assert len({spec.name for spec in specs}) == len(specs)

    def test_every_family_is_tried(self) -> None:
        assert {config["model_type"] for config, _ in CONFIGS} == set(families())

    def test_tied_head(self, tmp_path: Path) -> None:
        tied = config_specs(written(tmp_path, LLAMA | {"tie_word_embeddings": True}))
        assert tied[0].aliases == ("lm_head.weight",)
        assert "lm_head.weight" not in {spec.name for spec in tied}


class Attention(nn.Module):
    def __init__(self, shapes: dict[str, list[int]]) -> None:
        super().__init__()
        for name, (rows, columns) in shapes.items():
            self.add_module(name, nn.Linear(columns, rows, bias=False))


class Layer(nn.Module):
    """The layers of the catalogue's dense models, from their shapes."""

    def __init__(self, shapes: dict[str, list[int]], vectors: list[int]) -> None:
        super().__init__()
        for part in ("attn", "mlp"):
            own = {name.partition(".")[2]: shape for name, shape in shapes.items() if name.startswith(part)}
            self.add_module(part, Attention(own))
        self.vectors = nn.ParameterList(nn.Parameter(torch.empty(size)) for size in vectors)


class Model(nn.Module):
    def __init__(self, layers: int, shapes: dict[str, list[int]], vectors: list[int]) -> None:
        super().__init__()
        hidden = shapes["attn.o"][0]
        self.embed = nn.Embedding(1000, hidden)
        self.layers = nn.ModuleList(Layer(shapes, vectors) for _ in range(layers))
        self.vectors = nn.ParameterList([nn.Parameter(torch.empty(hidden))])
        self.head = nn.Linear(hidden, 1000, bias=False)


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_plan_of_a_real_module_is_that_of_the_catalogue_entry(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {"attn.q": [64, 32], "attn.k": [16, 32], "attn.o": [32, 64], "mlp.up": [96, 32], "mlp.down": [32, 96]}
    facts = {
        "layers": 5,
        "hidden": 32,
        "vocab": 1000,
        "per_layer": shapes,
        "vectors_per_layer": [32, 32, 8],
        "final_vectors": [32],
        "tied_head": False,
    }
    monkeypatch.setattr("mfsdp.planning.catalogue._models", lambda: {"small": facts})
    with torch.device("meta"):
        model = Model(5, shapes, [32, 32, 8])
    real, listed = plan(model, ranks), plan_specs(catalogue_specs("small"), ranks)
    assert real.entries == listed.entries
    # a ParameterList registers the final norm before the head here; the order is part of the plan
    assert real.first_difference(listed) is None
    assert real == listed


def test_the_plan_of_a_real_llama_is_that_of_the_catalogue_entry() -> None:
    facts = {
        "attn.q": [4096, 4096],
        "attn.k": [1024, 4096],
        "attn.v": [1024, 4096],
        "attn.o": [4096, 4096],
        "mlp.gate": [14336, 4096],
        "mlp.up": [14336, 4096],
        "mlp.down": [4096, 14336],
    }
    with torch.device("meta"):
        model = Model(32, facts, [4096, 4096])
        model.embed = nn.Embedding(128256, 4096)
        model.head = nn.Linear(4096, 128256, bias=False)
    assert plan(model, 64) == plan_specs(catalogue_specs("llama3-8b"), 64)


def test_specs_can_be_planned_in_another_dtype() -> None:
    full = catalogue_specs("gpt2-124m")
    half = catalogue_specs("gpt2-124m", torch.bfloat16)
    assert half == [replace(spec, dtype=torch.bfloat16) for spec in full]


class TestErrors(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def message(self, path: Path) -> str:
        with pytest.raises(PlanError) as caught:
            config_specs(path)
        return str(caught.value).replace(str(self.folder), "DIR")

    def test_config_files(self) -> None:
        found = [
            self.message(self.folder / "absent.json"),
            self.message(written(self.folder, LLAMA | {"model_type": "bert"})),
            self.message(written(self.folder, {"hidden_size": 3})),
            self.message(written(self.folder, [])),
            self.message(written(self.folder, {k: v for k, v in LLAMA.items() if k != "vocab_size"})),
            self.message(written(self.folder, LLAMA | {"num_hidden_layers": -1})),
        ]
        (self.folder / "config.json").write_text("{")
        found.append(self.message(self.folder / "config.json"))
        self.assertExpectedInline(
            "\n".join(found),
            """\
DIR/absent.json: cannot be read (No such file or directory).
DIR/config.json: model_type 'bert' is of no known family; known are gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe. Plan the module itself with --module.
DIR/config.json: model_type None is of no known family; known are gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe. Plan the module itself with --module.
DIR/config.json: a model config is a JSON object, not a list.
DIR/config.json: 'vocab_size' is missing; it must be a positive integer.
DIR/config.json: 'num_hidden_layers' must be a positive integer, not -1.
DIR/config.json: not a JSON file (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)).""",
        )
