"""Cost models against the operations and bytes of real steps."""

import expecttest
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mfsdp.optim.adamw import AdamW
from mfsdp.optim.muon import Muon
from mfsdp.optim.shampoo import Shampoo
from mfsdp.optim.soap import SOAP
from mfsdp.planning import CostModel, MuonCost, ParameterSpec, PlanError, Role, plan
from mfsdp.planning.cost import ADAMW_FLOPS, COST_MODELS, EIGH_FLOPS, AdamWCost, Precision, ShampooCost, SoapCost
from mfsdp.planning.split import EqualBlocks


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec("w", Role.MATRIX, (rows, columns), dtype)


def products(cost: CostModel, rows: int, columns: int, other: int) -> int:
    """The operations of ``cost`` that are matrix products."""
    return cost.step_flops(matrix(rows, columns)) - other


class TestFlops:
    def test_shampoo_products(self) -> None:
        rows, columns, interval = 6, 10, 4
        gradient = torch.randn(rows, columns)
        left, right = torch.randn(rows, rows), torch.randn(columns, columns)
        with FlopCounterMode(display=False) as every_step:
            gradient @ gradient.T, gradient.T @ gradient
            left @ gradient @ right
        with FlopCounterMode(display=False) as root:
            left @ left.T, right @ right.T
        other = ADAMW_FLOPS * rows * columns + sum(EIGH_FLOPS * side**3 // interval for side in (rows, columns))
        found = products(ShampooCost(interval=interval), rows, columns, other)
        assert abs(found - every_step.get_total_flops() - root.get_total_flops() / interval) <= 2  # rounding

    def test_soap_products(self) -> None:
        rows, columns = 6, 10
        gradient = torch.randn(rows, columns)
        left, right = torch.randn(rows, rows), torch.randn(columns, columns)
        with FlopCounterMode(display=False) as counter:
            gradient @ gradient.T, gradient.T @ gradient
            for _ in ("gradient", "momentum", "update"):
                left @ gradient @ right
        interval = 10**9  # the basis is practically never made
        found = products(SoapCost(interval=interval), rows, columns, ADAMW_FLOPS * rows * columns)
        assert found == counter.get_total_flops()
        often = SoapCost(interval=1).step_flops(matrix(rows, columns))
        rare = SoapCost(interval=interval).step_flops(matrix(rows, columns))
        assert often - rare == sum(14 * side**3 // 3 for side in (rows, columns))

    def test_a_long_side_has_no_factor(self) -> None:
        for kind in (ShampooCost, SoapCost):
            one_sided = kind(max_preconditioner_dim=8)
            assert one_sided.matrix_state(6, 10) == 2 * 60 + 2 * 36
            assert kind(max_preconditioner_dim=4).matrix_state(6, 10) == 2 * 60
            assert kind().matrix_state(6, 10) == 2 * 60 + 2 * 36 + 2 * 100

    def test_names_are_those_of_the_optimizers(self) -> None:
        assert {name: model().optimizer.partition("(")[0] for name, model in COST_MODELS.items()} == {
            name: name for name in COST_MODELS
        }


class TestBytes:
    @pytest.mark.parametrize(
        ("kind", "cost"),
        [(AdamW, AdamWCost()), (Muon, MuonCost()), (Shampoo, ShampooCost()), (SOAP, SoapCost())],
    )
    def test_state_is_that_of_the_optimizer(self, kind: type[torch.optim.Optimizer], cost: CostModel) -> None:
        parameter = nn.Parameter(torch.randn(12, 20))
        parameter.grad = torch.randn(12, 20)
        optimizer = kind([parameter])
        optimizer.step()
        counters = ("step", "failures")
        state = sum(value.nbytes for name, value in optimizer.state[parameter].items() if name not in counters)
        assert cost.resident_bytes(matrix(12, 20)) == 2 * parameter.nbytes + state

    def test_master_copies_and_state_in_their_dtypes(self) -> None:
        cost = MuonCost(precision=Precision(master=torch.float32))
        assert cost.resident_bytes(matrix(3, 4, torch.bfloat16)) == 12 * (2 + 4 + 2 + 4)
        tail = ParameterSpec("b", Role.TAIL, (5,), torch.bfloat16)
        assert cost.resident_bytes(tail) == 5 * (2 + 4 + 2 + 8)
        frozen = ParameterSpec("b", Role.TAIL, (5,), torch.bfloat16, trainable=False)
        assert cost.resident_bytes(frozen) == 10
        assert (cost.step_flops(frozen), cost.transient_bytes(frozen)) == (0, 0)
        wide = MuonCost(precision=Precision(gradient=torch.float32, state=torch.bfloat16))
        assert wide.resident_bytes(matrix(3, 4, torch.bfloat16)) == 12 * (2 + 4 + 2)

    def test_transient_is_that_of_the_largest_logical_matrix(self) -> None:
        split = EqualBlocks(3)((12, 4))
        fused = ParameterSpec("w", Role.MATRIX, (12, 4), torch.float32, split=split)
        assert MuonCost().transient_bytes(fused) == MuonCost().transient_bytes(matrix(4, 4))
        assert MuonCost().transient_bytes(matrix(4, 4)) == 16 * (4 + 2 * 2) + 2 * 2 * 16

    def test_adamw_steps_a_matrix_as_it_steps_everything_else(self) -> None:
        cost = AdamWCost(precision=Precision(master=torch.float32))
        tail = ParameterSpec("b", Role.TAIL, (12, 4), torch.bfloat16)
        for count in (cost.resident_bytes, cost.step_flops, cost.transient_bytes):
            assert count(matrix(12, 4, torch.bfloat16)) == count(tail)


class TestOwnModel:
    def test_three_methods_and_a_name_are_enough(self) -> None:
        class Plain(CostModel):
            """Gradient descent on matrices."""

            @property
            def optimizer(self) -> str:
                return "plain"

            def matrix_state(self, rows: int, columns: int) -> int:
                return 0

            def matrix_flops(self, rows: int, columns: int) -> int:
                return 2 * rows * columns

            def matrix_transient(self, rows: int, columns: int, itemsize: int) -> int:
                return 0

        made = plan(nn.Linear(3, 4, bias=False), 1, cost_model=Plain())
        assert made.cost_model == "plain"
        assert made.entries["weight"].resident_bytes == 2 * 48
        assert made.entries["weight"].step_flops == 24


class TestErrors(expecttest.TestCase):
    def test_options(self) -> None:
        found = []
        for make in (
            lambda: MuonCost(ns_steps=-1),
            lambda: ShampooCost(interval=0),
            lambda: Precision(master=torch.int8),
        ):
            with pytest.raises(PlanError) as caught:
                make()
            found.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(found),
            """\
ns_steps=-1, batch_elements=0 must be 0 or more.
interval=0 must be 1 or more, max_preconditioner_dim=8192 0 or more.
master=torch.int8: only floating-point dtypes can be kept.""",
        )

    def test_names(self) -> None:
        names = [
            MuonCost().name,
            MuonCost(ns_steps=3, precision=Precision(master=torch.float32)).name,
            SoapCost().name,
        ]
        self.assertExpectedInline(
            "\n".join(names),
            """\
muon
muon(ns_steps=3) (master=float32)
soap(interval=10, max_preconditioner_dim=8192)""",
        )
