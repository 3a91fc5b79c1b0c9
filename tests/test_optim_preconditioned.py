"""Shampoo and SOAP against straightforward code for their formulas, in fp64, and what they do when things fail."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mfsdp.optim import SOAP, Shampoo, build_optimizer, factors
from mfsdp.planning.split import EqualBlocks, Stack

SHAPES = [(6, 6), (9, 4), (4, 9), (1, 7), (7, 1)]
DOUBLE: dict[str, Any] = {"factor_dtype": torch.float64}


def parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def gradient(param: Tensor, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + param.numel())
    return torch.randn(param.shape, generator=generator, dtype=param.dtype)


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20) -> None:
    for step in range(1, steps + 1):
        for param in params:
            param.grad = gradient(param, step)
        optimizer.step()


def power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=0) ** exponent) @ vectors.T


def shampoo(w: Tensor, steps: int, frequency: int, grafting: str | None, one_sided: bool = False) -> Tensor:
    """The algorithm of arXiv 2309.06497 for one matrix, with lr 1e-2 and weight decay 0.1."""
    m, n = w.shape
    beta1, beta2, eps = 0.9, 0.99, 1e-6
    average, square = torch.zeros_like(w), torch.zeros_like(w)
    left, right = torch.zeros(m, m, dtype=w.dtype), torch.zeros(n, n, dtype=w.dtype)
    for t in range(1, steps + 1):
        g = gradient(w, t)
        average = beta1 * average + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g**2
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t == 1 or t % frequency == 0:
            correction, exponent = 1 - beta2**t, -0.5 if one_sided else -0.25
            left_root = power(left / correction + eps * torch.eye(m, dtype=w.dtype), exponent)
            right_root = power(right / correction + eps * torch.eye(n, dtype=w.dtype), exponent)
        filtered = average / (1 - beta1**t)
        update = left_root @ filtered if one_sided else left_root @ filtered @ right_root
        adam = filtered / ((square / (1 - beta2**t)).sqrt() + 1e-8)
        if grafting is not None:
            update = update * (adam if grafting == "adam" else filtered).norm() / update.norm()
        w = w - 1e-2 * 0.1 * w - 1e-2 * update
    return w


def soap(w: Tensor, steps: int, frequency: int, one_sided: bool = False) -> Tensor:
    """Algorithms 3 and 4 of arXiv 2409.11321 with Adam's bias correction, lr 1e-2 and weight decay 0.1.

    As in its authors' code the first gradient makes the bases only, and columns are sorted before a refinement.
    """
    n = w.size(1)
    beta1, beta2 = 0.9, 0.95
    average, square = torch.zeros_like(w), torch.zeros_like(w)
    g = gradient(w, 1)
    left, right = (1 - beta2) * g @ g.T, (1 - beta2) * g.T @ g
    ql, qr = (torch.linalg.eigh(factor).eigenvectors.fliplr() for factor in (left, right))
    qr = torch.eye(n, dtype=w.dtype) if one_sided else qr
    for t in range(1, steps):
        g = gradient(w, t + 1)
        average = beta1 * average + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * (ql.T @ g @ qr) ** 2
        rotated = (ql.T @ average @ qr) / (1 - beta1**t)
        update = ql @ (rotated / ((square / (1 - beta2**t)).sqrt() + 1e-8)) @ qr.T
        w = w - 1e-2 * 0.1 * w - 1e-2 * update
        left = beta2 * left + (1 - beta2) * g @ g.T
        right = beta2 * right + (1 - beta2) * g.T @ g
        if t % frequency == 0:
            order = (ql.T @ left @ ql).diag().argsort(descending=True)
            ql, square = torch.linalg.qr(left @ ql[:, order]).Q, square[order]
            if not one_sided:
                order = (qr.T @ right @ qr).diag().argsort(descending=True)
                qr, square = torch.linalg.qr(right @ qr[:, order]).Q, square[:, order]
    return w


def make_shampoo(params: Any, **options: Any) -> Shampoo:
    return Shampoo(params, lr=1e-2, eps=1e-6, weight_decay=0.1, **options)


def make_soap(params: Any, **options: Any) -> SOAP:
    return SOAP(params, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **options)


@pytest.mark.parametrize("grafting", [None, "sgd", "adam"])
@pytest.mark.parametrize("frequency", [1, 3])
def test_shampoo_follows_its_formula(frequency: int, grafting: str | None) -> None:
    params = parameters()
    expected = [shampoo(param.detach(), 20, frequency, grafting) for param in params]
    train(make_shampoo(params, precondition_frequency=frequency, grafting=grafting, **DOUBLE), params)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frequency", [1, 3])
def test_soap_follows_its_formula(frequency: int) -> None:
    # Square, or the first factor of the longer side has no unique eigenvectors to agree on.
    params = parameters([(6, 6), (5, 5), (1, 1)])
    expected = [soap(param.detach(), 20, frequency) for param in params]
    train(make_soap(params, precondition_frequency=frequency, **DOUBLE), params)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-5, atol=1e-5)


def test_a_side_that_is_too_large_has_no_factor() -> None:
    params = parameters([(4, 9)])
    expected = shampoo(params[0].detach(), 10, 2, "adam", one_sided=True)
    optimizer = make_shampoo(params, precondition_frequency=2, max_preconditioner_dim=5, **DOUBLE)
    train(optimizer, params, steps=10)
    torch.testing.assert_close(params[0].detach(), expected, rtol=1e-5, atol=1e-5)
    assert not any(name.startswith("column") for name in optimizer.state[params[0]])

    params = parameters([(4, 9)])
    expected = soap(params[0].detach(), 10, 2, one_sided=True)
    train(make_soap(params, precondition_frequency=2, max_preconditioner_dim=5, **DOUBLE), params, steps=10)
    torch.testing.assert_close(params[0].detach(), expected, rtol=1e-5, atol=1e-5)

    neither = parameters([(4, 9)])
    train(make_soap(neither, max_preconditioner_dim=3), neither, steps=2)  # then it is Adam
    assert neither[0].isfinite().all()


@pytest.mark.parametrize("make", [make_shampoo, make_soap])
@pytest.mark.parametrize(
    ("shape", "rule", "pieces"),
    [
        ((12, 4), EqualBlocks(3), lambda t: list(t.split(4))),
        ((4, 12), EqualBlocks(2, dim=1), lambda t: list(t.split(6, dim=1))),
        ((3, 5, 4), Stack(), list),
    ],
)
def test_logical_matrices_are_as_if_they_were_parameters(
    make: Callable[..., Any], shape: tuple[int, ...], rule: Any, pieces: Callable[[Tensor], list[Tensor]]
) -> None:
    (fused,) = parameters([shape])
    separate = [nn.Parameter(piece.detach().clone()) for piece in pieces(fused.detach())]
    options = {"precondition_frequency": 2, **DOUBLE}
    first, second = make([fused], split=rule, **options), make(separate, **options)
    for step in range(1, 8):
        fused.grad = gradient(fused, step)
        for param, grad in zip(separate, pieces(fused.grad), strict=True):
            param.grad = grad.clone()
        first.step()
        second.step()
    for found, expected in zip(pieces(fused.detach()), separate, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("make", [make_shampoo, make_soap])
def test_a_failed_decomposition_keeps_the_old_one_counts_and_warns_once(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (param,) = parameters([(5, 5)])
    optimizer = make([("blocks.0.up.weight", param)], precondition_frequency=1)
    train(optimizer, [param], steps=2)
    state = optimizer.state[param]
    kept = {name: value.clone() for name, value in state.items() if name.endswith(("_root_0", "_basis_0"))}
    assert len(kept) == 2

    def fail(*_: Any) -> Tensor:
        raise torch.linalg.LinAlgError("did not converge")

    monkeypatch.setattr(factors.torch.linalg, "eigh", fail)
    monkeypatch.setattr(factors.torch.linalg, "qr", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, [param], steps=3)
    assert len(caught) == 1
    assert "of parameter 'blocks.0.up.weight' failed or was not finite" in str(caught[0].message)
    assert state["failures"].item() == 6
    for name, value in kept.items():
        assert torch.equal(state[name], value)
    assert param.isfinite().all()


@pytest.mark.parametrize("make", [make_shampoo, make_soap])
def test_a_gradient_that_is_not_finite_leaves_the_factors_alone(make: Callable[..., Any]) -> None:
    (param,) = parameters([(4, 4)])
    optimizer = make([param], precondition_frequency=1)
    train(optimizer, [param], steps=2)
    before = optimizer.state[param]["row_factor_0"].clone()
    param.grad = torch.full_like(param, float("nan"))
    optimizer.step()
    assert torch.equal(optimizer.state[param]["row_factor_0"], before)
    assert optimizer.state[param]["failures"].item() == 2  # rows and columns


@pytest.mark.parametrize("make", [make_shampoo, make_soap])
def test_zero_gradients_and_empty_matrices(make: Callable[..., Any]) -> None:
    params = parameters([(3, 4), (0, 4), (4, 0)])
    optimizer = make(params)
    for param in params:
        param.grad = torch.zeros_like(param)
    before = params[0].detach().clone()
    optimizer.step()
    optimizer.step()
    moved = 1 if make is make_soap else 2  # its first step only makes bases
    torch.testing.assert_close(params[0].detach(), before * (1 - 1e-3) ** moved)


@pytest.mark.parametrize("make", [make_shampoo, make_soap])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_resume_continues_bit_for_bit_with_factors_in_their_dtype(make: Callable[..., Any], dtype: torch.dtype) -> None:
    straight, resumed = parameters(dtype=dtype), parameters(dtype=dtype)
    for params in (straight, resumed):
        optimizer = make(params, precondition_frequency=2)
        train(optimizer, params, steps=3)
        if params is resumed:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(params, precondition_frequency=2)
            optimizer.load_state_dict(saved)
            state = optimizer.state[params[0]]
            assert state["row_factor_0"].dtype == torch.float32
            assert state["exp_avg"].dtype == dtype
        train(optimizer, params, steps=3)
    for a, b in zip(straight, resumed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("matrix", ["shampoo", "soap"])
def test_build_optimizer_knows_them(matrix: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = build_optimizer(model, matrix=matrix, matrix_kwargs={"lr": 0.01})
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert type(optimizer.parts["matrix"]).__name__.lower() == matrix
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": 0.9}, "betas must be two numbers .*, but is 0.9"),
        ({"betas": (0.9, "x")}, "betas must be two numbers"),
        ({"max_preconditioner_dim": float("nan")}, "max_preconditioner_dim must be at least 1"),
        ({"precondition_frequency": 0}, "precondition_frequency must be at least 1"),
        ({"max_preconditioner_dim": 0}, "max_preconditioner_dim must be at least 1"),
        ({"factor_dtype": torch.bfloat16}, "factor_dtype must be float32 or float64"),
        ({"split": EqualBlocks(4)}, "cannot be split into its logical matrices"),
    ],
)
@pytest.mark.parametrize("optimizer", [Shampoo, SOAP])
def test_bad_options(optimizer: type[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{optimizer.__name__}: .*{message}"):
        optimizer(parameters(), **options)
    with pytest.raises(ValueError, match="not a matrix"):
        optimizer([nn.Parameter(torch.ones(3))])


@pytest.mark.parametrize(("optimizer", "option"), [(Shampoo, "preconditioner_frequency"), (SOAP, "grafting")])
def test_unknown_options(optimizer: type[Any], option: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        optimizer(parameters(), **{option: 10})


@pytest.mark.parametrize("frequency", [2.5, float("inf"), "10", True])
def test_a_frequency_is_a_whole_number(frequency: Any) -> None:
    with pytest.raises(TypeError, match="precondition_frequency must be a whole number, but is"):
        Shampoo(parameters(), precondition_frequency=frequency)


def test_bad_grafting() -> None:
    with pytest.raises(ValueError, match=r"grafting_eps must be 0 or more, but is -1\.0"):
        Shampoo(parameters(), grafting_eps=-1)
    with pytest.raises(ValueError, match="grafting must be one of None, 'sgd', 'adam', but is 'lion'"):
        Shampoo(parameters(), grafting="lion")


def test_soap_follows_directions_that_change_places() -> None:
    """A large direction becomes the smallest: the basis must stay sorted, and its variances with it."""
    (param,) = parameters([(2, 2)])
    optimizer = make_soap([param], precondition_frequency=1, **DOUBLE)
    for scale in [1.0] * 3 + [1e-3] * 400:
        param.grad = torch.diag(torch.tensor([scale, 1e-1], dtype=torch.float64))
        optimizer.step()
    state = optimizer.state[param]
    assert torch.equal(state["row_basis_0"][0].abs().round(), torch.eye(2).double().fliplr())
    torch.testing.assert_close(state["exp_avg_sq"].diag(), torch.tensor([1e-2, 1e-6]).double(), rtol=0.1, atol=1e-7)
