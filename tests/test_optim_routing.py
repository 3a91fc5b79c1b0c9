"""build_optimizer in one process: who gets what, and that two optimizers behave as one."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import mfsdp
from mfsdp.optim import AdamW, Muon, RoutedOptimizer, build_optimizer
from mfsdp.optim.spent_gradient import SpentGradient
from mfsdp.planning.split import EqualBlocks


class Model(nn.Module):
    """An embedding tied to nothing, two blocks, and a head: every role occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(2)])
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 10) -> float:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        tokens = torch.randint(11, (4, 8), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


def separately(model: Model) -> list[torch.optim.Optimizer]:
    """The same, made by hand of torch's own optimizers."""
    matrices = [block[0].weight for block in model.blocks]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01, foreach=True)]


def together(model: Model, **kwargs: Any) -> RoutedOptimizer:
    return build_optimizer(model, matrix_kwargs={"lr": 0.02}, other_kwargs={"lr": 0.01}, **kwargs)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_routes_by_role() -> None:
    optimizer = together(new_model())
    assert isinstance(optimizer.parts["matrix"], Muon)
    assert isinstance(optimizer.parts["other"], AdamW)
    matrices, others = (group["param_names"] for group in optimizer.param_groups)
    assert matrices == ["blocks.0.0.weight", "blocks.1.0.weight"]
    assert others[:2] == ["embed.weight", "blocks.0.0.bias"]
    assert others[-1] == "head.weight"
    assert len(others) == 8


@pytest.mark.parametrize("matrix", ["muon", torch.optim.Muon])
def test_bit_equal_to_two_torch_optimizers(matrix: Any) -> None:
    ours, theirs = new_model(), new_model()
    train(ours, [together(ours, matrix=matrix)])
    train(theirs, separately(theirs))
    assert_equal(ours, theirs)


def test_named_parameters_without_a_module_go_by_dimensions() -> None:
    model = new_model()
    optimizer = build_optimizer(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == [n for n, p in model.named_parameters() if p.ndim == 2]


def test_only_matrices_or_none() -> None:
    only = build_optimizer(nn.Linear(3, 3, bias=False))
    assert list(only.parts) == ["matrix"]
    norms = nn.LayerNorm(4)
    none = build_optimizer(norms)
    assert list(none.parts) == ["other"]
    none.add_param_group({"params": [("late", nn.Parameter(torch.ones(2, 2)))], "lr": 0.5})
    assert [group["lr"] for group in none.param_groups] == [1e-3, 0.5]
    assert isinstance(none.parts["matrix"], Muon)


def test_groups_added_later_are_split_stepped_and_saved() -> None:
    model = new_model()
    optimizer = build_optimizer(model.blocks[0], matrix_kwargs={"lr": 0.02})
    optimizer.add_param_group({"params": list(model.blocks[1].named_parameters()), "weight_decay": 0.0})
    assert [group["param_names"] for group in optimizer.param_groups[2:]] == [
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias"],
    ]
    before = copy.deepcopy(model.blocks)
    train(model, [optimizer], steps=1)
    for (name, p), q in zip(model.blocks.named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(p, q), name
    assert len(optimizer.state_dict()["state"]) == 8
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [("again", model.blocks[0][0].weight)]})


def test_a_scheduler_reaches_both_parts() -> None:
    optimizer = together(new_model())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    scheduler.step()
    assert [part.param_groups[0]["lr"] for part in optimizer.parts.values()] == [0.01, 0.005]


def test_resume_continues_bit_for_bit() -> None:
    straight, resumed = new_model(), new_model()
    for model in (straight, resumed):
        optimizer = together(model)
        train(model, [optimizer], steps=10)
        if model is resumed:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = together(model)
            optimizer.load_state_dict(saved)
            assert sorted(saved["state"]) == list(range(len(list(model.parameters()))))
        train(model, [optimizer], steps=5)
    assert_equal(straight, resumed)


def test_copies_and_pickles_share_groups_too() -> None:
    model = new_model()
    optimizer = together(model)
    train(model, [optimizer], steps=1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.parts["matrix"].param_groups[0] is twin.param_groups[0]
        weight = twin.param_groups[1]["params"][0]
        assert twin.parts["other"].state[weight] is twin.state[weight]
        assert len(twin.state) == len(optimizer.state) == len(list(model.parameters()))
        assert twin.parts["matrix"].param_groups[0] is not optimizer.param_groups[0]


def test_each_part_has_a_state_dict_of_its_own_parameters() -> None:
    model = new_model()
    optimizer = together(model)
    train(model, [optimizer], steps=2)
    whole = optimizer.state_dict()["state"]
    first = 0
    for part in optimizer.parts.values():
        saved = part.state_dict()
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        assert sorted(saved["state"]) == numbers
        for number in numbers:
            for name, value in saved["state"][number].items():
                assert torch.equal(value, whole[first + number][name])
        first += len(numbers)
    assert first == len(whole)


def test_state_of_the_parts_is_read_and_written_through_the_whole() -> None:
    model = new_model()
    optimizer = together(model)
    matrix, other = (group["params"][0] for group in optimizer.param_groups)
    assert matrix not in optimizer.state
    assert optimizer.state.get(matrix) is None
    assert not optimizer.state
    optimizer.state[matrix]["mine"] = 1
    optimizer.state[other] = {"mine": 2}
    assert dict(optimizer.parts["matrix"].state) == {matrix: {"mine": 1}}
    assert dict(optimizer.parts["other"].state) == {other: {"mine": 2}}
    del optimizer.state[other]
    assert list(optimizer.state) == [matrix]
    assert not optimizer.parts["other"].state


def test_a_closure_runs_once_and_hooks_fire_once() -> None:
    model, calls = new_model(), []
    optimizer = together(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> torch.Tensor:
        calls.append("closure")
        loss = model(torch.arange(8)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == ["pre", "closure", "post"]


@pytest.mark.parametrize("matrix", ["muon", "shampoo", "soap"])
def test_a_step_skipped_by_the_scaler_changes_nothing(matrix: str) -> None:
    model = new_model()
    optimizer = together(model, matrix=matrix)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    tokens = torch.arange(8)
    scaler.scale(model(tokens).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())

    optimizer.zero_grad()
    scaler.scale(model(tokens).square().mean() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(model, before)
    now = optimizer.state_dict()
    assert now["param_groups"] == state["param_groups"]
    torch.testing.assert_close(now["state"], state["state"], rtol=0, atol=0)
    assert scaler.get_scale() == 2.0


def test_adamw_can_maximize() -> None:
    ours, theirs = new_model(), new_model()
    train(ours, [AdamW(ours.parameters(), lr=0.01, maximize=True)])
    train(theirs, [torch.optim.AdamW(theirs.parameters(), lr=0.01, maximize=True)])
    assert_equal(ours, theirs)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError) as unknown:
        build_optimizer(new_model(), matrix="adam")
    assert_expected_inline(
        str(unknown.value),
        """build_optimizer: matrix must be 'muon', 'shampoo', 'soap' or a torch.optim.Optimizer class, not 'adam'.""",
    )
    with pytest.raises(ValueError, match="empty parameter list"):
        build_optimizer(nn.ReLU())
    with pytest.raises(ValueError, match="momentum must be 0 or more"):
        build_optimizer(new_model(), matrix_kwargs={"momentum": -1})
    with pytest.raises(TypeError, match="momentun"):
        build_optimizer(new_model(), matrix_kwargs={"momentun": 0.9})
    with pytest.raises(ValueError, match="differentiable=True is not supported"):
        build_optimizer(new_model(), other_kwargs={"differentiable": True, "foreach": False})


def test_patterns_make_groups_with_options_of_their_own() -> None:
    model = new_model()
    optimizer = build_optimizer(
        model,
        matrix_kwargs={"lr": 0.02},
        groups={"blocks.0.0.weight": {"lr": 0.5}, "blocks.?.1.*": {"weight_decay": 0.0}, "blocks.*.bias": {"lr": 0.25}},
    )
    described = [(group["param_names"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert described == [
        (["blocks.1.0.weight"], 0.02, 0.1),
        (["embed.weight", "head.weight"], 1e-3, 1e-2),
        (["blocks.0.0.weight"], 0.5, 0.1),
        (["blocks.0.1.weight", "blocks.0.1.bias", "blocks.1.1.weight", "blocks.1.1.bias"], 1e-3, 0.0),
        (["blocks.0.0.bias", "blocks.1.0.bias"], 0.25, 1e-2),
    ]
    train(model, [optimizer], steps=1)


def test_logical_matrices_come_from_the_plan() -> None:
    model = new_model()
    plan = mfsdp.plan(model, 1, splits={"blocks.0.0.weight": EqualBlocks(3)})
    optimizer = build_optimizer(model, plan=plan)
    split = {tuple(group["param_names"]): group.get("split") for group in optimizer.param_groups}
    assert split["blocks.0.0.weight",] == plan.entries["blocks.0.0.weight"].split
    assert split["blocks.1.0.weight",] is None
    train(model, [optimizer], steps=2)


@pytest.mark.parametrize("matrix", ["muon", "shampoo", "soap"])
def test_stepping_in_backward_gives_the_same_numbers(matrix: str) -> None:
    ordinary, overlapped = new_model(), new_model()
    train(ordinary, [together(ordinary, matrix=matrix)])
    optimizer = together(overlapped, matrix=matrix, overlap="backward")
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    train(overlapped, [optimizer])
    schedule.step()
    assert_equal(ordinary, overlapped)
    overlapped(torch.arange(8)).square().mean().backward()
    assert all(isinstance(param.grad, SpentGradient) for param in overlapped.parameters())
    optimizer.step()
    assert all(param.grad is None for param in overlapped.parameters())


USES: list[tuple[str, Callable[[list[nn.Parameter]], object]]] = [
    ("clip by norm", lambda params: nn.utils.clip_grad_norm_(params, 1.0)),
    ("clip by norm, one by one", lambda params: nn.utils.clip_grad_norm_(params, 1.0, foreach=False)),
    ("clip by value", lambda params: nn.utils.clip_grad_value_(params, 1.0)),
    ("total norm", lambda params: nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])),
    ("log", lambda params: [p.grad.data.norm() for p in params if p.grad is not None]),
    ("scale", lambda params: [p.grad.mul_(0.5) for p in params if p.grad is not None]),
    ("zero", lambda params: [p.grad.zero_() for p in params if p.grad is not None]),
]


@pytest.mark.parametrize("use", [use for _, use in USES], ids=[name for name, _ in USES])
def test_using_a_gradient_that_was_stepped_in_backward_raises(use: Callable[[list[nn.Parameter]], object]) -> None:
    model = new_model()
    optimizer = together(model, overlap="backward")
    model(torch.arange(8)).square().mean().backward()
    with pytest.raises(RuntimeError) as refused:
        use(list(model.blocks.parameters()))
    assert_expected_inline(
        str(refused.value),
        """overlap="backward": the gradient of parameter 'blocks.0.0.weight' has been used and freed, since each parameter is stepped during backward. To clip, unscale or read gradients, build the optimizer without overlap. To accumulate them over several backwards, set optimizer.backward_steps.is_last_microbatch = False for all but the last, and call optimizer.step() after that.""",
    )
    assert "SpentGradient(parameter 'head.weight')" in map(repr, (param.grad for param in model.parameters()))
    optimizer.zero_grad()  # what was used is gone, but nothing stands in the way of going on
    optimizer.step()
    model(torch.arange(8)).square().mean().backward()


def test_a_spent_gradient_takes_memory_for_one_element() -> None:
    param = nn.Parameter(torch.ones(50, 20))
    param.grad = SpentGradient.of(param, "it")
    assert param.grad.shape == param.shape
    assert param.grad.untyped_storage().nbytes() == 4


def test_a_scaler_with_steps_in_backward_raises() -> None:
    model = new_model()
    optimizer = together(model, overlap="backward")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.arange(8)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="has been used and freed"):
        scaler.step(optimizer)


def test_accumulating_gradients_with_steps_in_backward() -> None:
    tokens = torch.arange(8)

    def loss_of(model: nn.Module, half: int) -> torch.Tensor:
        return model(tokens.chunk(2)[half]).square().mean()

    ordinary, overlapped = new_model(), new_model()
    optimizer = together(ordinary)
    for half in (0, 1):
        loss_of(ordinary, half).backward()
    optimizer.step()

    optimizer = together(overlapped, overlap="backward")
    assert optimizer.backward_steps is not None
    for half in (0, 1):
        optimizer.backward_steps.is_last_microbatch = half == 1
        loss_of(overlapped, half).backward()
    optimizer.step()
    assert_equal(ordinary, overlapped)

    loss_of(overlapped, 0).backward()
    with pytest.raises(RuntimeError, match=r"the gradient of .* has been used and freed"):
        loss_of(overlapped, 1).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="a second backward since the last"):
        loss_of(overlapped, 1).backward()


def test_what_stepping_in_backward_excludes() -> None:
    model = new_model()
    optimizer = together(model, overlap="backward")
    with pytest.raises(ValueError, match="cannot be clipped"):
        optimizer.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="cannot step Muon, the matrix optimizer, one"):
        build_optimizer(new_model(), matrix=torch.optim.Muon, overlap="backward")
    with pytest.raises(ValueError, match="overlap must be None or 'backward', not 'forward'"):
        build_optimizer(new_model(), overlap="forward")


def test_clipping_over_all_groups() -> None:
    model = new_model()
    optimizer = together(model)
    model(torch.arange(8)).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    assert torch.equal(optimizer.clip_grad_norm_(1e-3), expected)


@pytest.mark.parametrize("start", ["both", "others"])
def test_a_group_that_is_refused_is_not_added(start: str) -> None:
    model = new_model()
    optimizer = together(model.blocks if start == "both" else model.blocks[0][1])
    parts, groups = set(optimizer.parts), len(optimizer.param_groups)
    late = {"late.weight": nn.Parameter(torch.ones(2, 2)), "late.bias": nn.Parameter(torch.ones(2))}
    for options in ({"amsgrad": True}, {"momentum": 0.5}, {"typo": 1}):  # the other's, the matrix's, nobody's
        with pytest.raises(ValueError, match=f"a group has the option '{next(iter(options))}'"):
            optimizer.add_param_group({"params": list(late.items()), **options})
    assert (set(optimizer.parts), len(optimizer.param_groups)) == (parts, groups)
    for param in late.values():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert all((param == 1).all() for param in late.values())
    optimizer.add_param_group({"params": list(late.items())})
    optimizer.step()
    assert all((param != 1).all() for param in late.values())


def test_parameters_without_names() -> None:
    with pytest.raises(TypeError) as nameless:
        build_optimizer(new_model().parameters())  # type: ignore[arg-type]
    assert_expected_inline(
        str(nameless.value),
        """\
build_optimizer: parameters must come with their names, but there is a Parameter among them. Pass the module or \
model.named_parameters().""",
    )


def test_bad_groups() -> None:
    with pytest.raises(ValueError, match=r"no parameter matches '\*.typo'"):
        build_optimizer(new_model(), groups={"*.typo": {"lr": 0.1}})
    with pytest.raises(ValueError, match="a group has the option 'momentun', which Muon does not have"):
        build_optimizer(new_model(), groups={"blocks.*.0.weight": {"momentun": 0.1}})


SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=10, cycle_momentum=isinstance(optimizer, Muon)
    ),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, base_lr=0.01, max_lr=0.1, cycle_momentum=isinstance(optimizer, Muon)
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, swa_lr=0.05),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
}


@pytest.mark.parametrize("make", [build_optimizer, Muon])
@pytest.mark.parametrize("scheduler", list(SCHEDULERS))
def test_what_a_scheduler_puts_into_groups_is_copied_added_and_loaded(
    scheduler: str, make: Callable[[Any], Optimizer]
) -> None:
    def named(name: str) -> list[tuple[str, nn.Parameter]]:
        return [(name, nn.Parameter(torch.ones(2, 2)))]

    optimizer, other = make(named("first")), make(named("first"))
    before = set(optimizer.param_groups[0])
    SCHEDULERS[scheduler](optimizer)
    put = set(optimizer.param_groups[0]) - before
    assert put
    other.load_state_dict(optimizer.state_dict())
    copied = {key: value for key, value in optimizer.param_groups[0].items() if key != "param_names"}
    optimizer.add_param_group({**copied, "params": named("second")})
    for name in put:
        assert other.param_groups[0][name] == optimizer.param_groups[0][name], name
        assert optimizer.param_groups[1][name] == optimizer.param_groups[0][name], name
    with pytest.raises(ValueError, match="'max_lrr', which Muon does not have"):
        optimizer.add_param_group({"params": named("third"), "max_lrr": 0.1})
