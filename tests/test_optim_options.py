"""Options that every optimizer here refuses, in its arguments and in those of a group."""

from typing import Any

import pytest
import torch
from torch import nn

from mfsdp.optim import SOAP, AdamW, Muon, QKClip, Shampoo, build_optimizer, newton_schulz

PRECONDITIONED: dict[str, Any] = {
    "lr": 0.1,
    "weight_decay": 0.1,
    "eps": 0.1,
    "betas": (0.5, 0.5),
    "precondition_frequency": 2,
    "max_preconditioner_dim": 2,
}
NUMBERS: dict[type[Any], dict[str, Any]] = {
    Muon: {
        "lr": 0.1,
        "weight_decay": 0.1,
        "momentum": 0.1,
        "eps": 0.1,
        "ns_steps": 2,
        "second_moment": 0.5,
        "ns_coefficients": (1.0, 1.0, 1.0),
    },
    Shampoo: PRECONDITIONED | {"grafting_eps": 0.1},
    SOAP: PRECONDITIONED,
    AdamW: {"lr": 0.1, "weight_decay": 0.1, "eps": 0.1, "betas": (0.5, 0.5)},
}


def with_bools(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return [(flag, *value[1:]) for flag in (True, False)]
    return [True, False]


@pytest.mark.parametrize(
    ("optimizer", "option", "good"),
    [(optimizer, option, good) for optimizer, options in NUMBERS.items() for option, good in options.items()],
)
def test_true_and_false_are_no_numbers(optimizer: type[Any], option: str, good: Any) -> None:
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    made = optimizer([first], **{option: good})
    matrix = "muon" if optimizer is AdamW else optimizer
    named = [("weight", second if matrix is optimizer else nn.Parameter(torch.ones(2)))]
    for bad in with_bools(good):
        with pytest.raises((TypeError, ValueError), match=f"^{optimizer.__name__}: {option} must be"):
            optimizer([first], **{option: bad})
        with pytest.raises((TypeError, ValueError), match=f"^{optimizer.__name__}: {option} must be"):
            made.add_param_group({"params": [second], option: bad})
        with pytest.raises((TypeError, ValueError), match=f"^{optimizer.__name__}: {option} must be"):
            build_optimizer(named, matrix=matrix, groups={"*": {option: bad}})


def test_so_it_is_without_an_optimizer() -> None:
    for options in ({"steps": True}, {"eps": True}):
        with pytest.raises(TypeError, match=r"must be a (whole )?number, but is True"):
            newton_schulz(torch.eye(2), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold must be positive, but is True"):
        QKClip(True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, but is -1.0"),
        ({"lr": "0.1"}, "lr must be a number, but is '0.1'"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more, but is nan"),
        ({"betas": (0.9,)}, r"betas must be two numbers in \[0, 1\), but is \(0.9,\)"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), but is \(0.9, 1.0\)"),
        ({"amsgrad": "no"}, "amsgrad must be True or False, but is 'no'"),
        ({"fused": "no"}, "fused must be True or False, but is 'no'"),
        ({"fused": True}, "foreach=True and fused=True are two ways to do one thing"),
        ({"lr": torch.tensor(0.1)}, "foreach=True takes lr and betas as tensors only together with capturable=True"),
        ({"capturable": True}, "capturable=True is for CUDA graphs, and not for parameters on the CPU"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False is not supported; use torch.optim.Adam"),
    ],
)
def test_options_of_adamw(options: dict[str, Any], message: str) -> None:
    """Those that torch would tell in the step are told at once, for there only a parameter's owner would hear it."""
    bias = nn.Parameter(torch.ones(2))
    with pytest.raises((TypeError, ValueError), match=f"^AdamW: {message}"):
        build_optimizer([("bias", bias)], groups={"*": options})
    with pytest.raises((TypeError, ValueError), match=f"^AdamW: {message}"):
        AdamW([{"params": [bias], **options}], foreach=True)
    if "decoupled_weight_decay" not in options:
        with pytest.raises((TypeError, ValueError), match=f"^AdamW: {message}"):
            AdamW([bias], **{"foreach": True, **options})


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [(Muon, "momentum"), (Muon, "eps"), (Shampoo, "eps"), (SOAP, "lr"), (AdamW, "weight_decay")],
)
def test_a_number_is_finite_and_one(optimizer: type[Any], option: str) -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match=f"^{optimizer.__name__}: {option} must be finite, but is inf"):
        optimizer(params, **{option: float("inf")})
    with pytest.raises((TypeError, ValueError), match=f"{option} must (be a|have one)"):
        optimizer(params, **{option: torch.ones(2)})


@pytest.mark.parametrize("fused", [True, None])
def test_a_scaler_unscales_and_skips_with_any_adamw(fused: bool | None) -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = [AdamW([ours], fused=fused, eps=1.0), torch.optim.AdamW([theirs], fused=fused, eps=1.0)]
    for optimizer in optimizers:
        scaler, (param,) = torch.amp.GradScaler("cpu", init_scale=4.0), optimizer.param_groups[0]["params"]
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[param]["step"] == 2
        assert scaler.get_scale() == 2.0
    assert torch.equal(ours, theirs)
