"""What follows from a plan: traffic, comparison with other ways to shard, bounds and advice, replicas."""

import json
import random

import pytest
import torch
from torch import nn

from mfsdp.planning import (
    CostModel,
    MuonCost,
    ParameterSpec,
    PlanError,
    Precision,
    Role,
    ShampooCost,
    ShardPlan,
    SoapCost,
    Stack,
    plan,
    plan_specs,
)
from mfsdp.planning.advice import advice, bounds, idle_ranks
from mfsdp.planning.catalogue import catalogue_specs
from mfsdp.planning.comparison import compare, step_peaks
from mfsdp.planning.parameters import unit_of_modules
from mfsdp.planning.plot import plot
from mfsdp.planning.rates import Rates
from mfsdp.planning.summary import Summary
from mfsdp.planning.traffic import replica_bytes, unit_traffic

BF16 = torch.bfloat16


def small() -> list[ParameterSpec]:
    """Two units of two equal matrices and a tail, and an embedding; in bf16."""
    specs = [ParameterSpec("embed", Role.ROWS, (8, 4), BF16)]
    for unit in ("a", "b"):
        specs += [ParameterSpec(f"{unit}.{name}", Role.MATRIX, (4, 6), BF16, unit) for name in ("x", "y")]
        specs.append(ParameterSpec(f"{unit}.norm", Role.TAIL, (10,), BF16, unit))
    return specs


MIXED = MuonCost(precision=Precision(master=torch.float32, gradient=torch.float32))


class TestTraffic:
    def test_units(self) -> None:
        made = plan_specs(small(), 2, cost_model=MIXED)
        root, a, b = unit_traffic(made, MIXED.precision)
        assert (root.unit, root.gather_bytes, root.reduce_bytes) == ("", 32 * 2, 32 * 4)
        assert (root.owners, root.largest_share) == (0, 0.0)
        for unit in (a, b):
            assert (unit.gather_bytes, unit.reduce_bytes) == (58 * 2, 58 * 4)
            assert unit.owners == 2
            assert unit.largest_share == pytest.approx(34 / 58)

    def test_frozen_parameters_are_gathered_and_not_reduced(self) -> None:
        made = plan(nn.Linear(4, 4, bias=False).requires_grad_(False), 2)
        (unit,) = unit_traffic(made)
        assert (unit.gather_bytes, unit.reduce_bytes) == (64, 0)

    def test_replicas_exchange_the_gradients_of_what_they_own(self) -> None:
        made = plan_specs(small(), 2, replicas=3, cost_model=MIXED)
        assert sum(replica_bytes(made, MIXED.precision)) == sum(spec.numel for spec in small()) * 4
        assert replica_bytes(plan_specs(small(), 2)) == [0, 0]
        assert made.entries == plan_specs(small(), 2, cost_model=MIXED).entries


class TestComparison:
    def test_by_hand(self) -> None:
        """4 matrices of 24 elements, 2 tails of 10, 8 rows of 4, on 2 ranks."""
        made = plan_specs(small(), 2, cost_model=MIXED)
        zero3, zero1, once, ours = compare(made, MIXED)
        # parameter 2, master 4, gradient 4; momentum 4 for a matrix, moments 8 for the rest
        resident = 48 * 14 + (16 + 10) * 18
        assert (zero3.resident_bytes, once.resident_bytes, ours.resident_bytes) == (resident,) * 3
        everything = 4 * 24 + 20 + 32
        assert zero1.resident_bytes == everything * 6 + 48 * 8 + 26 * 12
        flops = 4 * MIXED.matrix_flops(4, 6)
        assert zero3.step_flops == once.step_flops == flops + 14 * 52 // 2
        assert zero1.step_flops == ours.step_flops == flops // 2 + 14 * 52 // 2
        gradients = 4 * 24 * 4
        assert (zero3.moved_bytes, once.moved_bytes, ours.moved_bytes) == (gradients // 2, gradients // 2, 0)
        assert zero1.moved_bytes == everything * 2 // 2
        transient = 24 * (4 + 4) + 4 * 16
        assert ours.peak_bytes - resident == transient
        assert zero1.peak_bytes - zero1.resident_bytes == transient
        assert zero3.peak_bytes - resident == transient + 24 * 4
        assert once.peak_bytes - resident == transient + gradients

    def test_batches_take_more_at_once(self) -> None:
        made = plan_specs(small(), 2, cost_model=MIXED)
        batched = MuonCost(precision=MIXED.precision, batch_elements=48)
        # iterates and squares of both matrices of a rank, and one update at a time
        both = 48 * 4 + 4 * 2 * 16 + 24 * 4
        assert step_peaks(made, batched) == [load.resident_bytes + both for load in made.loads()]
        too_small = MuonCost(precision=MIXED.precision, batch_elements=47)
        assert step_peaks(made, too_small) == step_peaks(made, MIXED)

    def test_a_tall_matrix_is_transposed_from_a_copy(self) -> None:
        wide, tall = (
            step_peaks(plan_specs([ParameterSpec("w", Role.MATRIX, shape, BF16)], 1), MuonCost())
            for shape in ((4, 6), (6, 4))
        )
        assert tall == [wide[0] + 24 * 2]

    def test_elementwise_steps_can_be_the_peak(self) -> None:
        specs = [ParameterSpec("w", Role.MATRIX, (2, 2), torch.float32), ParameterSpec("t", Role.TAIL, (500,), BF16)]
        made = plan_specs(specs, 2)
        owner = made.entries["t"].owner
        assert owner is not None
        assert step_peaks(made, MuonCost())[owner] == made.loads()[owner].resident_bytes + 1000

    def test_32_billion_parameters_fit_64_ranks_where_replicated_parameters_do_not(self) -> None:
        """The claim of the paper: about 10 GB a rank; over 54 GB at 14 billion with parameters everywhere."""
        cost = MuonCost(precision=Precision(master=torch.float32))
        schemes = {}
        for model in ("qwen3-14b", "qwen3-32b"):
            made = plan_specs(catalogue_specs(model, BF16), 64, cost_model=cost)
            schemes[model] = {scheme.name: scheme for scheme in compare(made, cost)}
        assert schemes["qwen3-32b"]["mfsdp"].peak_bytes < 10e9
        assert schemes["qwen3-14b"]["zero1-owner"].resident_bytes > 54e9
        assert schemes["qwen3-32b"]["zero1-owner"].resident_bytes > 80e9
        ours, once = (schemes["qwen3-32b"][name].peak_bytes for name in ("mfsdp", "gather-once"))
        assert once > 7 * ours


class TestAdvice:
    def test_idle_ranks_and_what_would_help(self) -> None:
        made = plan_specs(catalogue_specs("gpt2-124m"), 64)
        assert idle_ranks(made) == 16
        text = "\n".join(advice(made))
        assert "48 matrices for 64 ranks: 16 ranks without any" in text
        assert "37 ranks or fewer, or replicas: --mesh 2x32" in text
        helped = plan_specs(catalogue_specs("gpt2-124m"), 37)
        assert max(load.step_flops for load in helped.loads()) >= max(load.step_flops for load in made.loads())

    def test_an_even_plan_needs_none(self) -> None:
        assert list(advice(plan_specs(catalogue_specs("llama3-8b"), 8))) == []

    def test_stacks_that_nobody_named(self) -> None:
        model = nn.ParameterDict({"experts": nn.Parameter(torch.zeros(4, 3, 3))})
        (note,) = advice(plan(model, 2))
        assert "experts" in note
        assert "splits=" in note
        assert " ".join(str(plan(model, 2)).split()).endswith(f"note: {note}")
        assert "note:" not in str(plan(model, 2, splits={"experts": Stack()}))
        assert "spread_stacks" in "\n".join(advice(plan(model, 4, splits={"experts": Stack()})))

    def test_bounds_count_single_matrices_of_a_spread_stack(self) -> None:
        model = nn.ParameterDict({"experts": nn.Parameter(torch.zeros(4, 3, 3))})
        made = plan(model, 4, splits={"experts": Stack()}, spread_stacks=True)
        flops, nbytes = bounds(made)
        assert flops.value == flops.mean == made.loads()[0].step_flops
        assert nbytes.value == nbytes.mean == made.loads()[0].resident_bytes


class TestStepTimes:
    def test_each_matrix_and_each_element_takes_its_time(self) -> None:
        rates = Rates("", flops_per_second=1e6, seconds_per_matrix=0.5, elements_per_second=100.0)
        made = plan_specs(small(), 2)
        found = Summary(made, MuonCost(), rates).step_seconds(rates)
        expected = 2 * (0.5 + MuonCost().matrix_flops(4, 6) / 1e6) + (16 + 10) / 100
        assert found == pytest.approx([expected, expected])

    def test_rates_must_be_positive(self) -> None:
        with pytest.raises(PlanError):
            Rates("", 0.0, 0.0, 1.0)


class TestUnits:
    def model(self) -> nn.Module:
        model = nn.Module()
        model.stages = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2))
        model.head = nn.Sequential(nn.Linear(2, 2))
        return model

    def test_nearest_child_of_a_container(self) -> None:
        units = unit_of_modules(self.model())
        assert units["stages.1.0"] == "stages.1.0"
        assert units["stages.1"] == "stages.1"
        assert units["head.0"] == units["stages"] == units[""] == ""

    def test_by_pattern_the_outermost(self) -> None:
        units = unit_of_modules(self.model(), ["stages.*", "head"])
        assert units["stages.1.0"] == "stages.1"
        assert units["head.0"] == "head"
        made = plan(self.model(), 2, units=["stages.*"])
        assert made.entries["stages.0.1.weight"].unit == "stages.0"
        assert made.entries["head.0.weight"].unit == ""

    def test_pattern_that_matches_nothing(self) -> None:
        with pytest.raises(PlanError, match=r"units: no module's name matches 'layers\.\*'"):
            plan(self.model(), 2, units=["layers.*"])


def random_specs(seed: int) -> tuple[list[ParameterSpec], int]:
    """Up to 30 parameters of all roles, stacks, frozen, empty and 0-d ones among them; and a number of ranks."""
    rng = random.Random(seed)
    specs = []
    for number in range(rng.randint(0, 30)):
        name, unit, kind = f"p{number}", rng.choice(["", "a", "b"]), rng.random()
        if kind < 0.5:
            shape: tuple[int, ...] = rng.randint(0, 40), rng.randint(0, 40)
            trainable = rng.random() < 0.9
            specs.append(ParameterSpec(name, Role.MATRIX, shape, torch.float32, unit, trainable=trainable))
        elif kind < 0.6:
            shape = rng.randint(1, 9), rng.randint(1, 9), rng.randint(1, 9)
            specs.append(ParameterSpec(name, Role.MATRIX, shape, BF16, unit, split=Stack()(shape)))
        elif kind < 0.85:
            shape = tuple(rng.randint(0, 9) for _ in range(rng.choice([0, 1, 1, 3])))
            specs.append(ParameterSpec(name, Role.TAIL, shape, torch.float32, unit))
        else:
            shape = rng.randint(0, 50), rng.randint(0, 9)
            specs.append(ParameterSpec(name, Role.ROWS, shape, torch.float32, unit))
    return specs, rng.choice([1, 2, 3, 5, 8, 40])


@pytest.mark.parametrize("cost_model", [MuonCost(), ShampooCost(), SoapCost(precision=Precision(master=torch.float32))])
@pytest.mark.parametrize("spread_stacks", [False, True])
def test_what_holds_for_every_plan(cost_model: CostModel, spread_stacks: bool) -> None:
    for seed in range(30):
        specs, ranks = random_specs(seed)
        made = plan_specs(specs, ranks, cost_model=cost_model, spread_stacks=spread_stacks)
        assert ShardPlan.from_json(made.to_json()) == made
        assert [entry.spec for entry in made.entries.values()] == specs
        for entry in made.entries.values():
            # what ranks hold adds up to the parameter, but for rounding
            held = sum(part for _, part in entry.divide(entry.resident_bytes, ranks))
            assert entry.resident_bytes - ranks < held <= entry.resident_bytes
        summary = Summary(made, cost_model, Rates("device", 1.0, 1.0, 1.0))
        for bound, reached in zip(summary.bounds, summary.reached, strict=True):
            assert bound.value <= reached + len(specs)  # rounding, as above
        assert max(map(len, summary.text().splitlines())) <= 100
        assert json.loads(json.dumps(summary.json()))["plan"] == json.loads(made.to_json())
        assert plot(made, "title").count("<svg") == 2


class TestOlderFormats:
    def test_a_plan_of_version_1_0_loads(self) -> None:
        text = """{"format": "mfsdp.ShardPlan", "version": [1, 0], "world_size": 2, "replicas": 1,
            "cost_model": "muon", "entries": [
            {"name": "w", "role": "matrix", "owner": 1, "shape": [3, 4], "dtype": "float32", "resident_bytes": 144,
             "step_flops": 990, "unit": "", "aliases": []},
            {"name": "e", "role": "rows", "owner": null, "shape": [8, 4], "dtype": "bfloat16", "resident_bytes": 256,
             "step_flops": 448, "unit": "", "aliases": ["head"]}]}"""
        specs = [
            ParameterSpec("w", Role.MATRIX, (3, 4), torch.float32),
            ParameterSpec("e", Role.ROWS, (8, 4), BF16, aliases=("head",)),
        ]
        loaded, made = ShardPlan.from_json(text), plan_specs(specs, 2)
        assert loaded.entries.keys() == made.entries.keys()
        assert loaded.entries["e"] == made.entries["e"]
        assert (loaded.entries["w"].owner, loaded.entries["w"].split, loaded.entries["w"].trainable) == (1, None, True)

    def test_a_plan_of_a_newer_minor_version_says_why_not(self) -> None:
        newer = plan_specs(small(), 2).to_json().replace('"version": [1, 1]', '"version": [1, 2]')
        with pytest.raises(PlanError, match=r"format version 1\.2; this version of mfsdp reads 1\.0 to 1\.1"):
            ShardPlan.from_json(newer)
