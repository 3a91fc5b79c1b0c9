"""Graph style as it runs without a compiler: the numbers of hooks style, its bytes, and no more memory."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import mfsdp
from mfsdp import CommCounter, OwnerShard, Role, Tail
from mfsdp.dtensor import is_local, local_tensor
from mfsdp.fsdp.graph import GraphFSDPModule
from test_multiprocess.fsdp_cases import (
    Block,
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


def both(mesh: DeviceMesh, make: Callable[[], nn.Module] = TinyLM, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model in graph style and in hooks style."""
    graph, hooks = same_model(make), same_model(make)
    shard_graph(graph, mesh, **options)
    shard(hooks, mesh, **options)
    return graph, hooks


def assert_same_backward(graph: nn.Module, hooks: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    ours, theirs = loss(graph), loss(hooks)
    assert torch.equal(ours, theirs)
    ours.backward()
    theirs.backward()
    assert_same(whole_gradients(graph), whole_gradients(hooks), exact=dist.get_world_size() == 2)


@on_ranks(2, 3, 4)
def test_parameters_are_placed_as_in_hooks_style(mesh: DeviceMesh, world_size: int) -> None:
    graph, hooks = both(mesh)
    theirs = dict(hooks.named_parameters())
    assert [name for name, _ in graph.named_parameters()] == list(theirs)
    for name, parameter in graph.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert parameter.placements == theirs[name].placements
        assert torch.equal(local_tensor(parameter), local_tensor(theirs[name]))
    assert isinstance(graph, TinyLM)
    assert [name for name, module in graph.named_modules() if isinstance(module, GraphFSDPModule)] == [
        "",
        *(f"layers.{index}" for index in range(3)),
    ]


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@on_ranks(2, 3, 4)
def test_gradients_are_those_of_hooks_style(
    mesh: DeviceMesh, world_size: int, reshard_after_forward: bool | None
) -> None:
    graph, hooks = both(mesh, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        graph.zero_grad()
        hooks.zero_grad()
        assert_same_backward(graph, hooks, lambda model, step=step: loss_of(model, step))


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16])
@on_ranks(2, 4)
def test_gather_and_reduction_move_the_plans_bytes(
    mesh: DeviceMesh, world_size: int, compute_dtype: torch.dtype | None
) -> None:
    model = same_model()
    policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype=torch.float32)
    made = shard_graph(model, mesh, mp_policy=policy)
    itemsize = 2 if compute_dtype else 4
    numel = sum(entry.numel for entry in made.entries.values())
    root = sum(entry.numel for entry in made.entries.values() if not entry.unit)
    with CommCounter() as forward:
        loss = loss_of(model, 0)
    with CommCounter() as backward:
        loss.backward()
    assert {kind: tally.bytes for kind, tally in forward.by_kind.items()} == {"broadcast": numel * itemsize}
    # the root's full parameters are kept for backward
    expected = {"broadcast": (numel - root) * itemsize, "reduce": numel * 4}
    assert {kind: tally.bytes for kind, tally in backward.by_kind.items()} == expected


class EvenRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(8)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(2, 4)
def test_rows_that_split_evenly_are_one_all_gather(mesh: DeviceMesh, world_size: int) -> None:
    graph, hooks = both(mesh, EvenRows)
    assert graph.embedding.weight.placements == (Shard(0),)
    tokens = torch.arange(12).reshape(3, 4) + dist.get_rank()
    with CommCounter() as comm:
        loss = graph(tokens).square().sum()
    assert comm.by_kind["all_gather"].calls == 1
    assert comm.by_kind["all_gather"].bytes == 16 * 8 * 4 // world_size
    del loss
    assert_same_backward(graph, hooks, lambda model: model(tokens).square().sum())


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
@on_ranks(2, 3)
def test_mixed_precision_is_that_of_hooks_style(
    mesh: DeviceMesh, world_size: int, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
    graph, hooks = both(mesh, mp_policy=policy)
    seen = []
    graph.layers[0].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    losses = [loss_of(module, 0) for module in (graph, hooks)]
    assert seen == [torch.bfloat16]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    gradients = whole_gradients(graph)
    assert {grad.dtype for grad in gradients.values() if grad is not None} == {torch.float32}
    exact = world_size == 2 and reduce_dtype is not None
    assert_same(gradients, whole_gradients(hooks), exact=exact, atol=1e-6 if reduce_dtype else 2e-2)


@on_ranks(2)
def test_gradients_accumulate(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh)
    for micro_batch in range(3):
        assert_same_backward(graph, hooks, lambda model, step=micro_batch: loss_of(model, step))


@on_ranks(4)
def test_replicas_sum_what_their_owner_has(mesh: DeviceMesh) -> None:
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    graph, hooks = both(hsdp)
    assert graph.layers[0].up.weight.placements == (
        Replicate(),
        OwnerShard(graph.layers[0].up.weight.placements[1].owner),
    )
    ours, theirs = loss_of(graph, 0), loss_of(hooks, 0)
    assert torch.equal(ours, theirs)
    with CommCounter() as comm:
        ours.backward()
    theirs.backward()
    assert_same(whole_gradients(graph), whole_gradients(hooks), exact=True)
    held = sum(local_tensor(parameter).numel() for parameter in graph.parameters())
    assert comm.by_kind["all_reduce"].bytes == held * 4


class Checkpointed(TinyLM):
    """Each block's activations are recomputed in backward."""

    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class CheckpointedByReentering(Checkpointed):
    reentrant = True


@pytest.mark.parametrize("make", [Checkpointed, CheckpointedByReentering])
@on_ranks(2)
def test_activation_checkpointing(mesh: DeviceMesh, make: type[TinyLM]) -> None:
    graph, hooks = both(mesh, make)
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))
    graph.zero_grad()
    with CommCounter() as forward:
        loss = loss_of(graph, 0)
    with CommCounter() as backward:
        loss.backward()
    # one more gather of each block, as without checkpoints
    gathered = forward.by_kind["broadcast"].calls - backward.by_kind["broadcast"].calls
    assert gathered == sum(1 for _ in root_pieces(graph))


def root_pieces(model: nn.Module) -> list[int]:
    return [size for group in model._mfsdp_unit.groups for size in group._spec.gather_sizes]


class Frozen(TinyLM):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("up" in name or "norm.bias" in name)


@on_ranks(2)
def test_frozen_parameters_are_not_reduced(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh, Frozen)
    loss = loss_of(graph, 0)
    with CommCounter() as backward:
        loss.backward()
    trained = sum(parameter.numel() for parameter in graph.parameters() if parameter.requires_grad)
    assert backward.by_kind["reduce"].bytes == 4 * trained
    loss_of(hooks, 0).backward()
    assert_same(whole_gradients(graph), whole_gradients(hooks), exact=True)
    for model in (graph, hooks):  # and now some more of them train
        model.zero_grad()
        model.layers[1].down.weight.requires_grad_()
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))


class Tied(TinyLM):
    """The head is the embedding, and all blocks have the norm of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        for layer in self.layers:
            layer.norm.weight = self.layers[0].norm.weight


@on_ranks(2)
def test_tied_parameters(mesh: DeviceMesh) -> None:
    graph = same_model(Tied)
    reference = DistributedDataParallel(copy.deepcopy(graph))
    shard_graph(graph, mesh)
    assert graph.head.weight is graph.embedding.weight
    assert graph.layers[2].norm.weight is graph.layers[0].norm.weight
    loss_of(graph, 0).backward()
    loss_of(reference, 0).backward()
    theirs = {name: parameter.grad for name, parameter in reference.module.named_parameters()}
    assert_same(whole_gradients(graph), theirs, exact=True)


class Unused(TinyLM):
    """The second block is passed by, on all ranks."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.layers[0](x)
        return self.head(self.norm(self.layers[2](x)))


@on_ranks(2)
def test_a_unit_that_does_not_run_has_no_gradients(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh, Unused)
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))
    assert graph.layers[1].up.weight.grad is None


class PartlyUsed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if dist.get_rank() == 0 else self.down(self.up(x))


@on_ranks(2)
def test_parameters_that_only_some_ranks_use(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        model = nn.Module()
        model.layers = nn.ModuleList([PartlyUsed(4)])
        model.bias = nn.Parameter(torch.ones(4))
        model.__class__ = type("Model", (nn.Module,), {"forward": lambda self, x: self.layers[0](x + self.bias)})
        return model

    graph, hooks = both(mesh, make)
    assert_same_backward(graph, hooks, lambda model: model(torch.ones(2, 4)).square().sum())


@on_ranks(2)
def test_without_gradients_nothing_is_kept_or_reduced(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), CommCounter() as comm:
            assert torch.equal(loss_of(graph, 0), loss_of(hooks, 0))
        assert "reduce" not in comm.by_kind
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))


@on_ranks(2)
def test_an_exception_in_forward_leaves_the_model_usable(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh)
    broken = graph.layers[1].register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(graph, 0)
    broken.remove()
    inside = graph.layers[1].up.register_forward_hook(lambda module, args, output: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(graph, 0)
    inside.remove()
    assert all(isinstance(parameter, DTensor) for parameter in graph.parameters())
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))


@on_ranks(2)
def test_two_forwards_and_then_backward_twice(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh)
    for model in (graph, hooks):
        (loss_of(model, 0) + loss_of(model, 1)).backward()
    assert_same(whole_gradients(graph), whole_gradients(hooks), exact=False)  # reduced apart, and then added
    graph.zero_grad()
    loss = loss_of(graph, 0)
    loss.backward(retain_graph=True)
    once = whole_gradients(graph)
    loss.backward()
    for name, grad in whole_gradients(graph).items():
        assert torch.equal(grad, 2 * once[name]), name


@on_ranks(2)
def test_changing_a_saved_activation_in_place_is_an_error(mesh: DeviceMesh) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](x)

    model = same_model(InPlace)
    shard_graph(model, mesh, reshard_after_forward=True)
    hidden = torch.ones(2, 4, requires_grad=True) * 1
    output = model(hidden)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape \\(2, 4\\)"):
        output.sum().backward()


@on_ranks(2)
def test_full_parameters_are_not_kept_from_forward_to_backward(mesh: DeviceMesh) -> None:
    for reshard in (True, False):
        model = same_model()
        shard_graph(model, mesh, reshard_after_forward=reshard)
        full: list[int] = []
        for module in (layer.get_submodule(name) for layer in model.layers for name in ("up", "down")):
            if not is_local(module.weight):
                module.register_forward_hook(
                    lambda module, *_, seen=full: seen.append(module.weight.untyped_storage()._weak_ref())
                )
        loss = loss_of(model, 0)
        dist.barrier()  # what gloo's threads still held, they have let go
        assert [torch.UntypedStorage._expired(reference) for reference in full] == [reshard] * 3
        loss.backward()
        del loss
        dist.barrier()
        assert all(torch.UntypedStorage._expired(reference) for reference in full)
        for reference in full:
            torch.UntypedStorage._free_weak_ref(reference)


@on_ranks(2)
def test_a_full_parameter_is_the_owners_sharded_one(mesh: DeviceMesh) -> None:
    for dtype in (None, torch.bfloat16):
        model = same_model()
        shard_graph(model, mesh, mp_policy=MixedPrecisionPolicy(dtype))
        seen = []
        for module in (layer.get_submodule(name) for layer in model.layers for name in ("up", "down")):
            if is_local(module.weight):
                held = local_tensor(module.weight).data_ptr()
                module.register_forward_hook(
                    lambda module, *_, held=held: seen.append(module.weight.data_ptr() == held)  # noqa: B023
                )
        loss_of(model, 0)
        assert seen == [dtype is None] * 3


class Wide(nn.Module):
    """Its matrices are large enough to be sent one by one, from where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(300)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@on_ranks(2)
def test_large_parameters_travel_by_themselves(mesh: DeviceMesh) -> None:
    graph, hooks = both(mesh, Wide)
    x = torch.ones(2, 300) + dist.get_rank()
    with CommCounter() as comm:
        loss = graph(x).square().mean()
    whole_numel = sum(parameter.numel() for parameter in graph.parameters())
    assert comm.by_kind["broadcast"].bytes == 4 * whole_numel
    assert comm.by_kind["broadcast"].calls > len({p.placements[0].owner for p in graph.parameters()})
    del loss
    assert_same_backward(graph, hooks, lambda model: model(x).square().mean())


@on_ranks(2, 3)
def test_model_states_are_interchangeable_with_hooks_style(mesh: DeviceMesh, world_size: int, tmp_path: Path) -> None:
    graph, hooks = both(mesh)
    for turn, (source, target) in enumerate([(hooks, graph), (graph, hooks)]):
        folder = tmp_path / f"{turn}"
        with torch.no_grad():
            for parameter in source.parameters():
                if is_local(parameter):
                    local_tensor(parameter).add_(1)
        dcp.save(get_model_state_dict(source), checkpoint_id=folder)
        state = get_model_state_dict(target)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(target, state)
        assert_same(whole_parameters(target), whole_parameters(source), exact=True)
    graph.load_state_dict(hooks.state_dict())
    assert_same_backward(graph, hooks, lambda model: loss_of(model, 0))


@on_ranks(2)
def test_a_run_is_resumed_from_a_checkpoint_of_the_other_style(mesh: DeviceMesh, tmp_path: Path) -> None:
    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return mfsdp.optim.build_optimizer(model, matrix_kwargs={"lr": 0.02}, other_kwargs={"lr": 0.003})

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(mean_over_ranks(loss))
        return losses

    for first, second in ((shard_graph, shard), (shard, shard_graph)):
        saved, resumed = same_model(), same_model(seed=1)
        first(saved, mesh)
        second(resumed, mesh)
        optimizer = optimizer_of(saved)
        steps(saved, optimizer, range(3))
        mfsdp.checkpoint.save(tmp_path / first.__name__, saved, optimizer, extra={"step": 3})
        other = optimizer_of(resumed)
        assert mfsdp.checkpoint.load(tmp_path / first.__name__, resumed, other) == {"step": 3}
        assert steps(resumed, other, range(3, 6)) == steps(saved, optimizer, range(3, 6))
        assert_same(whole_parameters(resumed), whole_parameters(saved), exact=True)


@on_ranks(2)
def test_a_model_from_the_meta_device(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = TinyLM()
    shard_graph(model, mesh)
    model.to_empty(device="cpu")
    hooks = same_model()
    shard(hooks, mesh)
    model.load_state_dict(hooks.state_dict())
    assert_same_backward(model, hooks, lambda model: loss_of(model, 0))


@on_ranks(2)
def test_ignored_parameters_stay_as_they_are(mesh: DeviceMesh) -> None:
    model = same_model()
    ignored = {model.norm.weight, model.norm.bias}
    made = mfsdp.plan(model, mesh)
    mfsdp.fully_shard(model, mesh=mesh, plan=made, style="graph", ignored_params=ignored)
    assert model.norm.weight in ignored
    loss_of(model, 0).backward()
    assert model.norm.weight.grad is not None
    assert isinstance(model.layers[0].norm.bias.placements[0], Tail)
    assert made.entries["norm.weight"].role is Role.TAIL
