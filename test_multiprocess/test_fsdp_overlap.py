"""When collectives are started and finished, relative to computation."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.fsdp.collectives import Gather, Pending, Reduction, ShardGroup, Shipment
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather
from test_multiprocess.fsdp_cases import Block, groups_of, same_model, shard
from test_multiprocess.world import on_ranks


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4), Block(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class TracedPending(Pending):
    def __init__(self, pending: Pending, trace: list[str], label: str) -> None:
        self._pending, self._trace, self._label = pending, trace, label

    def wait(self) -> None:
        self._trace.append(f"{self._label} awaited")
        self._pending.wait()


class TracedGather(Gather):
    def __init__(self, gather: Gather, trace: list[str]) -> None:
        self._gather, self._trace = gather, trace

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        self._trace.append(f"{what} started")
        return TracedPending(self._gather.start(ranks, shipment, what), self._trace, what)


class TracedReduction(Reduction):
    def __init__(self, reduction: Reduction, trace: list[str]) -> None:
        self._reduction, self._trace = reduction, trace

    def start(self, ranks: ShardGroup, shipment: Shipment, what: str) -> Pending:
        self._trace.append(f"{what} started")
        return TracedPending(self._reduction.start(ranks, shipment, what), self._trace, what)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, trace, text):  # type: ignore[no-untyped-def]
        ctx.trace, ctx.text = trace, text
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        ctx.trace.append(ctx.text)
        return grad, None, None


def traced(model: nn.Module, mesh: DeviceMesh) -> list[str]:
    """The list to which everything that happens in ``model``, which is sharded here, is appended."""
    trace: list[str] = []
    for i, layer in enumerate(model.layers):
        inner = layer.up.forward

        def forward(x: Tensor, i: int = i, inner=inner) -> Tensor:  # type: ignore[no-untyped-def]
            trace.append(f"forward {i}")
            return _Mark.apply(inner(x), trace, f"backward {i}")

        layer.up.forward = forward
    shard(model, mesh)
    for group in groups_of(model):
        group.use_gather(TracedGather(group._gather, trace))
        group._reduction = TracedReduction(group._reduction, trace)
    return trace


def input_of_rank(mesh: DeviceMesh) -> Tensor:
    return torch.full((2, 4), float(mesh.get_local_rank() + 1), requires_grad=True)


def before(trace: list[str], first: str, second: str) -> bool:
    return trace.index(first) < trace.index(second)


@on_ranks(2)
def test_backward_gathers_the_previous_unit_ahead(mesh: DeviceMesh) -> None:
    model = same_model(Stack)
    trace = traced(model, mesh)
    loss = model(input_of_rank(mesh)).sum()
    trace.clear()
    loss.backward()
    for i in (1, 2):
        assert before(trace, f"gather of unit layers.{i - 1} started", f"backward {i}")
        assert before(trace, f"backward {i}", f"gather of unit layers.{i - 1} awaited")


@on_ranks(2)
def test_forward_gathers_the_units_ahead_that_it_was_told(mesh: DeviceMesh) -> None:
    model = same_model(Stack)
    trace = traced(model, mesh)
    for i in (0, 1):
        model.layers[i].set_modules_to_forward_prefetch([model.layers[i + 1]])
    model(input_of_rank(mesh))
    for i in (0, 1):
        assert before(trace, f"gather of unit layers.{i + 1} started", f"forward {i}")
        assert before(trace, f"forward {i}", f"gather of unit layers.{i + 1} awaited")


@on_ranks(2)
def test_backward_gathers_the_units_ahead_that_it_was_told(mesh: DeviceMesh) -> None:
    model = same_model(Stack)
    trace = traced(model, mesh)
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    loss = model(input_of_rank(mesh)).sum()
    trace.clear()
    loss.backward()
    for i in (0, 1):
        assert before(trace, f"gather of unit layers.{i} started", "backward 2")


@pytest.mark.parametrize("buffers", [1, 2])
@on_ranks(2)
def test_gradients_are_reduced_under_the_backward_of_the_next_unit(mesh: DeviceMesh, buffers: int) -> None:
    model = same_model(Stack)
    trace = traced(model, mesh)
    model.set_reduce_scatter_max_input_buffers(buffers)
    loss = model(input_of_rank(mesh)).sum()
    trace.clear()
    loss.backward()
    for i in (1, 2):
        assert before(trace, f"backward {i}", f"reduction of unit layers.{i} started")
        assert before(trace, f"reduction of unit layers.{i} started", f"backward {i - 1}")
        assert before(trace, f"backward {i - 1}", f"reduction of unit layers.{i} awaited")
    # no more gradient memory is in use than was allowed
    assert before(trace, "reduction of unit layers.2 awaited", "reduction of unit layers.1 started") == (buffers == 1)


@on_ranks(2)
def test_a_chain_goes_on_while_the_main_thread_computes(mesh: DeviceMesh) -> None:
    """With no call into the library in between, the gather is complete when it is waited for."""
    ranks = ShardGroup.of(mesh, 0)
    gather = ChainGather(Lane.of(ranks))
    from mfsdp.fsdp.collectives import Piece

    flat = torch.full((100_000,), float(ranks.coordinate))
    work = gather._lane.run(lambda: gather.move(ranks, Shipment((Piece(0, flat),))))
    work._future.exception(timeout=30)  # not LaneWork.wait: nothing drives it from here
    assert torch.equal(flat, torch.zeros(100_000))
