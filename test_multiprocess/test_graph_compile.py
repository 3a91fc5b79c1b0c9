"""Graph style under torch.compile(fullgraph=True): the same numbers, in one graph each of forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import CommCounter
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


class Shallow(TinyLM):
    """Of one block: what an optimizer's step costs to compile is per parameter."""

    def __init__(self) -> None:
        super().__init__(depth=1)


def calls(graph: fx.GraphModule, target: Any) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=target)


def train(model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, foreach=True)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step % 2)
        loss.backward()
        with CommCounter() as comm:
            optimizer.step()
        assert comm.collectives == 0, comm
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss))
    return losses


@on_ranks(2, 4, timeout=240)
def test_twenty_steps_are_those_of_hooks_style_and_of_ddp(mesh: DeviceMesh, world_size: int) -> None:
    torch._dynamo.reset()
    compiled, graph, hooks = same_model(), same_model(), same_model()
    shard_graph(compiled, mesh)
    shard_graph(graph, mesh)
    shard(hooks, mesh)
    counter = CompileCounterWithBackend("aot_eager")
    ours = train(torch.compile(compiled, fullgraph=True, backend=counter), 20)
    eager, theirs = train(graph, 20), train(hooks, 20)
    ddp = train(DistributedDataParallel(same_model()), 20)
    assert counter.frame_count == 1
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert ddp[18] < ddp[0] - 0.2  # both are of batch 0
    if world_size == 2:
        assert eager == theirs == ddp
        assert_same(whole_parameters(graph), whole_parameters(hooks), exact=True)
    else:
        assert eager == pytest.approx(theirs, rel=1e-6)
        assert eager == pytest.approx(ddp, rel=1e-6)
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


@pytest.mark.parametrize("case", ["checkpointed", "frozen", "bf16", "kept"])
@on_ranks(2, timeout=240)
def test_features(mesh: DeviceMesh, case: str) -> None:
    options: dict[str, Any] = {}
    if case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case == "kept":
        options["reshard_after_forward"] = False
    make = {"checkpointed": Checkpointed, "frozen": Frozen}.get(case, TinyLM)
    # in a checkpointed region torch.compile takes registering full parameters, and putting back the sharded ones, for
    # something that the recomputation would have to repeat
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=case == "checkpointed"):
        model, _, backward = same_as_eager(mesh, make, exact=case != "bf16", **options)
    assert len(calls(backward, GATHER)) == (0 if case == "kept" else 3)
    if case == "frozen":
        reduced = sum(sum(node.args[1]) for node in calls(backward, REDUCE))
        assert reduced == sum(p.numel() for p in model.parameters() if p.requires_grad)


@on_ranks(4, timeout=240)
def test_replicas_sum_in_the_graph(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, _, backward = same_as_eager(hsdp, TinyLM, exact=True)
    summed = calls(backward, torch.ops._c10d_functional.all_reduce.default)
    held = [node.args[0].meta["val"].numel() for node in summed]
    assert sum(held) == sum(p.to_local().numel() for p in model.parameters())


def same_as_eager(
    mesh: DeviceMesh, make: Callable[[], nn.Module], exact: bool, **options: Any
) -> tuple[nn.Module, fx.GraphModule, fx.GraphModule]:
    """A model that gives the same gradients compiled and not, and its graphs of forward and backward."""
    torch._dynamo.reset()
    compiled, eager = same_model(make), same_model(make)
    shard_graph(compiled, mesh, **options)
    shard_graph(eager, mesh, **options)
    capture = Capture()
    ours = loss_of(torch.compile(compiled, fullgraph=True, backend=capture.backend), 0)
    theirs = loss_of(eager, 0)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    assert_same(whole_gradients(compiled), whole_gradients(eager), exact=exact, atol=1e-3)
    (forward,), (backward,) = capture.forward, capture.backward
    assert len(calls(forward, GATHER)) == 4
    return compiled, forward, backward


@on_ranks(2, timeout=240)
def test_shapes_and_learning_rates_do_not_recompile(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    compiled, reference = same_model(Shallow), same_model(Shallow)
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
    model, reference = same_model(Shallow), same_model(Shallow)
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
        assert len(calls(graph, GATHER)) == 3  # two in forward, one in backward
        assert len(calls(graph, REDUCE)) == 2
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


@pytest.mark.parametrize("style", ["graph", "hooks"])
@pytest.mark.parametrize("kind", ["torch", "ours"])
@on_ranks(2, timeout=240)
def test_the_step_alone_is_a_graph_without_collectives(mesh: DeviceMesh, kind: str, style: str) -> None:
    torch._dynamo.reset()
    compiled, reference = same_model(Shallow), same_model(Shallow)
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
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            step = torch.compile(optimizer.step, backend=backend) if module is compiled else optimizer.step
            for number in range(4):
                loss_of(module, number).backward()
                step()
                schedule.step()
                module.zero_grad()
    assert_same(
        whole_parameters(compiled), whole_parameters(reference), exact=False, atol=1e-5 if kind == "ours" else 2e-3
    )
    # torch's two optimizers make their state outside of the graph, ours in a first graph
    assert len(graphs) == 2
    for graph in graphs:
        assert not [node for node in graph.graph.nodes if communicates(node)]


def optimizers(model: nn.Module, matrices: set[str], kind: str) -> list[torch.optim.Optimizer]:
    """With learning rates that are tensors, so that they are inputs of a graph and no constants."""

    def rate() -> dict[str, Any]:
        return {"lr": torch.tensor(0.002)}

    if kind == "ours":
        exact = {"ns_dtype": "float32"}
        options = {"matrix_kwargs": {**rate(), **exact}, "other_kwargs": {**rate(), "foreach": False}}
        return [mfsdp.optim.build_optimizer(model, **options)]
    named = dict(model.named_parameters())
    return [
        torch.optim.Muon([p for name, p in named.items() if name in matrices], **rate()),
        torch.optim.AdamW([p for name, p in named.items() if name not in matrices], **rate(), foreach=False),
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
