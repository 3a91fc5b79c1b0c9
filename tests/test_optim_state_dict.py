"""State dicts of the matrix optimizers: data alone, as torch's distributed state dicts need it."""

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from mfsdp.optim import SOAP, Muon, Shampoo, build_optimizer
from mfsdp.planning.split import EqualBlocks

MATRIX = ["muon", "shampoo", "soap"]
DTYPE_OPTION = [(Muon, "ns_dtype"), (Shampoo, "factor_dtype"), (SOAP, "factor_dtype")]


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("options", [{"full_state_dict": True}, {"cpu_offload": True}])
@pytest.mark.parametrize("matrix", MATRIX)
def test_distributed_state_dicts_hold_and_restore_it(matrix: str, options: dict[str, Any]) -> None:
    straight, resumed = new_model(), new_model()
    kwargs: dict[str, Any] = {"matrix": matrix, "matrix_kwargs": {"split": EqualBlocks(2)}}
    if matrix == "muon":
        kwargs["matrix_kwargs"]["adjust_lr"] = lambda rows, columns: 0.5
    first = build_optimizer(straight, **kwargs)
    train(straight, first)
    chosen = StateDictOptions(**options)
    saved = copy.deepcopy(get_optimizer_state_dict(straight, first, options=chosen))
    resumed.load_state_dict(straight.state_dict())
    second = build_optimizer(resumed, **kwargs)
    set_optimizer_state_dict(resumed, second, saved, options=chosen)
    assert second.param_groups[0]["split"] == EqualBlocks(2)
    train(straight, first)
    train(resumed, second)
    assert_equal(straight, resumed)


@pytest.mark.parametrize(("optimizer", "option"), DTYPE_OPTION)
def test_groups_hold_names_of_dtypes(optimizer: type[Any], option: str) -> None:
    params = [nn.Parameter(torch.eye(3)) for _ in range(3)]
    given: list[torch.dtype | str] = [torch.float64, "float64"]
    made = [optimizer([param], **{option: dtype}) for param, dtype in zip(params, given, strict=False)]
    for each in made:
        assert each.param_groups[0][option] == "float64"
        each.add_param_group({"params": [params[2]], option: torch.float32})
        assert each.param_groups[1][option] == "float32"
    with pytest.raises(ValueError, match=f"{option} must be .*float32 or float64, but is float12"):
        optimizer([params[0]], **{option: "float12"})


@pytest.mark.parametrize(("optimizer", "option"), DTYPE_OPTION)
def test_a_state_dict_with_a_dtype_still_loads(optimizer: type[Any], option: str) -> None:
    param = nn.Parameter(torch.eye(3))
    made = optimizer([param], **{option: torch.float64})
    param.grad = torch.ones(3, 3)
    made.step()
    saved = copy.deepcopy(made.state_dict())
    assert "split" not in saved["param_groups"][0]
    saved["param_groups"][0] |= {option: torch.float64, "split": None}
    resumed = optimizer([param])
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0][option] == "float64"
    resumed.step()


@pytest.mark.parametrize("loading", MATRIX)
@pytest.mark.parametrize("saving", MATRIX)
def test_state_of_another_optimizer_is_refused(saving: str, loading: str) -> None:
    model = new_model()
    first, second = build_optimizer(model, matrix=saving), build_optimizer(model, matrix=loading)
    train(model, first)
    saved = first.state_dict()
    if saving == loading:
        second.load_state_dict(saved)
        return
    with pytest.raises(ValueError, match=r"the state to be loaded for parameter '0\.weight' has no"):
        second.load_state_dict(saved)
    assert not second.state


def test_the_missing_entry_is_named() -> None:
    params = [nn.Parameter(torch.eye(3))]
    params[0].grad = torch.ones(3, 3)
    optimizer = Muon(params)
    optimizer.step()
    with pytest.raises(ValueError) as refused:
        Shampoo(params).load_state_dict(optimizer.state_dict())
    assert_expected_inline(
        str(refused.value),
        """\
Shampoo: the state to be loaded for parameter 0 of its group has no 'step', only 'momentum_buffer'. Load the state of \
the same optimizer with the same options.""",
    )


@pytest.mark.parametrize("matrix", MATRIX)
def test_a_state_dict_without_some_options_loads_again_and_again(matrix: str) -> None:
    model = new_model()
    optimizer = build_optimizer(model, matrix=matrix)
    train(model, optimizer)
    saved = optimizer.state_dict()
    lr = saved["param_groups"][0].pop("lr")
    for _ in range(2):
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == lr
