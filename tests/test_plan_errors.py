"""What the planner refuses, word by word."""

import expecttest
import pytest
import torch
from torch import nn

from mfsdp.planning import (
    MatrixShard,
    PlanError,
    RankLoad,
    Role,
    ShardPlan,
    plan,
)
from tests.plan_cases import gpt, wrapped


class TestErrors(expecttest.TestCase):
    def message(self, *args: object, **kwargs: object) -> str:
        with pytest.raises(PlanError) as caught:
            plan(*args, **kwargs)  # type: ignore[arg-type]
        return wrapped(caught.value)

    def test_pattern_that_matches_nothing(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 2, roles={"*.qkw.*": Role.TAIL, "*.up.*": Role.TAIL}),
            """\
roles: nothing matches '*.qkw.*'. Patterns are matched against full parameter names such as
  'embed.weight'.""",
        )

    def test_patterns_that_disagree(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 2, roles={"blocks.*": Role.TAIL, "*.up.weight": Role.MATRIX}),
            """\
roles: the patterns 'blocks.*' and '*.up.weight' both match blocks.0.up.weight and choose
  tail and matrix. Make them disjoint.""",
        )

    def test_role_that_the_shape_does_not_allow(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 2, roles={"*.qkv.bias": Role.MATRIX}),
            """\
blocks.0.qkv.bias: a parameter of shape (192,) is not a matrix by itself. Say which matrices
  it holds (splits={'blocks.0.qkv.bias': Stack()} for a stack of them, Flatten() for a
  convolution), or give it the role TAIL.""",
        )

    def test_choice_that_is_no_role(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 2, roles={"*.qkv.bias": "mtrix"}),
            """roles: blocks.0.qkv.bias was given 'mtrix'; choose one of matrix, tail, rows.""",
        )

    def test_integer_and_complex_parameters(self) -> None:
        model = nn.Module()
        model.table = nn.Parameter(torch.zeros(3, 3, dtype=torch.int32), requires_grad=False)
        self.assertExpectedInline(
            self.message(model, 2),
            """\
table: a parameter of dtype int32 cannot be planned, only floating-point ones can. Register
  it as a buffer, or convert it.""",
        )
        model.table = nn.Parameter(torch.zeros(3, 3, dtype=torch.complex64))
        self.assertExpectedInline(
            self.message(model, 2),
            """\
table: a parameter of dtype complex64 cannot be planned, only floating-point ones can.
  Register it as a buffer, or convert it.""",
        )

    def test_lazy_parameter(self) -> None:
        self.assertExpectedInline(
            self.message(nn.LazyLinear(3), 2),
            """weight: a lazy parameter has no shape yet; run one forward before planning.""",
        )

    def test_mesh(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 0),
            """a mesh of shape (0,) has no ranks; every dimension needs at least 1.""",
        )
        mesh = type("Mesh", (), {"shape": (2, 2, 2)})()
        self.assertExpectedInline(
            self.message(gpt(1), mesh),
            """\
a mesh of shape (2, 2, 2) cannot be planned for; pass the 1-D mesh of the owners, or a 2-D
  mesh (replicas, owners), for instance mesh['replicate', 'shard'].""",
        )

    def test_initial_loads(self) -> None:
        self.assertExpectedInline(
            self.message(gpt(1), 2, initial_loads=[RankLoad()]),
            """initial_loads has 1 entries for 2 ranks; it needs one per rank.""",
        )

    def test_owner_outside_the_mesh(self) -> None:
        entry = MatrixShard("w", Role.MATRIX, 2, (3, 3), torch.float32, 1, 1, "")
        with pytest.raises(PlanError) as caught:
            ShardPlan({"w": entry}, 2)
        self.assertExpectedInline(
            wrapped(caught.value),
            """\
w: owner 2 is outside a mesh dimension of 2 ranks (0 to 1). Plan again for this number of
  ranks.""",
        )

    def test_entry_that_contradicts_itself(self) -> None:
        with pytest.raises(PlanError) as caught:
            MatrixShard("w", Role.ROWS, 0, (3, 3), torch.float32, 1, 1, "")
        self.assertExpectedInline(wrapped(caught.value), """w: ROWS belong to all ranks; owner must be None, not 0.""")
        with pytest.raises(PlanError) as caught:
            MatrixShard("w", Role.MATRIX, None, (3, 3), torch.float32, 1, 1, "")
        self.assertExpectedInline(
            wrapped(caught.value), """w: a MATRIX parameter needs an owner of 0 or more, not None."""
        )

    def test_plan_of_another_model(self) -> None:
        other = gpt(1, vocab=97)
        other.norm.to(torch.bfloat16)
        other.extra = nn.Parameter(torch.zeros(2))
        with pytest.raises(PlanError) as caught:
            plan(gpt(2), 2).bind(other)
        self.assertExpectedInline(
            wrapped(caught.value),
            """\
the plan is not for this model:
  extra: in the model, not in the plan
  embed.weight: shape (97, 64) in the model, (96, 64) in the plan
  norm.weight: dtype torch.bfloat16 in the model, torch.float32 in the plan
  norm.bias: dtype torch.bfloat16 in the model, torch.float32 in the plan
  logits.weight: shape (97, 64) in the model, (96, 64) in the plan
  blocks.1.norm.weight: in the plan, not in the model
  blocks.1.norm.bias: in the plan, not in the model
  blocks.1.qkv.weight: in the plan, not in the model
  blocks.1.qkv.bias: in the plan, not in the model
  blocks.1.output.weight: in the plan, not in the model
  blocks.1.up.weight: in the plan, not in the model
  blocks.1.down.weight: in the plan, not in the model
Plan again with mfsdp.plan(model, mesh), or bind to the root of the planned model.""",
        )

    def test_first_difference(self) -> None:
        one = plan(gpt(1), 2)
        assert one.first_difference(plan(gpt(1), 2)) is None
        self.assertExpectedInline(
            wrapped(one.first_difference(plan(gpt(1), 3))),
            """world_size is 2 in one plan and 3 in the other""",
        )
        self.assertExpectedInline(
            wrapped(one.first_difference(plan(gpt(1, vocab=97), 2))),
            """\
embed.weight: shape is [96, 64] in one plan and [97, 64] in the other, resident_bytes is
  98304 in one plan and 99328 in the other, step_flops is 86016 in one plan and 86912 in the
  other""",
        )
        self.assertExpectedInline(
            wrapped(one.first_difference(plan(gpt(2), 2))),
            """blocks.0.norm.weight: owner is 1 in one plan and 0 in the other""",
        )
        shorter = ShardPlan(dict(list(one.entries.items())[:-1]), 2)
        self.assertExpectedInline(
            wrapped(one.first_difference(shorter)), """logits.weight is in one plan and not in the other"""
        )

    def test_json(self) -> None:
        text = plan(gpt(1), 2).to_json()
        bad = [
            "{",
            "[]",
            text.replace("mfsdp.ShardPlan", "other"),
            text.replace('"version": [1, ', '"version": [2, '),
            text.replace('"owner"', '"owned"'),
            text.replace('"float32"', '"int8"'),
        ]
        messages = []
        for broken in bad:
            with pytest.raises(PlanError) as caught:
                ShardPlan.from_json(broken)
            messages.append(str(caught.value))
        self.assertExpectedInline(
            wrapped("\n".join(messages)),
            """\
this is not a plan: it is not JSON (Expecting property name enclosed in double quotes: line
  1 column 2 (char 1)).
this is not a plan: its "format" is not 'mfsdp.ShardPlan'.
this is not a plan: its "format" is not 'mfsdp.ShardPlan'.
the plan has format version 2.1; this version of mfsdp reads 1.0 to 1.1. Plan again, or read
  it with the version that wrote it.
the plan is damaged: 'owner' is missing.
unknown dtype 'int8'; known are fp64, fp32, fp16, bf16, float64, float32, float16, bfloat16,
  float8_e4m3fn, float8_e5m2, float8_e4m3fnuz, float8_e5m2fnuz.""",
        )


@pytest.mark.parametrize("mesh", [None, "x", 2.0])
def test_a_mesh_that_is_none(mesh: object) -> None:
    with pytest.raises(TypeError, match=rf"mesh must be a DeviceMesh or a number of owners, not {mesh!r}"):
        plan(gpt(1), mesh)  # type: ignore[arg-type]
