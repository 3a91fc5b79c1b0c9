"""Muon's options, each against its formula written out here, in fp64 where the arithmetic allows."""

import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp.optim import SOAP, Muon, Shampoo, elementwise, newton_schulz
from mfsdp.optim.newton_schulz import COEFFICIENTS
from mfsdp.planning.split import BlocksOf, EqualBlocks, Flatten, Stack

SHAPES = [(6, 6), (9, 4), (4, 9), (6, 6), (1, 7), (7, 1), (9, 4)]
DOUBLE: dict[str, Any] = {"ns_dtype": torch.float64}


def parameters(shapes: list[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in shapes]


def gradients(params: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(param.shape, generator=generator, dtype=param.dtype) for param in params]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20) -> None:
    for step in range(steps):
        for param, grad in zip(params, gradients(params, step), strict=True):
            param.grad = grad
        optimizer.step()


def orthogonal(matrix: Tensor, schedule: list[tuple[float, float, float]]) -> Tensor:
    """Newton-Schulz by singular values: it is a polynomial of each of them."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for a, b, c in schedule:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


QUINTIC_5 = [(3.4445, -4.7750, 2.0315)] * 5


def reference(
    params: list[nn.Parameter],
    update: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor],
    steps: int = 20,
    decay: Callable[[Tensor, Tensor], Tensor] = lambda w, u: 0.0001 * w,
) -> list[Tensor]:
    """``w - decay(w, u) - lr * u`` for lr = 1e-3, with ``u = update(gradient, w, state)``."""
    weights = [param.detach().clone() for param in params]
    states: list[dict[str, Tensor]] = [{} for _ in params]
    for step in range(steps):
        for index, grad in enumerate(gradients(params, step)):
            w = weights[index]
            u = update(grad, w, states[index])
            weights[index] = w - decay(w, u) - 1e-3 * u
    return weights


def momentum_average(grad: Tensor, state: dict[str, Tensor], beta: float = 0.95) -> Tensor:
    state["b"] = beta * state.get("b", torch.zeros_like(grad)) + (1 - beta) * grad
    return state["b"]


def assert_follows(
    options: dict[str, Any], update: Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor], **kwargs: Any
) -> None:
    params = parameters()
    expected = reference(params, update, **kwargs)
    train(Muon(params, **DOUBLE, **options), params)
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("adjust_lr", "formula"),
    [
        (None, lambda m, n: max(1, m / n) ** 0.5),
        ("original", lambda m, n: max(1, m / n) ** 0.5),
        ("match_rms_adamw", lambda m, n: 0.2 * max(m, n) ** 0.5),
        ("spectral", lambda m, n: (m / n) ** 0.5),
        (lambda rows, columns: rows + 2 * columns, lambda m, n: m + 2 * n),
    ],
)
def test_adjustment_by_shape(adjust_lr: Any, formula: Callable[[int, int], float]) -> None:
    def update(grad: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
        nesterov = 0.95 * momentum_average(grad, state) + 0.05 * grad
        return orthogonal(nesterov, QUINTIC_5) * formula(*w.shape)

    assert_follows({"adjust_lr": adjust_lr}, update)


@pytest.mark.parametrize("nesterov", [False, True])
def test_heavy_ball(nesterov: bool) -> None:
    def update(grad: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
        state["b"] = 0.9 * state.get("b", torch.zeros_like(grad)) + grad
        direction = grad + 0.9 * state["b"] if nesterov else state["b"]
        return orthogonal(direction, QUINTIC_5) * max(1, w.size(0) / w.size(1)) ** 0.5

    assert_follows({"momentum_style": "heavy_ball", "momentum": 0.9, "nesterov": nesterov}, update)


def test_normuon() -> None:
    """Algorithm 1 of arXiv 2510.05491."""

    def update(grad: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
        o = orthogonal(momentum_average(grad, state), QUINTIC_5)
        state["v"] = 0.9 * state.get("v", torch.zeros(w.size(0), dtype=w.dtype)) + 0.1 * (o * o).mean(dim=1)
        o = o / (state["v"].sqrt() + 1e-8)[:, None]
        return o * 0.2 * math.sqrt(w.numel()) / o.norm()

    assert_follows({"nesterov": False, "second_moment": 0.9, "adjust_lr": "match_rms_adamw"}, update)


def test_cautious_weight_decay() -> None:
    def update(grad: Tensor, w: Tensor, state: dict[str, Tensor]) -> Tensor:
        return orthogonal(momentum_average(grad, state), QUINTIC_5) * max(1, w.size(0) / w.size(1)) ** 0.5

    def decay(w: Tensor, u: Tensor) -> Tensor:
        return torch.where(w * u >= 0, 0.0001 * w, torch.zeros_like(w))

    assert_follows({"nesterov": False, "cautious": True}, update, decay=decay)


@pytest.mark.parametrize("name", list(COEFFICIENTS))
def test_coefficient_sets_are_polynomials_of_singular_values(name: str) -> None:
    (param,) = parameters([(8, 12)])
    sets = COEFFICIENTS[name]
    schedule = [sets[min(step, len(sets) - 1)] for step in range(10)]
    found = newton_schulz(param.detach(), name, steps=10, dtype=torch.float64)
    torch.testing.assert_close(found, orthogonal(param.detach(), schedule), rtol=1e-9, atol=1e-9)


def test_polar_express_is_closest_to_orthogonal() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(40, 40, generator=generator).double())[0] for _ in range(2))
    matrix = u @ torch.diag(torch.linspace(0.05, 1, 40, dtype=torch.float64)) @ v

    def error(name: str, steps: int) -> float:
        result = newton_schulz(matrix, name, steps=steps, dtype=torch.float64)
        return (torch.linalg.svdvals(result) - 1).abs().max().item()

    assert error("polar_express", 8) < 1e-4
    assert error("polar_express", 6) < error("quintic", 6)
    assert error("cubic", 30) < 1e-9  # slow, but exact in the end


def test_coefficients_for_each_step() -> None:
    listed = [(3.0, -3.0, 1.0), (1.5, -0.5, 0.0)]
    (param,) = parameters([(5, 8)])
    found = newton_schulz(param.detach(), listed, steps=4, dtype=torch.float64)
    expected = orthogonal(param.detach(), [listed[0], listed[1], listed[1], listed[1]])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "ns_dtype", "tolerance"),
    [
        (torch.float64, torch.float64, 1e-12),
        (torch.float32, torch.float32, 1e-5),
        (torch.float32, torch.bfloat16, 1e-2),
        (torch.bfloat16, torch.bfloat16, 1e-2),
    ],
)
def test_batched_is_one_by_one(dtype: torch.dtype, ns_dtype: torch.dtype, tolerance: float) -> None:
    for one, many in zip(*(_updates(batched, dtype, ns_dtype) for batched in (False, True)), strict=True):
        assert (one - many).norm() <= tolerance * one.norm()


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nesterov": False, "lr": torch.tensor(0.3)},
        {"momentum_style": "heavy_ball", "cautious": True},
        {"second_moment": 0.9, "ns_dtype": torch.float32, "adjust_lr": "spectral"},
        {"capturable": True, "lr": torch.tensor(0.3)},
        {"ns_dtype": torch.float32},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_foreach_has_the_same_bits(dtype: torch.dtype, options: dict[str, Any], batched: bool) -> None:
    ones, manies = parameters(dtype=dtype), parameters(dtype=dtype)
    for params, foreach in ((ones, False), (manies, True)):
        train(Muon(params, **{"lr": 0.3, **options}, batched=batched, foreach=foreach), params, steps=3)
    for one, many in zip(ones, manies, strict=True):
        assert torch.equal(one, many)


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})

    def lists(self) -> dict[str, int]:
        return {name: count for name, count in self.calls.items() if name.startswith("_foreach")}


def test_foreach_calls_once_for_a_batch() -> None:
    params = parameters([(6, 6)] * 9, dtype=torch.float32)
    optimizer = Muon(params, batched=True, foreach=True)
    with Counting() as counting:
        train(optimizer, params, steps=1)
    assert counting.lists() == {"_foreach_lerp_": 1, "_foreach_lerp": 1, "_foreach_mul_": 1, "_foreach_add_": 1}
    assert not counting.calls.keys() & {"lerp_", "lerp", "mul_", "add_"}


def test_foreach_is_off_unless_asked_for() -> None:
    params = [nn.Parameter(torch.ones(6, 6, device="meta")) for _ in range(9)]
    optimizer = Muon(params, batched=True)
    with Counting() as counting:
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    assert not counting.lists()
    assert counting.calls["add_"] == 9


def _updates(batched: bool, dtype: torch.dtype, ns_dtype: torch.dtype) -> list[Tensor]:
    params = parameters(dtype=dtype)
    optimizer = Muon(params, lr=1.0, weight_decay=0.0, batched=batched, ns_dtype=ns_dtype)
    before = [param.detach().clone() for param in params]
    train(optimizer, params, steps=1)
    return [param.detach() - old for param, old in zip(params, before, strict=True)]


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """What is compiled, which then runs as it is rather than by generated code."""
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    elementwise._compiled.cache_clear()
    with mock.patch.object(elementwise.torch, "compile", partial(torch.compile, backend=backend, fullgraph=True)):
        yield compiled
    elementwise._compiled.cache_clear()


def assert_compiled_is_eager(
    dtype: torch.dtype = torch.float64, ns_dtype: torch.dtype = torch.float64, steps: int = 6, **variant: Any
) -> None:
    """Ten shapes, wide and tall, one of them a stack, and a learning rate and a momentum that change."""
    shapes = [(6, 6), (9, 4), (5, 11), (6, 6), (8, 8), (7, 3), (9, 4), (10, 12), (3, 5), (4, 2)]
    params = {compiling: parameters([*shapes, (9, 7)], dtype) for compiling in (True, False)}
    for compiling, (*matrices, fused) in params.items():
        groups = [{"params": matrices}, {"params": [fused], "split": EqualBlocks(3)}]
        optimizer = Muon(groups, ns_dtype=ns_dtype, compile=compiling, batched=True, **variant)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        for step in range(steps):
            for param, grad in zip(params[compiling], gradients(params[compiling], step), strict=True):
                param.grad = grad
            for group in optimizer.param_groups:
                group["momentum"] = 0.95 - 0.01 * step
            optimizer.step()
            schedule.step()
    tolerance = 1e-10 if ns_dtype is torch.float64 is dtype else 2e-2
    for a, b in zip(params[True], params[False], strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("variant", [{}, {"momentum_style": "heavy_ball", "cautious": True}, {"nesterov": False}])
def test_compiled_is_eager_with_few_compilations(graphs: list[torch.fx.GraphModule], variant: dict[str, Any]) -> None:
    assert_compiled_is_eager(**variant)
    assert 2 <= len(graphs) <= 6


def test_more_variants_in_a_process_than_dynamo_compiles_of_one_function(graphs: list[torch.fx.GraphModule]) -> None:
    """Past the limit this would raise here, and run uncompiled elsewhere."""
    variants = [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
    variants += [(torch.float64, torch.float16), (torch.bfloat16, torch.bfloat16)]
    with torch._dynamo.config.patch(recompile_limit=len(variants) - 1):
        for dtype, ns_dtype in variants:
            before = len(graphs)
            assert_compiled_is_eager(dtype, ns_dtype, steps=2)
            assert 2 <= len(graphs) - before <= 6
        before = len(graphs)
        assert_compiled_is_eager(*variants[0], steps=2)
        assert len(graphs) == before


SPLITS: list[tuple[tuple[int, ...], Any, Callable[[Tensor], list[Tensor]]]] = [
    ((12, 4), EqualBlocks(3), lambda t: list(t.split(4))),
    ((4, 12), EqualBlocks(2, dim=1), lambda t: list(t.split(6, dim=1))),
    ((12, 5), BlocksOf(2), lambda t: list(t.split(2))),
    ((3, 5, 4), Stack(), list),
    ((3, 6, 4), Stack(EqualBlocks(2)), lambda t: [half for e in t for half in e.split(3)]),
    ((5, 2, 3, 3), Flatten(), lambda t: [t.reshape(5, 18)]),
]


@pytest.mark.parametrize(("shape", "rule", "pieces"), SPLITS)
@pytest.mark.parametrize("options", [{}, {"second_moment": 0.9}, {"batched": True}])
def test_logical_matrices_are_as_if_they_were_parameters(
    shape: tuple[int, ...], rule: Any, pieces: Callable[[Tensor], list[Tensor]], options: dict[str, Any]
) -> None:
    (fused,) = parameters([shape])
    separate = [nn.Parameter(piece.detach().clone()) for piece in pieces(fused.detach())]
    first, second = Muon([fused], **DOUBLE, **options, split=rule), Muon(separate, **DOUBLE, **options)
    for step in range(5):
        (fused.grad,) = gradients([fused], step)
        for param, grad in zip(separate, pieces(fused.grad), strict=True):
            param.grad = grad.clone()
        first.step()
        second.step()
    for found, expected in zip(pieces(fused.detach()), separate, strict=True):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-10, atol=1e-10)


def test_nan_in_one_gradient_leaves_the_others_of_its_batch_alone() -> None:
    good, bad = parameters([(4, 4)] * 3), parameters([(4, 4)] * 3)
    for params in (good, bad):
        for param, grad in zip(params, gradients(params, 0), strict=True):
            param.grad = grad
    assert bad[1].grad is not None
    bad[1].grad[0, 0] = math.nan
    Muon(good, **DOUBLE, batched=True).step()
    Muon(bad, **DOUBLE, batched=True).step()
    assert bad[1].isnan().any()
    for index in (0, 2):
        torch.testing.assert_close(bad[index], good[index])


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3)])
def test_a_zero_gradient_in_a_batch_moves_its_matrix_alone_by_nothing(shape: tuple[int, int]) -> None:
    some, alone = parameters([shape] * 3), parameters([shape] * 3)
    before = some[1].detach().clone()
    for params in (some, alone):
        for param, grad in zip(params, gradients(params, 0), strict=True):
            param.grad = grad
    some[1].grad = torch.zeros(shape, dtype=torch.float64)
    Muon(some, **DOUBLE, weight_decay=0.0, batched=True).step()
    Muon(alone, **DOUBLE, weight_decay=0.0).step()
    assert torch.equal(some[1], before)
    for index in (0, 2):
        torch.testing.assert_close(some[index], alone[index])


def test_a_batch_of_no_steps_is_normalised() -> None:
    params = parameters([(4, 6), (6, 4)])
    before = [param.detach().clone() for param in params]
    for param, grad in zip(params, gradients(params, 0), strict=True):
        param.grad = grad
    Muon(params, lr=1.0, **DOUBLE, weight_decay=0.0, ns_steps=0, adjust_lr=lambda m, n: 1.0, batched=True).step()
    for param, old in zip(params, before, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(param.detach(), old - param.grad / param.grad.norm())


def test_empty_and_degenerate_matrices() -> None:
    params = parameters([(0, 4), (4, 0), (1, 1), (1, 5), (5, 1)])
    train(Muon(params, **DOUBLE), params, steps=2)
    assert all(param.isfinite().all() for param in params)


def test_options_per_group_survive_copies() -> None:
    params = parameters([(6, 6), (6, 6)])
    groups = [{"params": params[:1], "split": EqualBlocks(2)}, {"params": params[1:], "second_moment": 0.9}]
    optimizer = Muon(groups, **DOUBLE)
    train(optimizer, params, steps=1)
    assert [sorted(optimizer.state[param]) for param in params] == [
        ["momentum_buffer"],
        ["momentum_buffer", "second_moment"],
    ]
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.step()
        assert twin.param_groups[0]["split"] == EqualBlocks(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr": "fast"}, "adjust_lr must be one of .*, but is 'fast'"),
        ({"adjust_lr": "spectral", "adjust_lr_fn": "original"}, "two names of one option"),
        ({"momentum_style": "sgd"}, "momentum_style must be one of 'ema', 'heavy_ball', but is 'sgd'"),
        ({"second_moment": 1.0}, r"second_moment must be None or in \[0, 1\), but is 1.0"),
        ({"ns_dtype": torch.int32}, "ns_dtype must be bfloat16, float16, float32 or float64"),
        ({"ns_coefficients": "septic"}, "ns_coefficients must be 'quintic', 'cubic', 'polar_express'"),
        ({"ns_coefficients": [(1.0, 2.0, 3.0), (1.0,)]}, "or a sequence of such"),
        ({"split": EqualBlocks(4)}, "cannot be split into its logical matrices: .* evenly"),
        ({"split": Stack()}, "cannot be split into its logical matrices: .*3 or more dimensions"),
        ({"split": 3}, "cannot be split .*: split must be a Split or a rule such as EqualBlocks.3., but is 3"),
        ({"split": lambda shape: 3}, "cannot be split .* gives 3 rather than a Split"),
        ({"ns_coefficients": None}, "ns_coefficients must be three numbers .*, but is None"),
        ({"ns_coefficients": (1.0, 2.0, "3")}, "ns_coefficients must be three numbers"),
        ({"ns_coefficients": (1.0, 2.0, math.nan)}, "ns_coefficients must be three numbers"),
        ({"foreach": True, "compile": True}, "foreach=True and compile=True are two ways to do one thing"),
        ({"adjust_lr": lambda rows, columns: "x"}, "adjust_lr must give a finite number, but gives 'x' for 6 rows"),
        ({"adjust_lr": lambda rows, columns: math.nan if rows == 9 else 1.0}, "gives nan for 9 rows, 4 columns"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^Muon: .*{message}"):
        Muon(parameters(), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ns_steps": 2.5}, "Muon: ns_steps must be a whole number, but is 2.5"),
        ({"ns_steps": True}, "Muon: ns_steps must be a (whole )?number, but is True"),
        ({"second_moment": True}, "Muon: second_moment must be a number, but is True"),
        ({"nesterov": "false"}, "Muon: nesterov must be True or False, but is 'false'"),
        ({"batched": None}, "Muon: batched must be True or False, but is None"),
        ({"foreach": "x"}, "Muon: foreach must be True or False, but is 'x'"),
    ],
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Muon(parameters(), **options)


@pytest.mark.parametrize("optimizer", [Muon, Shampoo, SOAP])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decays": 0.1}, r"option 'weight_decays', which \w+ does not have"),
        ({"lr": torch.ones(2)}, r"a tensor lr must have one element, but its shape is \(2,\)"),
        ({"split": lambda shape: 3}, "gives 3 rather than a Split"),
    ],
)
def test_a_refused_group_is_not_added(optimizer: type[Any], options: dict[str, Any], message: str) -> None:
    kept, refused = parameters([(4, 4)] * 2)
    made = optimizer([kept])
    with pytest.raises(ValueError, match=message):
        made.add_param_group({"params": [refused], **options})
    assert [group["params"] for group in made.param_groups] == [[kept]]
