"""Muon on plain tensors: torch.optim.Muon's numbers bit for bit, without its defects."""

import copy
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from mfsdp.optim import Muon, newton_schulz

SHAPES = [(16, 16), (24, 8), (8, 24), (1, 5), (5, 1), (3, 2), (333, 101), (77, 160)]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    {"lr": torch.tensor(0.01), "ns_coefficients": (1.5, -0.5, 0.0), "eps": 1e-3},
    {"nesterov": False, "ns_steps": 3, "adjust_lr_fn": "original"},
]


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        *((options, dtype) for options in OPTIONS for dtype in (torch.float32, torch.float64)),
        # without Nesterov torch's own numbers are wrong in bfloat16, see the next test
        *((options, torch.bfloat16) for options in OPTIONS[:3]),
    ],
)
def test_bit_equal_to_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    train(Muon(ours, **options), ours)
    train(torch.optim.Muon(theirs, **options), theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_bf16_heavy_ball_momentum_is_not_normalised_in_place() -> None:
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([param], momentum=0.5, nesterov=False)
    param.grad = torch.full((4, 4), 8.0, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.full((4, 4), 4.0).bfloat16())


def test_coefficients_of_zero_give_no_update() -> None:
    param = nn.Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3)
    Muon([param], weight_decay=0, ns_coefficients=(0.0, 0.0, 0.0)).step()
    assert torch.equal(param, torch.ones(4, 3))


def test_a_zero_gradient_moves_nothing() -> None:
    param = nn.Parameter(torch.ones(3, 3))
    param.grad = torch.zeros(3, 3)
    Muon([param], weight_decay=0).step()
    assert torch.equal(param, torch.ones(3, 3))


def test_newton_schulz_reads_its_input_only_and_orthogonalises() -> None:
    matrix = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    before = matrix.clone()
    result = newton_schulz(matrix)
    assert torch.equal(matrix, before)
    assert (result.shape, result.dtype) == (matrix.shape, torch.bfloat16)
    singular = torch.linalg.svdvals(result.float())
    assert 0.6 < singular.min() <= singular.max() < 1.3
    norm = newton_schulz(matrix, steps=0).float().norm()
    assert abs(norm - 1) < 0.01


def test_state_dict_goes_to_torch_and_back() -> None:
    ours, theirs = parameters(), parameters()
    first, second = Muon(ours), torch.optim.Muon(theirs)
    train(first, ours, steps=3)
    train(second, theirs, steps=3)
    resumed = Muon(ours)
    resumed.load_state_dict(copy.deepcopy(second.state_dict()))
    train(resumed, ours, steps=3)
    train(second, theirs, steps=3)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_closure_groups_and_schedulers() -> None:
    params = parameters()
    optimizer = Muon([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.step(closure) < first
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.1]


def test_parameters_without_gradient_have_no_state() -> None:
    params = parameters()
    optimizer = Muon(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert list(optimizer.state) == [params[0]]


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "x"), ("weight_decay", "0.1"), ("momentum", None), ("ns_steps", "5"), ("eps", "0"), ("lr", True)],
)
def test_options_that_must_be_numbers(option: str, value: str | bool | None) -> None:
    optimizer = Muon(parameters())
    with pytest.raises(TypeError, match=f"^Muon: {option} must be a number, but is {value!r}.$"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], option: value})
    assert len(optimizer.param_groups) == 1


def test_options_that_torch_accepts() -> None:
    ours, theirs = parameters(), parameters()
    options: dict[str, Any] = {"momentum": 1.5, "ns_steps": 0, "eps": 1e-3}
    train(Muon(ours, **options), ours, steps=2)
    train(torch.optim.Muon(theirs, **options), theirs, steps=2)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, but is -1.0"),
        ({"lr": float("nan")}, "lr must be 0 or more, but is nan"),
        ({"lr": torch.ones(2)}, r"a tensor lr must have one element, but its shape is \(2,\)"),
        ({"weight_decay": -0.1}, "weight_decay must be 0 or more"),
        ({"momentum": -0.1}, "momentum must be 0 or more"),
        ({"eps": -1e-7}, "eps must be 0 or more"),
        ({"ns_steps": 100}, r"ns_steps must be in \[0, 100\), but is 100"),
        ({"ns_steps": -1}, r"ns_steps must be in \[0, 100\), but is -1"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients must be three numbers \(a, b, c\)"),
        (
            {"adjust_lr_fn": "fast"},
            "adjust_lr_fn must be one of 'original', 'match_rms_adamw', 'spectral', but is 'fast'",
        ),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(parameters(), **options)


def test_what_is_not_a_matrix_is_refused_and_named() -> None:
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError) as named:
        Muon([("mlp.weight", weight), ("mlp.bias", bias)])
    assert_expected_inline(
        str(named.value),
        """\
Muon: parameter 'mlp.bias' of shape (2,) has 1 dimensions: not a matrix. Give it to AdamW, or let \
mfsdp.optim.build_optimizer route it there.""",
    )
    optimizer = Muon([weight])
    with pytest.raises(ValueError, match=r"parameter 0 of its group of shape \(2,\) has 1 dimensions"):
        optimizer.add_param_group({"params": [bias]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError) as experts:
        Muon([("experts.weight", nn.Parameter(torch.ones(3, 2, 2)))])
    assert_expected_inline(
        str(experts.value),
        """\
Muon: parameter 'experts.weight' of shape (3, 2, 2) has 3 dimensions, and nothing says which matrices it consists of. \
Pass plan= to mfsdp.optim.build_optimizer if the model's plan has a split for it, or the option split, such as \
mfsdp.planning.Stack().""",
    )
    with pytest.raises(ValueError, match="real floating-point"):
        Muon([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    weight.grad = torch.eye(2).to_sparse()
    with pytest.raises(ValueError, match="Sparse gradients are not supported"):
        optimizer.step()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("options", [{}, {"batched": True}, {"batched": True, "compile": True}])
def test_a_captured_step_is_an_ordinary_one(options: dict[str, Any]) -> None:
    """A step captured once and replayed, with a learning rate on the GPU that changes between replays."""
    shapes = [(64, 64), (64, 128), (128, 64), (64, 64)]
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    rates = [0.1, 0.1, 0.05, 0.02]

    def new() -> tuple[list[nn.Parameter], Muon, torch.Tensor]:
        params = [nn.Parameter(tensor.cuda()) for tensor in start]
        for param in params:
            param.grad = torch.zeros_like(param)
        lr = torch.tensor(0.1, device="cuda")
        return params, Muon(params, lr=lr, capturable=True, **options), lr

    def prepare(params: list[nn.Parameter], lr: torch.Tensor, step: int) -> None:
        lr.fill_(rates[step])
        for param, grad in zip(params, grads[step], strict=True):
            assert param.grad is not None
            param.grad.copy_(grad)

    ordinary, optimizer, lr = new()
    for step in range(4):
        prepare(ordinary, lr, step)
        optimizer.step()

    captured, optimizer, lr = new()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # state and memory are made before the capture
        prepare(captured, lr, 0)
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for step in range(1, 4):
        prepare(captured, lr, step)
        graph.replay()
    for a, b in zip(captured, ordinary, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_a_capturable_step_is_an_ordinary_one() -> None:
    ours, theirs = parameters(), parameters()
    train(Muon(ours, lr=torch.tensor(0.02), capturable=True), ours, steps=5)
    train(Muon(theirs, lr=0.02), theirs, steps=5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
