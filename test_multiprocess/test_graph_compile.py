"""Graph style under torch.compile(fullgraph=True): the same numbers, in one graph each of forward and backward."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mfsdp
from test_multiprocess.fsdp_cases import (
    VOCABULARY,
    TinyLM,
    assert_same,
    loss_of,
    mean_over_ranks,
    same_model,
    shard,
    whole_gradients,
    whole_parameters,
)
from test_multiprocess.graph_cases import shard_graph
from test_multiprocess.world import on_ranks

GATHER = torch.ops.mfsdp.gather_unit.default
REDUCE = torch.ops.mfsdp.reduce_unit.default

VIEWS = {
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.t.default,
}


class Capture:
    """A backend that runs the graphs of forward and backward as they are, and keeps them."""

    def __init__(self) -> None:
        self.forward: list[fx.GraphModule] = []
        self.backward: list[fx.GraphModule] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _keep(self, graphs: list[fx.GraphModule]) -> Callable[..., Any]:
        def compile(graph: fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph

        return compile


def calls(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, foreach=True)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@on_ranks(2, 4, timeout=240)
def test_twenty_steps_are_those_of_hooks_style_and_of_ddp(mesh: DeviceMesh, world_size: int) -> None:
    torch._dynamo.reset()
    compiled, hooks = same_model(), same_model()
    shard_graph(compiled, mesh)
    shard(hooks, mesh)
    counter = CompileCounterWithBackend("aot_eager")
    ours = train(torch.compile(compiled, fullgraph=True, backend=counter), 20)
    assert ours == pytest.approx(train(hooks, 20), rel=1e-6)
    assert ours == pytest.approx(train(DistributedDataParallel(same_model()), 20), rel=1e-6)
    assert counter.frame_count == 1
    assert_same(whole_parameters(compiled), whole_parameters(hooks), exact=False)


@on_ranks(2, timeout=240)
def test_full_parameters_are_gathered_again_and_not_saved(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    model = same_model()
    plan = shard_graph(model, mesh, reshard_after_forward=True)
    capture = Capture()
    loss_of(torch.compile(model, fullgraph=True, backend=capture.backend), 0).backward()
    (forward,), (backward,) = capture.forward, capture.backward
    sizes = {unit: sum(e.numel for e in plan.entries.values() if e.unit == unit) for unit in ("", "layers.0")}
    gathered = [sum(node.args[4]) for node in calls(forward, GATHER)]
    assert gathered == [sizes[""], *[sizes["layers.0"]] * 3]
    # the root's parameters are not gathered a second time for backward: at its start they are needed at once
    again = [sum(node.args[4]) for node in calls(backward, GATHER)]
    assert sorted(again) == sorted(gathered)
    assert len(calls(backward, REDUCE)) == 4
    (output,) = forward.graph.find_nodes(op="output")
    assert not [node for node in output.args[0] if isinstance(node, fx.Node) and from_gather(node)]


def from_gather(node: fx.Node) -> bool:
    """Whether ``node`` is a full tensor, a view of one, or a copy of what this rank owns."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
    return node.target in (GATHER, torch.ops.mfsdp.own.default)


@on_ranks(2, timeout=240)
def test_full_parameters_are_kept_if_asked_to(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    model = same_model()
    shard_graph(model, mesh, reshard_after_forward=False)
    capture = Capture()
    loss_of(torch.compile(model, fullgraph=True, backend=capture.backend), 0).backward()
    assert len(calls(capture.forward[0], GATHER)) == 4
    assert not calls(capture.backward[0], GATHER)


class Checkpointed(TinyLM):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Frozen(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("up" in name or "norm.bias" in name)


@pytest.mark.parametrize("case", ["checkpointed", "frozen", "bf16", "hsdp", "kept"])
@on_ranks(4, timeout=240)
def test_features(mesh: DeviceMesh, case: str) -> None:
    torch._dynamo.reset()
    options: dict[str, Any] = {}
    make = {"checkpointed": Checkpointed, "frozen": Frozen}.get(case, TinyLM)
    if case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if case == "kept":
        options["reshard_after_forward"] = False
    compiled, eager = same_model(make), same_model(make)
    shard_graph(compiled, mesh, **options)
    shard_graph(eager, mesh, **options)
    capture = Capture()
    # in a checkpointed region torch.compile takes registering full parameters, and putting back the sharded ones, for
    # something that the recomputation would have to repeat
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=case == "checkpointed"):
        ours = loss_of(torch.compile(compiled, fullgraph=True, backend=capture.backend), 0)
    theirs = loss_of(eager, 0)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    assert_same(whole_gradients(compiled), whole_gradients(eager), exact=case != "bf16", atol=1e-3)
    assert len(calls(capture.forward[0], GATHER)) == 4
    assert len(calls(capture.backward[0], GATHER)) == (0 if case == "kept" else 3)
    if case == "frozen":
        reduced = sum(sum(node.args[1]) for node in calls(capture.backward[0], REDUCE))
        assert reduced == sum(p.numel() for p in compiled.parameters() if p.requires_grad)
    if case == "hsdp":
        summed = calls(capture.backward[0], torch.ops._c10d_functional.all_reduce.default)
        held = [node.args[0].meta["val"].numel() for node in summed]
        assert sum(held) == sum(p.to_local().numel() for p in compiled.parameters())


@on_ranks(2, timeout=240)
def test_shapes_and_learning_rates_do_not_recompile(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    compiled, reference = same_model(), same_model()
    shard_graph(compiled, mesh)
    shard(reference, mesh)
    counter = CompileCounterWithBackend("aot_eager")
    losses: list[list[float]] = []
    for module in (compiled, reference):
        rate = {"lr": torch.tensor(0.002)}
        optimizer = mfsdp.optim.build_optimizer(
            module,
            matrix_kwargs={**rate, "ns_dtype": "float32"},
            other_kwargs={**rate, "foreach": False},
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

        def step(tokens: Tensor, module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            loss = loss_of_tokens(module, tokens)
            mfsdp.backward(loss)
            # the scheduler has put a function that is not traced around the optimizer's own
            type(optimizer).step(optimizer)
            return loss.detach()

        run = mfsdp.compile_step(step, backend=counter) if module is compiled else step
        seen = []
        for number in range(50):
            tokens = batch_of(number, length=(5, 9)[number % 2], size=3 + number % 3)
            torch._dynamo.mark_dynamic(tokens, (0, 1))
            seen.append(mean_over_ranks(run(tokens)))
            optimizer.zero_grad()
            schedule.step()
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert counter.frame_count == 2  # before there is a state, and after


@on_ranks(2, timeout=240)
def test_forward_backward_and_step_are_one_graph(mesh: DeviceMesh) -> None:
    model, reference = same_model(), same_model()
    shard_graph(model, mesh)
    shard_graph(reference, mesh)
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    losses = []
    for module in (model, reference):
        optimizer = mfsdp.optim.build_optimizer(
            module, matrix_kwargs={"lr": 0.002, "ns_dtype": "float32"}, other_kwargs={"lr": 0.002}
        )

        def step(tokens: Tensor, module: nn.Module = module, optimizer: Any = optimizer) -> Tensor:
            loss = loss_of_tokens(module, tokens)
            mfsdp.backward(loss)
            optimizer.step()
            return loss.detach()

        run = mfsdp.compile_step(step, backend=backend) if module is model else step
        seen = []
        for number in range(8):
            seen.append(mean_over_ranks(run(batch_of(number % 2))))
            optimizer.zero_grad()
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(graphs) == 2  # the first step makes the optimizer's state
    for graph in graphs:
        assert len(calls(graph, GATHER)) == 7  # four in forward, three in backward
        assert len(calls(graph, REDUCE)) == 4
        # nothing after the last reduction, so nothing in the step
        order = list(graph.graph.nodes)
        last = max(order.index(node) for node in calls(graph, REDUCE))
        assert not [node for node in order[last + 1 :] if communicates(node)]


def communicates(node: fx.Node) -> bool:
    name = str(node.target)
    return ("mfsdp" in name or "c10d" in name) and "wait_tensor" not in name


def batch_of(number: int, length: int = 6, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return torch.randint(VOCABULARY, (size, length), generator=generator)


def loss_of_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.parametrize(("kind", "style"), [("torch", "graph"), ("torch", "hooks"), ("ours", "graph")])
@on_ranks(2, timeout=240)
def test_the_step_alone_is_a_graph_without_collectives(mesh: DeviceMesh, kind: str, style: str) -> None:
    torch._dynamo.reset()
    compiled, reference = same_model(), same_model()
    plan = (shard_graph if style == "graph" else shard)(compiled, mesh)
    (shard_graph if style == "graph" else shard)(reference, mesh)
    matrices = {name for name, entry in plan.entries.items() if entry.role is mfsdp.Role.MATRIX}
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    backend = aot_autograd(fw_compiler=keep, inference_compiler=keep)
    for module in (compiled, reference):
        for optimizer in optimizers(module, matrices, kind):
            step = torch.compile(optimizer.step, backend=backend) if module is compiled else optimizer.step
            for number in range(3):
                loss_of(module, number).backward()
                step()
                module.zero_grad()
    assert_same(whole_parameters(compiled), whole_parameters(reference), exact=False, atol=2e-3)
    assert graphs
    for graph in graphs:
        assert not [node for node in graph.graph.nodes if communicates(node)]


def optimizers(model: nn.Module, matrices: set[str], kind: str) -> list[torch.optim.Optimizer]:
    if kind == "ours":
        return [mfsdp.optim.build_optimizer(model, matrix_kwargs={"lr": 0.002}, other_kwargs={"lr": 0.002})]
    named = dict(model.named_parameters())
    return [
        torch.optim.Muon([p for name, p in named.items() if name in matrices], lr=0.002),
        torch.optim.AdamW([p for name, p in named.items() if name not in matrices], lr=0.002, foreach=True),
    ]


@on_ranks(2, timeout=240)
def test_blocks_can_be_compiled_one_by_one(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    model, eager = same_model(), same_model()
    shard_graph(model, mesh)
    shard_graph(eager, mesh)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for module in (model, eager):
        loss_of(module, 0).backward()
    assert_same(whole_gradients(model), whole_gradients(eager), exact=True)


@on_ranks(2, timeout=300)
def test_inductor_gathers_one_unit_ahead_and_reduces_one_behind(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    compiled, eager = same_model(), same_model()
    shard_graph(compiled, mesh)
    shard_graph(eager, mesh)
    run = torch.compile(compiled, fullgraph=True)
    _, (forward, backward) = run_and_get_code(lambda: loss_of(run, 0).backward())
    loss_of(eager, 0).backward()
    assert_same(whole_gradients(compiled), whole_gradients(eager), exact=False)
    assert collectives(forward) == [
        *("gather 0", "gather 1", "wait gather 0", "gather 2", "wait gather 1", "gather 3"),
        *("wait gather 2", "wait gather 3"),
    ]
    assert collectives(backward) == [
        *("gather 0", "gather 1", "wait gather 0", "reduce 0", "gather 2", "wait gather 1", "wait gather 2"),
        *("reduce 1", "wait reduce 0", "reduce 2", "wait reduce 1", "reduce 3", "wait reduce 2", "wait reduce 3"),
    ]


def collectives(code: str) -> list[str]:
    """The collectives in generated code, in the order in which it runs them."""
    numbers: Counter[str] = Counter()
    started: dict[str, str] = {}
    found = []
    for line in code.splitlines():
        start = re.match(r"\s*(buf\d+) = torch\.ops\.mfsdp\.(gather|reduce)_unit\.default\(", line)
        in_place = re.match(r"\s*torch\.ops\.mfsdp\.reduce_packed_\.default\((buf\d+)", line)
        wait = re.match(r"\s*torch\.ops\._c10d_functional\.wait_tensor\.default\(\D*(buf\d+)", line)
        if start or in_place:
            buffer, kind = (start[1], start[2]) if start else (in_place[1], "reduce")
            started[buffer] = f"{kind} {numbers[kind]}"
            numbers[kind] += 1
            found.append(started[buffer])
        elif wait:
            found.append(f"wait {started[wait[1]]}")
    return found
