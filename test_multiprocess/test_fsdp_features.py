"""What users of FSDP2 rely on in forward and backward, against a plain model on the same data."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
)

import mfsdp
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import local_tensor
from mfsdp.fsdp import fully_shard
from mfsdp.planning import plan
from test_multiprocess.fsdp_cases import (
    Block,
    OnlyOwned,
    assert_same,
    compare,
    groups_of,
    loss_of,
    rank_input,
    same_model,
    shard,
    whole_gradients,
)
from test_multiprocess.world import on_ranks


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@on_ranks(2)
def test_a_first_forward_without_gradients_spoils_nothing(mesh: DeviceMesh, mode: Callable) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    with mode():
        torch.testing.assert_close(model(rank_input(4)), reference(rank_input(4)), atol=0, rtol=0)
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


@on_ranks(2, 3)
def test_unshard_and_reshard_by_hand(mesh: DeviceMesh, world_size: int) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    layer = model.layers[0]
    assert isinstance(layer, FSDPModule)
    for async_op in (False, True):
        handle = layer.unshard(async_op=async_op)
        if handle is not None:
            handle.wait()
        assert torch.equal(layer.up.weight, reference.layers[0].up.weight)
        layer.reshard()
        assert layer.up.weight.numel() == 48
        assert local_tensor(layer.up.weight).numel() in (0, 48)
    layer.unshard(async_op=True)  # waited for by the forward
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size)


@on_ranks(2)
def test_an_exception_in_forward_leaves_the_module_usable(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    for where in (model.layers[1].down, model.last):
        handle = where.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("a user's fault")))
        with pytest.raises(ValueError, match="a user's fault"):
            model(rank_input(4))
        handle.remove()
        model.reset_iter_state()
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


@on_ranks(2)
def test_an_exception_in_backward_leaves_the_module_usable(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    shard(model, mesh)

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("a user's fault")

    handle = model.layers[0].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
    with pytest.raises(ValueError, match="a user's fault"):
        model(rank_input(4)).sum().backward()
    handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("hsdp", [False, True])
@on_ranks(4)
def test_parameters_can_be_kept_within_groups_until_backward(mesh: DeviceMesh, cast: bool, hsdp: bool) -> None:
    if hsdp:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(torch.bfloat16 if cast else None, torch.float32)
    model, reference = same_model(), same_model()
    shard(model, mesh, reshard_after_forward=2, mp_policy=policy)
    shard(reference, mesh, reshard_after_forward=True, mp_policy=policy)
    for step in range(2):
        for module in (model, reference):
            loss_of(module, step).backward()
        assert_same(whole_gradients(model), whole_gradients(reference), exact=True)


@on_ranks(4)
def test_what_is_kept_in_a_group_is_one_copy_of_the_unit(mesh: DeviceMesh) -> None:
    model = same_model()
    shard(model, mesh, reshard_after_forward=2)
    loss = loss_of(model, 0)
    for group in groups_of(model):
        kept = torch.tensor(group._memory.nbytes)
        first = dist.get_rank() // 2 * 2
        owned = sum(4 * segment.numel for segment in group._layout.segments if segment.owner // 2 == first // 2)
        sums = [torch.empty_like(kept) for _ in range(4)]
        dist.all_gather(sums, kept)
        # what owners in the group have is pinned and takes no memory; the rest is kept once
        assert sums[first] + sums[first + 1] == 4 * group._layout.numel - owned
    with CommCounter() as comm:
        loss.backward()
    units = sum(4 * group._layout.numel for group in groups_of(model))
    assert comm.by_kind["broadcast"].bytes == units
    assert sum(group._memory.nbytes for group in groups_of(model)) == 0


@on_ranks(2)
def test_other_methods_can_be_forwards(mesh: DeviceMesh) -> None:
    reference = same_model(WithEncode)
    model = copy.deepcopy(reference)
    shard(model, mesh)
    mfsdp.register_forward_method(model, "encode")
    compare(model, reference, lambda m: m.encode(rank_input(4)).sum(), world_size=2)


class WithEncode(OnlyOwned):
    def encode(self, x: Tensor) -> Tensor:
        return self.last(self.layers[0](x)) * 2


@on_ranks(2)
def test_blocks_can_be_compiled(mesh: DeviceMesh) -> None:
    reference = same_model(OnlyOwned)
    model = copy.deepcopy(reference)
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        compiled.append(len(list(graph.graph.nodes)))
        return graph.forward

    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    shard(model, mesh)
    for _ in range(2):
        compare(model, reference, lambda m: m(rank_input(4)).sum(), world_size=2)
        model.zero_grad()
        reference.zero_grad()
    assert compiled


class ChunkedLoss(nn.Module):
    """The head is not part of forward: it is called chunk by chunk, to save memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(4), Block(4)])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def chunked_loss(model: nn.Module) -> Tensor:
    return sum(model.head(chunk).square().sum() for chunk in model(rank_input(4)).unbind())  # type: ignore[return-value]


@on_ranks(2)
def test_a_group_may_run_in_part_and_its_head_by_chunks(mesh: DeviceMesh) -> None:
    reference = same_model(ChunkedLoss)
    model = copy.deepcopy(reference)
    made = plan(model, mesh)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, plan=made)
    fully_shard([model.norm, model.head], mesh=mesh, plan=made)
    fully_shard(model, mesh=mesh, plan=made)
    for _ in range(2):
        compare(model, reference, chunked_loss, world_size=2)
        model.zero_grad()
        reference.zero_grad()
