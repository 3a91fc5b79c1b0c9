"""Logical matrices: the format, the rules that make it, and what plans do with it."""

import expecttest
import pytest
import torch
from torch import nn

from mfsdp.planning import MuonCost, PlanError, Role, ShardPlan, plan
from mfsdp.planning.cost import newton_schulz_flops
from mfsdp.planning.split import Blocks, BlocksOf, EqualBlocks, Flatten, Split, Stack


def views(split: Split, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [matrix for view in split.views(tensor) for matrix in view]


class TestViews:
    def test_fused_projection(self) -> None:
        fused = torch.randn(10, 3)
        split = Blocks((4, 4, 2))(fused.shape)
        for found, expected in zip(views(split, fused), fused.split((4, 4, 2)), strict=True):
            assert torch.equal(found, expected)
            assert found.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
        assert split.shapes() == ((1, 4, 3), (1, 4, 3), (1, 2, 3))

    def test_fused_along_columns(self) -> None:
        fused = torch.randn(3, 10)
        for found, expected in zip(views(EqualBlocks(2, dim=1)(fused.shape), fused), fused.chunk(2, 1), strict=True):
            assert torch.equal(found, expected)

    def test_heads(self) -> None:
        fused = torch.randn(12, 5)
        found = views(BlocksOf(4)(fused.shape), fused)
        assert [tuple(head.shape) for head in found] == [(4, 5)] * 3
        assert torch.equal(torch.cat(found), fused)

    def test_experts_with_fused_gate_and_up(self) -> None:
        experts = torch.randn(3, 8, 5)
        split = Stack(EqualBlocks(2))(experts.shape)
        gates, ups = split.views(experts)
        assert torch.equal(gates, experts[:, :4])
        assert torch.equal(ups, experts[:, 4:])
        assert split.shapes() == ((3, 4, 5), (3, 4, 5))

    def test_convolution(self) -> None:
        kernel = torch.randn(6, 3, 2, 2)
        (found,) = views(Flatten()(kernel.shape), kernel)
        assert torch.equal(found, kernel.flatten(1))

    def test_part_of_a_stack_and_nothing_of_it(self) -> None:
        experts = torch.randn(5, 4, 3)
        split = Stack()(experts.shape)
        assert torch.equal(split.views(experts[1:3])[0], experts[1:3])
        assert split.views(experts[:0])[0].shape == (0, 4, 3)


class TestPlans:
    def model(self) -> nn.Module:
        model = nn.Module()
        model.qkv = nn.Linear(8, 24, bias=False)
        model.experts = nn.Parameter(torch.zeros(6, 8, 4))
        model.conv = nn.Conv2d(3, 5, 2, bias=False)
        return model

    def test_costs_count_logical_matrices(self) -> None:
        splits = {"qkv.weight": EqualBlocks(3), "experts": Stack(), "conv.weight": Flatten()}
        made = plan(self.model(), 2, splits=splits)
        assert {entry.role for entry in made.entries.values()} == {Role.MATRIX}
        expected = {
            "experts": 6 * newton_schulz_flops(8, 4, 5),
            "qkv.weight": 3 * newton_schulz_flops(8, 8, 5),
            "conv.weight": newton_schulz_flops(5, 12, 5),
        }
        assert {name: entry.step_flops for name, entry in made.entries.items()} == expected
        assert made.entries["experts"].resident_bytes == 12 * 6 * 8 * 4
        for entry in made.entries.values():
            assert MuonCost().step_flops(entry.spec) == entry.step_flops

    def test_by_function(self) -> None:
        made = plan(self.model(), 2, splits=lambda name, parameter, module: Stack() if parameter.ndim == 3 else None)
        assert made.entries["experts"].split == Split(6, 8, 4, (8,))
        assert made.entries["conv.weight"].role is Role.TAIL

    def test_json(self) -> None:
        splits = {"qkv.weight": EqualBlocks(3, dim=1), "experts": Stack(BlocksOf(2))}
        model = self.model()
        model.qkv = nn.Linear(24, 8, bias=False)
        made = plan(model, 2, splits=splits, spread_stacks=True)
        again = ShardPlan.from_json(made.to_json())
        assert again == made
        assert again.hash() == made.hash()
        assert made.hash() != plan(model, 2, splits={"experts": Stack()}).hash()

    def test_stack_spread_over_owners(self) -> None:
        model = nn.Module()
        model.experts = nn.Parameter(torch.zeros(7, 8, 4))
        model.other = nn.Linear(8, 4, bias=False)
        whole = plan(model, 4, splits={"experts": Stack()})
        assert whole.entries["experts"].owner is not None
        made = plan(model, 4, splits={"experts": Stack()}, spread_stacks=True)
        assert ShardPlan.from_json(made.to_json()) == made
        assert made.hash() != whole.hash()
        entry = made.entries["experts"]
        assert entry.owner is None
        assert [part.owner for part in entry.parts] == sorted({part.owner for part in entry.parts})
        assert sum(map(len, entry.parts)) == 7
        # 8 equal matrices on 4 ranks
        assert made.imbalance().step_flops == 1.0
        assert made.imbalance().resident_bytes == 1.0
        assert sum(load.resident_bytes for load in made.loads()) == sum(load.resident_bytes for load in whole.loads())

    def test_stack_stays_whole_where_that_is_as_even(self) -> None:
        model = nn.ParameterList(nn.Parameter(torch.zeros(4, 8, 4)) for _ in range(8))
        made = plan(model, 4, splits={"*": Stack()}, spread_stacks=True)
        assert all(entry.owner is not None for entry in made.entries.values())


class TestErrors(expecttest.TestCase):
    def message(self, **kwargs: object) -> str:
        with pytest.raises(PlanError) as caught:
            plan(TestPlans().model(), 2, **kwargs)  # type: ignore[arg-type]
        return str(caught.value)

    def test_rules_that_do_not_fit(self) -> None:
        found = [
            self.message(splits={"qkv.weight": EqualBlocks(5)}),
            self.message(splits={"qkv.weight": BlocksOf(7)}),
            self.message(splits={"qkv.weight": Blocks((8, 8))}),
            self.message(splits={"qkv.weight": Stack()}),
            self.message(splits={"experts": EqualBlocks(2)}),
            self.message(splits={"expert": Stack()}),
            self.message(splits={"experts": Stack(), "exp*": Flatten()}),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
splits: qkv.weight: EqualBlocks(count=5, dim=0) cannot cut the 24 of dimension 0 of (24, 8) evenly.
splits: qkv.weight: BlocksOf(size=7, dim=0) does not divide the 24 of dimension 0 of (24, 8).
splits: qkv.weight: Split(stack=1, rows=24, columns=8, blocks=(8, 8), dim=0): blocks add up to 16, not to the 24 rows.
splits: qkv.weight: Stack(inner=None) reads a parameter with 3 or more dimensions, not one of shape (24, 8).
splits: experts: EqualBlocks(count=2, dim=0) reads a 2-D parameter, not one of shape (6, 8, 4); use Stack(EqualBlocks(count=2, dim=0)) for a stack.
splits: nothing matches 'expert'. Patterns are matched against full parameter names such as 'experts'.
splits: the patterns 'experts' and 'exp*' both match experts and choose Stack(inner=None) and Flatten(). Make them disjoint.""",
        )

    def test_role_and_split_that_disagree(self) -> None:
        found = [
            self.message(splits={"experts": Stack()}, roles={"experts": Role.TAIL}),
            self.message(roles={"experts": Role.MATRIX}),
        ]
        self.assertExpectedInline(
            "\n".join(found),
            """\
experts: only a MATRIX parameter has logical matrices, not a TAIL one.
experts: a parameter of shape (6, 8, 4) is not a matrix by itself. Say which matrices it holds (splits={'experts': Stack()} for a stack of them, Flatten() for a convolution), or give it the role TAIL.""",
        )

    def test_split_that_contradicts_itself(self) -> None:
        found = []
        for arguments in ((1, 4, 4, (3,)), (1, 4, 4, ()), (1, 4, 4, (4,), 2)):
            with pytest.raises(PlanError) as caught:
                Split(*arguments)
            found.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(found),
            """\
Split(stack=1, rows=4, columns=4, blocks=(3,), dim=0): blocks add up to 3, not to the 4 rows.
Split(stack=1, rows=4, columns=4, blocks=(), dim=0): sizes must not be negative, and there must be a block of at least 1.
Split(stack=1, rows=4, columns=4, blocks=(4,), dim=2): dim must be 0 (cut between rows) or 1 (cut between columns).""",
        )
