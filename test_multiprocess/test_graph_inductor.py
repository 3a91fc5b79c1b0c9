"""What Inductor makes of graph style: the order of collectives in its code, and what the pass that makes it does."""

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.fsdp import fully_shard
from mfsdp.fsdp.graph import lowering, ops, overlap
from mfsdp.fsdp.graph.overlap import Overlap
from mfsdp.planning import plan
from test_multiprocess.fsdp_cases import assert_same, loss_of, rank_input, same_model, whole_gradients
from test_multiprocess.graph_cases import shard_graph
from test_multiprocess.world import on_ranks

WIDTH = 8


@on_ranks(2, timeout=300)
def test_inductor_gathers_one_unit_ahead_and_reduces_one_behind(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    compiled, eager = same_model(), same_model()
    shard_graph(compiled, mesh)
    shard_graph(eager, mesh)
    run = torch.compile(compiled, fullgraph=True)
    with config.patch(fx_graph_cache=False):  # a graph from the cache makes no code
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


class Chain(nn.Module):
    """Products with one matrix each: with each as a unit, every unit is owned whole by one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(3, timeout=300)
def test_ranks_that_own_different_units_start_collectives_in_one_order(mesh: DeviceMesh) -> None:
    compiled, eager = same_model(Chain), same_model(Chain)
    for model in (compiled, eager):
        made = plan(model, mesh, units=[f"layers.{number}" for number in range(4)])
        fully_shard(model, mesh=mesh, plan=made, style="graph", reshard_after_forward=True)
    assert {entry.owner for entry in made.entries.values()} == {0, 1, 2}
    codes = codes_of(torch.compile(compiled, fullgraph=True), rank_input(WIDTH))
    eager(rank_input(WIDTH)).sum().backward()
    assert_same(whole_gradients(compiled), whole_gradients(eager), exact=False)
    for code in codes:
        started = [event.name for event in events(code) if not event.name.startswith("wait")]
        of_all: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(of_all, started)
        assert of_all == [started] * dist.get_world_size()
        assert_gathered_ahead(code)


@on_ranks(2, timeout=300)
def test_nothing_that_a_gather_sends_is_reused_before_it_is_complete(mesh: DeviceMesh) -> None:
    lowering.register_lowerings()
    size, here = 4 * WIDTH * WIDTH, dist.get_rank()
    group = mesh.get_group().group_name

    def run(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sent = [x @ x, x @ y, y @ x]  # rank 0 sends each from where it is
        offsets, numel = ([-1] * 3, 0) if here == 0 else ([0, size, 2 * size], 3 * size)
        full = torch.ops.mfsdp.gather_unit(sent, offsets, numel, [0] * 3, [size] * 3, here, x.dtype, group)
        others = (y @ y) @ x
        return ops.wait(full), others

    torch._dynamo.reset()
    x, y = torch.randn(2, 2 * WIDTH, 2 * WIDTH)
    dist.broadcast(x, src=0)
    dist.broadcast(y, src=0)
    as_written = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    with config.patch(fx_graph_cache=False, **as_written), torch.no_grad():
        (full, others), (code,) = run_and_get_code(torch.compile(run, fullgraph=True), x, y)
    torch.testing.assert_close(others, (y @ y) @ x)
    if here:
        torch.testing.assert_close(full, torch.cat([x @ x, x @ y, y @ x]).flatten())
    gather, wait = events(code)
    sent = gather.inputs.split(", ")
    assert len(set(sent)) == 3
    between = code.splitlines()[gather.line + 1 : wait.line]
    assert any("extern_kernels" in line for line in between)
    assert not [line for line in between for buffer in sent if re.search(rf"\bdel {buffer}\b", line)]


class Other(CustomGraphPass):
    """Somebody's own pass, that does nothing."""

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> bytes:
        return b"other"


@on_ranks(2, timeout=300)
def test_a_configuration_without_the_pass_is_noticed_once(mesh: DeviceMesh) -> None:
    lowering.register_lowerings()
    overlap.install()
    assert len(get_custom_graph_passes(config.post_grad_custom_post_pass)) == 1
    lowering._warn_of_no_overlap.cache_clear()
    group = mesh.get_group().group_name

    def run(x: Tensor) -> list[Tensor]:
        numbers = ([0], 4, [0], [4], dist.get_rank(), x.dtype, group)
        return [ops.wait(torch.ops.mfsdp.gather_unit([each], *numbers)) for each in (x, -x)]

    def warned(**options: Any) -> list[str]:
        torch._dynamo.reset()
        with config.patch(fx_graph_cache=False), warnings.catch_warnings(record=True) as raised, torch.no_grad():
            warnings.simplefilter("always")
            torch.compile(run, fullgraph=True, options=options)(torch.ones(4))
        return [str(each.message) for each in raised if "mfsdp" in str(each.message)]

    assert not warned()
    assert not warned(post_grad_custom_post_pass=[Overlap(), Other()])
    (message,) = warned(post_grad_custom_post_pass=Other())
    assert "[mfsdp.fsdp.graph.overlap.Overlap(), *your passes]" in message
    assert not warned(post_grad_custom_post_pass=Other())


def assert_gathered_ahead(code: str) -> None:
    """That on this rank no unit is computed with before the next gather is started, whoever owns it."""
    lines = code.splitlines()
    gathers = [event for event in events(code) if event.name.startswith("gather")]
    assert len(gathers) >= 3
    for event, following in pairwise(gathers):
        parameter = rf"\b({event.buffer}|{event.inputs})\b"
        used = [n for n, line in enumerate(lines) if "extern_kernels" in line and re.search(parameter, line)]
        assert used
        assert min(used) > following.line, f"{event.name} is used before {following.name} is started"


def codes_of(run: nn.Module, x: Tensor) -> list[str]:
    """The code of forward and of backward."""
    with config.patch(fx_graph_cache=False):
        _, codes = run_and_get_code(lambda: run(x).sum().backward())
    assert len(codes) == 2
    return codes


@dataclass(frozen=True)
class Event:
    """A collective that generated code starts, or waits for.

    Args:
        name: what it is: which gather or reduction, counted from 0.
        line: of the code.
        buffer: its result.
        inputs: what is sent, separated by commas; of gathers.
    """

    name: str
    line: int
    buffer: str
    inputs: str = ""


def events(code: str) -> Iterator[Event]:
    """In the order in which code runs them."""
    numbers: Counter[str] = Counter()
    started: dict[str, str] = {}
    for number, line in enumerate(code.splitlines()):
        start = re.match(r"\s*(buf\d+) = torch\.ops\.mfsdp\.(gather|reduce)_unit\.default\(\[(.*?)\]", line)
        in_place = re.match(r"\s*torch\.ops\.mfsdp\.reduce_packed_\.default\((buf\d+)", line)
        wait = re.match(r"\s*torch\.ops\._c10d_functional\.wait_tensor\.default\(\D*(buf\d+)", line)
        if start or in_place:
            buffer, kind, inputs = start.groups() if start else (in_place[1], "reduce", "")
            started[buffer] = f"{kind} {numbers[kind]}"
            numbers[kind] += 1
            yield Event(started[buffer], number, buffer, inputs)
        elif wait:
            yield Event(f"wait {started[wait[1]]}", number, wait[1])


def collectives(code: str) -> list[str]:
    """Names of events."""
    return [event.name for event in events(code)]
