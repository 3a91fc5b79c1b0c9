"""Plans of modules: roles, costs, owners, and what people read."""

import copy
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Mapping

import expecttest
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mfsdp.planning import (
    MatrixShard,
    MuonCost,
    RankLoad,
    Role,
    ShardPlan,
    plan,
    plan_parameters,
)
from tests.plan_cases import Block, gpt, roles


class TestRoles:
    def test_of_a_gpt(self) -> None:
        for device in ("cpu", "meta"):
            found = roles(plan(gpt(1, device=device), 2))
            assert found == {
                "embed.weight": Role.ROWS,
                "position.weight": Role.ROWS,
                "blocks.0.norm.weight": Role.TAIL,
                "blocks.0.norm.bias": Role.TAIL,
                "blocks.0.qkv.weight": Role.MATRIX,
                "blocks.0.qkv.bias": Role.TAIL,
                "blocks.0.output.weight": Role.MATRIX,
                "blocks.0.up.weight": Role.MATRIX,
                "blocks.0.down.weight": Role.MATRIX,
                "norm.weight": Role.TAIL,
                "norm.bias": Role.TAIL,
                "logits.weight": Role.ROWS,
            }

    def test_blocks_as_wide_as_the_vocabulary_keep_their_matrices(self) -> None:
        found = roles(plan(gpt(1, vocab=64), 2))
        assert found["blocks.0.output.weight"] is Role.MATRIX
        assert found["logits.weight"] is Role.ROWS

    def test_head_by_its_name_without_an_embedding(self) -> None:
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "x": nn.Linear(8, 8)})
        wrapped = nn.Module()
        wrapped.body = model
        wrapped.head = nn.Linear(8, 10)
        assert roles(plan(wrapped, 2)) == {
            "body.body.weight": Role.MATRIX,
            "body.body.bias": Role.TAIL,
            "body.x.weight": Role.MATRIX,
            "body.x.bias": Role.TAIL,
            "head.weight": Role.ROWS,
            "head.bias": Role.TAIL,
        }

    def test_tied_head_is_one_entry_with_an_alias(self) -> None:
        model = gpt(1, tied=True)
        made = plan(model, 2)
        assert "logits.weight" not in made.entries
        assert made.entries["embed.weight"].role is Role.ROWS
        assert made.entries["embed.weight"].aliases == ("logits.weight",)
        assert made.name_of(model.logits, "weight") == "embed.weight"

    def test_tied_to_an_embedding_that_comes_later(self) -> None:
        model = nn.Module()
        model.first = nn.Linear(4, 9, bias=False)
        model.second = nn.Embedding(9, 4)
        model.second.weight = model.first.weight
        assert roles(plan(model, 2)) == {"first.weight": Role.ROWS}

    def test_more_dimensions_are_tails_unless_chosen(self) -> None:
        model = nn.Module()
        model.conv = nn.Conv2d(3, 8, 3)
        model.scale = nn.Parameter(torch.tensor(1.0))
        assert set(roles(plan(model, 2)).values()) == {Role.TAIL}

    def test_overrides(self) -> None:
        by_pattern = roles(plan(gpt(1), 2, roles={"*.output.weight": Role.TAIL, "position.*": Role.MATRIX}))
        assert by_pattern["blocks.0.output.weight"] is Role.TAIL
        assert by_pattern["position.weight"] is Role.MATRIX

        def choose(name: str, parameter: nn.Parameter, module: nn.Module) -> Role | None:
            return Role.MATRIX if isinstance(module, nn.Embedding) and parameter.shape[0] == 64 else None

        by_function = roles(plan(gpt(1), 2, roles=choose))
        assert by_function["position.weight"] is Role.MATRIX
        assert by_function["embed.weight"] is Role.ROWS


class TestTables(expecttest.TestCase):
    def test_small(self) -> None:
        self.assertExpectedInline(
            str(plan(gpt(1), 2)),
            """\
ShardPlan for 2 ranks: 12 parameters, 66.0 k elements, 2 units, cost model muon

role    parameters  elements  resident        step  owners
MATRIX           4    49.2 k   576 KiB  73.4 MFLOP     0-1
TAIL             5       448  7.00 KiB  6.27 kFLOP       1
ROWS             3    16.4 k   256 KiB   229 kFLOP     all

rank  matrices        step  of mean  resident  of mean
0            2  42.1 MFLOP    1.142   464 KiB    1.106
1            2  31.6 MFLOP    0.858   375 KiB    0.894
largest over mean: step 1.142, resident 1.106, matrices 1.000

parameter               role    shape   dtype    resident        step  owner
embed.weight            ROWS    96x64   float32  96.0 KiB  86.0 kFLOP    all
position.weight         ROWS    64x64   float32  64.0 KiB  57.3 kFLOP    all
blocks.0.norm.weight    TAIL    64      float32  1.00 KiB    896 FLOP      1
blocks.0.norm.bias      TAIL    64      float32  1.00 KiB    896 FLOP      1
blocks.0.qkv.weight     MATRIX  192x64  float32   144 KiB  18.4 MFLOP      0
blocks.0.qkv.bias       TAIL    192     float32  3.00 KiB  2.69 kFLOP      1
blocks.0.output.weight  MATRIX  64x64   float32  48.0 KiB  7.86 MFLOP      1
blocks.0.up.weight      MATRIX  256x64  float32   192 KiB  23.6 MFLOP      1
blocks.0.down.weight    MATRIX  64x256  float32   192 KiB  23.6 MFLOP      0
norm.weight             TAIL    64      float32  1.00 KiB    896 FLOP      1
norm.bias               TAIL    64      float32  1.00 KiB    896 FLOP      1
logits.weight           ROWS    96x64   float32  96.0 KiB  86.0 kFLOP    all""",
        )

    def test_large(self) -> None:
        text = str(plan(gpt(12), type("Mesh", (), {"shape": (2, 32)})()))
        assert max(map(len, text.splitlines())) <= 100
        self.assertExpectedInline(
            text,
            """\
ShardPlan for 32 ranks x 2 replicas: 89 parameters, 610 k elements, 13 units, cost model muon

role    parameters  elements  resident        step    owners
MATRIX          48     590 k  6.75 MiB   881 MFLOP      0-31
TAIL            38    3.97 k  62.0 KiB  55.6 kFLOP  13 ranks
ROWS             3    16.4 k   256 KiB   229 kFLOP       all

rank       matrices        step  of mean  resident  of mean
24                2  36.7 MFLOP    1.333   296 KiB    1.310
25                2  36.7 MFLOP    1.333   296 KiB    1.310
26                2  36.7 MFLOP    1.333   296 KiB    1.310
27                2  36.7 MFLOP    1.333   296 KiB    1.310
(24 more)
17                1  23.6 MFLOP    0.857   200 KiB    0.885
19                1  23.6 MFLOP    0.857   200 KiB    0.885
21                1  23.6 MFLOP    0.857   200 KiB    0.885
23                1  23.6 MFLOP    0.857   200 KiB    0.885
largest over mean: step 1.333, resident 1.310, matrices 1.333

parameter               role    shape   dtype     n  resident        step     owners
embed.weight            ROWS    96x64   float32   1  96.0 KiB  86.0 kFLOP        all
position.weight         ROWS    64x64   float32   1  64.0 KiB  57.3 kFLOP        all
blocks.*.norm.weight    TAIL    64      float32  12  12.0 KiB  10.8 kFLOP   12 ranks
blocks.*.norm.bias      TAIL    64      float32  12  12.0 KiB  10.8 kFLOP   12 ranks
blocks.*.qkv.weight     MATRIX  192x64  float32  12  1.69 MiB   220 MFLOP      24-31
blocks.*.qkv.bias       TAIL    192     float32  12  36.0 KiB  32.3 kFLOP   12 ranks
blocks.*.output.weight  MATRIX  64x64   float32  12   576 KiB  94.4 MFLOP  0-7,28-31
blocks.*.up.weight      MATRIX  256x64  float32  12  2.25 MiB   283 MFLOP   12 ranks
blocks.*.down.weight    MATRIX  64x256  float32  12  2.25 MiB   283 MFLOP   12 ranks
norm.weight             TAIL    64      float32   1  1.00 KiB    896 FLOP          9
norm.bias               TAIL    64      float32   1  1.00 KiB    896 FLOP          9
logits.weight           ROWS    96x64   float32   1  96.0 KiB  86.0 kFLOP        all""",
        )

    def test_repr(self) -> None:
        self.assertExpectedInline(
            repr(ShardPlan({}, 2)),
            """ShardPlan(0 parameters, world_size=2, hash=f0b79cd53cdc)""",
        )


class TestCosts:
    def test_resident_bytes_are_those_of_real_optimizers(self) -> None:
        """Parameter, gradient and the state that torch's own optimizers make."""
        model = gpt(1, device="cpu")
        made = plan(model, 1)
        groups: dict[bool, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            groups[made.entries[name].role is Role.MATRIX].append(parameter)
        optimizers = [torch.optim.Muon(groups[True]), torch.optim.AdamW(groups[False])]
        for optimizer in optimizers:
            optimizer.step()
        state = {
            parameter: sum(value.nbytes for name, value in values.items() if name != "step")
            for optimizer in optimizers
            for parameter, values in optimizer.state.items()
        }
        for name, parameter in model.named_parameters():
            expected = 2 * parameter.nbytes + state[parameter]
            assert made.entries[name].resident_bytes == expected, name
            assert made.entries[name].parameter_bytes == parameter.nbytes

    def test_newton_schulz_flops_are_those_of_its_matrix_products(self) -> None:
        counter = FlopCounterMode(display=False)
        weight = nn.Parameter(torch.randn(6, 10))
        weight.grad = torch.randn(6, 10)
        with counter:
            torch.optim.Muon([weight]).step()
        made = plan(nn.ParameterDict({"w": weight}), 1)
        assert made.entries["w"].step_flops == counter.get_total_flops()
        tall = plan(nn.ParameterDict({"w": nn.Parameter(weight.T)}), 1)
        assert tall.entries["w"].step_flops == counter.get_total_flops()

    def test_frozen_parameter_costs_its_own_bytes(self) -> None:
        model = nn.Linear(4, 4, bias=False).requires_grad_(False)
        entry = plan(model, 2).entries["weight"]
        assert (entry.role, entry.resident_bytes, entry.step_flops) == (Role.MATRIX, 64, 0)

    def test_rows_count_with_the_rows_of_the_rank(self) -> None:
        model = nn.Embedding(10, 3)
        made = plan(model, 4)
        chunks = [chunk.numel() for chunk in torch.empty(10, 3).chunk(4)]
        assert [load.resident_bytes for load in made.loads()] == [16 * numel for numel in chunks]
        assert sum(load.resident_bytes for load in plan(model, 64).loads()) == 16 * 30

    def test_more_iterations_cost_more(self) -> None:
        cheap, dear = (plan(gpt(1), 2, cost_model=MuonCost(ns_steps=steps)) for steps in (1, 10))
        name = "blocks.0.up.weight"
        assert dear.entries[name].step_flops == 10 * cheap.entries[name].step_flops
        assert cheap.hash() != dear.hash()


class TestOwners:
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
    def test_balanced_over_the_whole_model(self, world_size: int) -> None:
        made = plan(gpt(12), world_size)
        for measure in ("step_flops", "resident_bytes"):
            values = [getattr(load, measure) for load in made.loads()]
            assert max(values) <= 1.05 * sum(values) / world_size, measure
        assert sum(load.matrices for load in made.loads()) == 48

    def test_loads_add_up_to_the_model(self) -> None:
        made = plan(gpt(3), 3)
        total = sum(entry.resident_bytes for entry in made.entries.values())
        assert sum(load.resident_bytes for load in made.loads()) == total

    def test_a_unit_is_spread_over_owners(self) -> None:
        made = plan(gpt(8), 4)
        for block in range(8):
            owners = {
                entry.owner
                for entry in made.entries.values()
                if entry.unit == f"blocks.{block}" and entry.role is Role.MATRIX
            }
            assert len(owners) >= 3, block

    def test_tails_of_a_unit_stay_together_and_are_balanced(self) -> None:
        made = plan(gpt(12), 4)
        owners: dict[str, set[int | None]] = defaultdict(set)
        for entry in made.entries.values():
            if entry.role is Role.TAIL:
                owners[entry.unit].add(entry.owner)
        assert {len(found) for found in owners.values()} == {1}
        only_tails = plan(nn.Sequential(*(nn.LayerNorm(64) for _ in range(100))), 4)
        assert only_tails.imbalance().resident_bytes <= 1.05

    def test_more_ranks_than_parameters(self) -> None:
        made = plan(gpt(1), 64)
        assert max(load.matrices for load in made.loads()) == 1

    def test_no_parameters(self) -> None:
        made = plan(nn.ReLU(), 3)
        assert made.loads() == (RankLoad(),) * 3
        assert made.imbalance().step_flops == 1.0
        assert str(made)

    def test_owners_of_a_two_dimensional_mesh_are_on_the_last_dimension(self) -> None:
        made = plan(gpt(4), type("Mesh", (), {"shape": (3, 2)})())
        assert (made.replicas, made.world_size, len(made.loads())) == (3, 2, 2)
        assert made.entries == plan(gpt(4), 2).entries

    def test_part_by_part_with_loads_carried_over(self) -> None:
        model = gpt(12)
        loads = [RankLoad()] * 4
        for index, block in enumerate(model.blocks):
            part = plan_parameters(
                (
                    (f"{path}.{name}" if path else name, parameter, module)
                    for path, module in block.named_modules()
                    for name, parameter in module.named_parameters(recurse=False)
                ),
                4,
                initial_loads=loads,
                unit=f"blocks.{index}",
            )
            assert part.name_of(block.up, "weight") == "up.weight"
            loads = [before + more for before, more in zip(loads, part.loads(), strict=True)]
        flops = [load.step_flops for load in loads]
        assert max(flops) <= 1.1 * sum(flops) / 4
        assert sum(load.matrices for load in loads) == 48


class TestValue:
    def test_json_round_trip(self) -> None:
        made = plan(gpt(2, tied=True), 3)
        again = ShardPlan.from_json(made.to_json())
        assert again == made
        assert again.to_json() == made.to_json()
        assert again.hash() == made.hash()
        assert hash(again) == hash(made)
        assert list(again.entries) == list(made.entries)

    def test_hash_sees_every_field(self) -> None:
        entry = MatrixShard("w", Role.MATRIX, 0, (3, 4), torch.float32, 1, 2, "u", ("v",))
        changes: list[Mapping[str, object]] = [
            {"name": "x"},
            {"role": Role.TAIL},
            {"owner": 1},
            {"shape": (4, 3)},
            {"dtype": torch.float16},
            {"resident_bytes": 3},
            {"step_flops": 3},
            {"unit": ""},
            {"aliases": ()},
        ]
        hashes = {ShardPlan({"w": entry}, 2).hash()}
        for change in changes:
            changed = dataclasses.replace(entry, **change)  # type: ignore[arg-type]
            hashes.add(ShardPlan({changed.name: changed}, 2).hash())
        hashes.add(ShardPlan({"w": entry}, 3).hash())
        hashes.add(ShardPlan({"w": entry}, 2, replicas=2).hash())
        assert len(hashes) == len(changes) + 3

    def test_the_same_in_every_process(self) -> None:
        program = "from tests.test_plan import gpt, plan; made = plan(gpt(3, tied=True), 3); print(made.hash())"
        found = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed},
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
            for seed in ("0", "1")
        }
        assert found == {plan(gpt(3, tied=True), 3).hash()}

    def test_pickled_and_copied_plans_are_equal_and_unbound(self) -> None:
        model = gpt(1)
        made = plan(model, 2)
        for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
            assert again == made
            assert again.name_of(model.norm, "weight") is None

    def test_the_garbage_collector_is_left_as_it_was(self) -> None:
        assert gc.isenabled()
        plan(gpt(1), 2)
        assert gc.isenabled()
        gc.disable()
        try:
            plan(gpt(1), 2)
            assert not gc.isenabled()
        finally:
            gc.enable()

    def test_entries_cannot_be_changed(self) -> None:
        made = plan(gpt(1), 2)
        with pytest.raises(TypeError):
            made.entries["x"] = made.entries["embed.weight"]  # type: ignore[index]


class TestBinding:
    def test_modules_are_found_after_materialisation(self) -> None:
        model = gpt(2)
        made = plan(model, 2)
        model.to_empty(device="cpu").to(torch.bfloat16)
        model.blocks[1].__class__ = type("FSDPBlock", (Block,), {})
        assert made.name_of(model.blocks[1].up, "weight") == "blocks.1.up.weight"
        assert made.name_of(model.blocks[1], "weight") is None
        assert made.name_of(gpt(1).norm, "weight") is None

    def test_a_loaded_plan_is_bound_to_a_model(self) -> None:
        model = gpt(2, tied=True)
        loaded = ShardPlan.from_json(plan(gpt(2, tied=True), 2).to_json())
        assert loaded.name_of(model.norm, "weight") is None
        bound = loaded.bind(model)
        assert bound == loaded
        assert bound.name_of(model.norm, "weight") == "norm.weight"
        assert bound.name_of(model.logits, "weight") == "embed.weight"

    def test_a_module_under_two_names(self) -> None:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False)] * 2)
        made = plan(model, 1)
        assert made.entries["0.weight"].aliases == ("1.weight",)
        assert made.name_of(model[1], "weight") == "0.weight"

    def test_no_module_is_kept_alive(self) -> None:
        model = gpt(1)
        made = plan(model, 2)
        norm = weakref.ref(model.norm)
        del model
        gc.collect()
        assert norm() is None
        assert made.entries
