"""R1 and R2 op by op: the owner runs, the others hold empties, nothing is communicated, the answer is right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import mfsdp
from mfsdp import CommCounter, OwnerShard, Tail
from test_multiprocess.world import on_ranks


def matrix(rows: int = 6, columns: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def owned(tensor: Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    return mfsdp.distribute_tensor(tensor, mesh, placements or [OwnerShard(1)])


def silent(function: Callable[[], Any]) -> Any:
    """The function's result; it must not communicate."""
    with CommCounter() as comm:
        result = function()
    assert comm.collectives == 0, comm
    return result


@on_ranks(2, 3)
def test_results_are_owned_and_right_without_communication(mesh: DeviceMesh) -> None:
    a, b = matrix(seed=1), matrix(seed=2)
    x, y = owned(a, mesh), owned(b, mesh)
    cases: list[Callable[[Any, Any], Any]] = [
        lambda x, y: x + y,
        lambda x, y: x.mul(2).sub(y, alpha=3),
        lambda x, y: x @ y.mT,
        lambda x, y: torch.addmm(x @ x.mT, x, y.mT, beta=0.5),
        lambda x, y: x.t(),
        lambda x, y: x.reshape(3, 8),
        lambda x, y: x[1:4, ::2],
        lambda x, y: x[2],
        lambda x, y: x.sum(),
        lambda x, y: x.norm(),
        lambda x, y: x.amax(dim=1, keepdim=True),
        lambda x, y: torch.cat([x, y], dim=1),
        lambda x, y: torch.stack([x, y]),
        lambda x, y: x.to(torch.bfloat16),
        lambda x, y: torch.where(x > y, x, y),
        lambda x, y: x.argmax(dim=0),
        lambda x, y: torch.linalg.inv(y.mT @ y),
        lambda x, y: x.unsqueeze(0).expand(2, 6, 4),
        lambda x, y: x.softmax(dim=-1),
        lambda x, y: x.cumsum(0),
        lambda x, y: torch.fft.fft(x),
        lambda x, y: x.new_zeros(3, 5),
        lambda x, y: torch.zeros_like(x, dtype=torch.int32),
        lambda x, y: torch.ones_like(y.mT),
        lambda x, y: x.histc(bins=5, min=-1.0, max=1.0),
        lambda x, y: x.histc(bins=7, min=-1.0, max=1.0),  # torch's cache key leaves the bins out
    ]
    for number, case in enumerate(cases):
        expected = case(a, b)
        for _ in range(2):  # the second time the dispatcher's cache answers
            result = silent(lambda case=case: case(x, y))
            assert result.placements == (OwnerShard(1),), number
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape), number
            holds = mesh.get_coordinate() == (1,)
            assert result.to_local().shape == (expected.shape if holds else (0, *expected.shape[1:])), number
            assert torch.equal(result.full_tensor(), expected), number


@on_ranks(2)
def test_several_results(mesh: DeviceMesh) -> None:
    a = matrix()
    x = owned(a, mesh)
    for name in ("svd", "qr"):
        function = getattr(torch.linalg, name)
        for result, expected in zip(silent(lambda f=function: f(x)), function(a), strict=True):
            assert torch.equal(result.full_tensor(), expected)
    symmetric = a @ a.T
    owned_symmetric = owned(symmetric, mesh)
    eigenvalues, eigenvectors = silent(lambda: torch.linalg.eigh(owned_symmetric))
    assert torch.equal(eigenvalues.full_tensor(), torch.linalg.eigh(symmetric)[0])
    assert torch.equal(eigenvectors.full_tensor(), torch.linalg.eigh(symmetric)[1])
    for result, expected in zip(silent(lambda: x.chunk(3)), a.chunk(3), strict=True):
        assert result.placements == (OwnerShard(1),)
        assert torch.equal(result.full_tensor(), expected)
    values, indices = silent(lambda: x.max(dim=1))
    assert torch.equal(values.full_tensor(), a.max(dim=1).values)
    assert torch.equal(indices.full_tensor(), a.max(dim=1).indices)


@on_ranks(2, 3)
def test_in_place_keeps_the_tensor_and_its_place(mesh: DeviceMesh, world_size: int) -> None:
    a, b = matrix(seed=1), matrix(seed=2)
    x = owned(a, mesh)
    result = silent(lambda: x.mul_(2))
    assert result is x
    assert torch.equal(x.full_tensor(), a * 2)
    # what is added comes to where the written tensor is
    expected = a * 2
    for placement in (OwnerShard(0), OwnerShard(1), Tail(1), Replicate(), Shard(0), Shard(1)):
        other = distribute_tensor(b, mesh, [placement])
        assert x.add_(other) is x
        assert x.placements == (OwnerShard(1),)
        expected = expected + b
        torch.testing.assert_close(x.full_tensor(), expected, rtol=0, atol=0)
    partial = DTensor.from_local(b, mesh, [Partial()], run_check=False)
    with CommCounter() as comm:
        x.add_(partial)
    assert set(comm.by_kind) == {"reduce"}
    torch.testing.assert_close(x.full_tensor(), expected + b * world_size)
    replicated = distribute_tensor(a.clone(), mesh, [Replicate()])  # torch's may alias its source
    assert replicated.add_(owned(b, mesh)).placements == (Replicate(),)
    assert torch.equal(replicated.to_local(), a + b)
    sharded = distribute_tensor(a, mesh, [Shard(0)])
    with CommCounter() as comm:
        sharded.add_(owned(b, mesh))
    assert set(comm.by_kind) == {"all_to_all"}  # scattered, not broadcast
    assert torch.equal(sharded.full_tensor(), a + b)


@on_ranks(2)
def test_in_place_on_a_view_changes_its_base(mesh: DeviceMesh) -> None:
    a = matrix()
    x = owned(a, mesh)
    silent(lambda: x[1:3].mul_(0))
    silent(lambda: x.t()[0].fill_(7))
    silent(lambda: x.view(-1)[-1:].add_(1))
    expected = a.clone()
    expected[1:3].mul_(0)
    expected.t()[0].fill_(7)
    expected.view(-1)[-1:].add_(1)
    assert torch.equal(x.full_tensor(), expected)


@on_ranks(2, 3)
def test_in_place_changes_of_shape(mesh: DeviceMesh) -> None:
    a = matrix(6, 4)
    for change in (
        lambda t: t.t_(),
        lambda t: t.transpose_(0, 1),
        lambda t: t.unsqueeze_(0),
        lambda t: t.unsqueeze_(-1).squeeze_(-1),
        lambda t: t.swapaxes_(0, 1),
    ):
        x, expected = owned(a, mesh), change(a.clone())
        result = silent(lambda x=x, change=change: change(x))
        assert result is x
        assert x.shape == expected.shape
        assert x.stride() == expected.stride()
        assert x.to_local().shape[1:] == expected.shape[1:]
        assert torch.equal(x.full_tensor(), expected)
        assert torch.equal((x * 2).full_tensor(), expected * 2)


@on_ranks(2, 3)
def test_different_owners_meet_replicated(mesh: DeviceMesh) -> None:
    a, b = matrix(seed=1), matrix(seed=2)
    x, y = owned(a, mesh, OwnerShard(0)), owned(b, mesh, OwnerShard(1))
    total = x + y
    assert total.placements == (Replicate(),)
    assert torch.equal(total.to_local(), a + b)
    assert torch.equal((x @ y.mT).full_tensor(), a @ b.mT)
    assert (x + owned(b, mesh, Tail(0))).placements == (OwnerShard(0),)  # one owner, two roles
    stacked = silent(lambda: torch.stack([x, y]))
    assert stacked.placements == (Partial("sum"),)
    assert torch.equal(stacked.full_tensor(), torch.stack([a, b]))
    assert torch.equal(torch.cat([x, y, distribute_tensor(a, mesh, [Shard(0)])]).full_tensor(), torch.cat([a, b, a]))


@on_ranks(2, 3)
def test_list_ops_run_element_by_element(mesh: DeviceMesh, world_size: int) -> None:
    full = [matrix(seed=seed) for seed in range(5)]
    placements: list[Placement] = [OwnerShard(0), OwnerShard(1), Tail(world_size - 1), Shard(0), Replicate()]
    tensors = [distribute_tensor(t.clone(), mesh, [p]) for t, p in zip(full, placements, strict=True)]
    others = [distribute_tensor(t * 2, mesh, [p]) for t, p in zip(full, placements, strict=True)]

    def check(results: Any, expected: Any, places: list[Placement] = placements) -> None:
        for result, value, placement in zip(results, expected, places, strict=True):
            assert result.placements == (placement,)
            assert torch.equal(result.full_tensor(), value)

    check(silent(lambda: torch._foreach_add(tensors, others, alpha=2)), torch._foreach_add(full, full, alpha=4))
    check(
        silent(lambda: torch._foreach_sqrt(torch._foreach_abs(tensors))), torch._foreach_sqrt(torch._foreach_abs(full))
    )
    expected = [t.clone() for t in full]
    torch._foreach_mul_(expected, [1.0, 2.0, 3.0, 4.0, 5.0])
    torch._foreach_addcdiv_(expected, full, torch._foreach_add(torch._foreach_abs(full), 1), 0.1)
    silent(lambda: torch._foreach_mul_(tensors, [1.0, 2.0, 3.0, 4.0, 5.0]))
    same = [distribute_tensor(t, mesh, [p]) for t, p in zip(full, placements, strict=True)]
    silent(lambda: torch._foreach_addcdiv_(tensors, same, torch._foreach_add(torch._foreach_abs(same), 1), 0.1))
    check(tensors, expected)
    norms = torch._foreach_norm(tensors)
    for norm, value in zip(norms, torch._foreach_norm(expected), strict=True):
        torch.testing.assert_close(norm.full_tensor(), value)
    # an element whose gradient is elsewhere: it comes to the written tensor
    partials = [DTensor.from_local(t / world_size, mesh, [Partial()], run_check=False) for t in full[:3]]
    torch._foreach_add_(tensors[:3], partials)
    for tensor, value, gradient in zip(tensors, expected, full[:3], strict=False):
        torch.testing.assert_close(tensor.full_tensor(), value + gradient)


@on_ranks(2, 3)
def test_python_values_are_the_same_on_every_rank(mesh: DeviceMesh) -> None:
    a = matrix()
    x = owned(a, mesh)
    assert x.sum().item() == a.sum().item()
    assert owned(torch.tensor(2**60 + 1), mesh).item() == 2**60 + 1
    assert owned(torch.tensor(True), mesh).item() is True
    assert owned(torch.tensor(1 + 2j), mesh).item() == 1 + 2j
    assert bool((x == x).all())
    assert torch.equal(x, owned(a, mesh))
    assert not torch.equal(x, owned(a + 1, mesh))
    assert torch.allclose(x, owned(a, mesh))
    with CommCounter() as comm:
        float(x[0, 0])
    assert comm.collectives == 1


@on_ranks(2, 3)
def test_shapes_that_depend_on_values_are_made_known_by_one_collective(mesh: DeviceMesh) -> None:
    a = matrix().round()
    x = owned(a, mesh)
    for function in (
        torch.nonzero,
        torch.unique,
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.unique_consecutive(t, dim=0),
    ):
        with CommCounter() as comm:
            result = function(x)
        assert comm.collectives <= 1, comm
        assert comm.bytes <= 1024 * mesh.size()
        assert result.placements == (OwnerShard(1),)
        assert torch.equal(result.full_tensor(), function(a))


@on_ranks(2, 3)
def test_random_numbers_are_those_of_one_process(mesh: DeviceMesh, world_size: int) -> None:
    """Initialising owned weights gives what a single process gets, and leaves the generators of all ranks in step."""
    torch.manual_seed(5)
    expected = [nn.init.normal_(torch.empty(4, 3)) for _ in range(3)] + [nn.init.kaiming_uniform_(torch.empty(4, 3))]
    after = torch.rand(1)
    torch.manual_seed(5)
    weights = [owned(torch.empty(4, 3), mesh, OwnerShard(index % world_size)) for index in range(4)]
    for weight in weights[:3]:
        nn.init.normal_(weight)
    nn.init.kaiming_uniform_(weights[3])
    assert torch.equal(torch.rand(1), after)
    for weight, value in zip(weights, expected, strict=True):
        assert torch.equal(weight.full_tensor(), value)


@on_ranks(2, 3)
def test_draws_that_depend_on_values_leave_generators_in_step(mesh: DeviceMesh) -> None:
    a = matrix().abs() + 0.1
    cases: list[Callable[[Any], Any]] = [
        lambda t: torch.multinomial(t, 2),
        torch.poisson,
        lambda t: nn.functional.rrelu(t - 0.5, training=True),
        lambda t: nn.functional.dropout(t, 0.3),
        lambda t: torch.bernoulli(t.clamp(max=1)),
    ]
    for case in cases:
        torch.manual_seed(11)
        expected, after = case(a), torch.rand(3)
        torch.manual_seed(11)
        result = case(owned(a, mesh))
        assert torch.equal(torch.rand(3), after)
        assert torch.equal(result.full_tensor(), expected)


@on_ranks(2)
def test_parameters_modules_and_copies(mesh: DeviceMesh) -> None:
    a = matrix()
    parameter = nn.Parameter(owned(a, mesh))
    assert parameter.requires_grad
    assert isinstance(parameter, DTensor)
    duplicate = copy.deepcopy(parameter)
    assert isinstance(duplicate, nn.Parameter)
    duplicate.detach().zero_()
    assert torch.equal(parameter.full_tensor(), a)
    linear = nn.Linear(4, 6, bias=False)
    linear.weight = parameter
    inputs = distribute_tensor(matrix(3, 4, seed=3), mesh, [Replicate()])
    output = linear(inputs)
    assert output.placements == (OwnerShard(1),)
    torch.testing.assert_close(output.full_tensor(), matrix(3, 4, seed=3) @ a.T)
    state = linear.state_dict()
    assert state["weight"].placements == (OwnerShard(1),)
    linear.load_state_dict({"weight": owned(a * 2, mesh)})
    assert torch.equal(linear.weight.full_tensor(), a * 2)
    assert repr(owned(a, mesh).placements) == "(OwnerShard(owner=1),)"


@on_ranks(2, 3)
def test_gradients_are_owned(mesh: DeviceMesh) -> None:
    a, b = matrix(seed=1).requires_grad_(), matrix(seed=2).requires_grad_()
    x, y = owned(a, mesh).requires_grad_(), owned(b, mesh).requires_grad_()

    def loss(x: Any, y: Any) -> Any:
        return ((x @ y.mT).tanh() * (x @ x.mT)).sum()

    loss(a, b).backward()
    silent(lambda: loss(x, y).backward())
    for mine, reference in ((x, a), (y, b)):
        assert mine.grad is not None
        assert reference.grad is not None
        assert mine.grad.placements == (OwnerShard(1),)
        assert torch.equal(mine.grad.full_tensor(), reference.grad)
    x.grad = None
    (x.to_local() * 2).sum().backward()  # on ranks without data, too
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.full((6, 4), 2.0))


@on_ranks(2)
def test_from_local(mesh: DeviceMesh) -> None:
    a = matrix()
    local = a if dist.get_rank() == 1 else a[:0]
    x = DTensor.from_local(local, mesh, [OwnerShard(1)], run_check=False, shape=a.shape, stride=a.stride())
    assert torch.equal(x.full_tensor(), a)
    assert x.to_local().data_ptr() == local.data_ptr()
    with pytest.raises(ValueError, match="Pass shape= and stride= of the global tensor"):
        DTensor.from_local(local, mesh, [OwnerShard(1)], run_check=False)


# Other mesh dimensions #


@on_ranks(4)
def test_tensor_parallel_inside_an_owner() -> None:
    """(OwnerShard, Shard): on the owner's coordinate DTensor's own collectives, in the TP group alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    a, b = matrix(8, 4, seed=1), matrix(8, 4, seed=2)
    for inner in (Shard(0), Shard(1)):
        x = owned(a, mesh, OwnerShard(1), inner)
        y = owned(b, mesh, OwnerShard(1), inner)
        with CommCounter() as comm:
            results = [x + y, x.mul(2), x @ y.mT, x.mT @ y, x.norm(), x.sum(dim=0)]
        if mesh.get_coordinate()[0] != 1:  # type: ignore[index]
            assert comm.collectives == 0
            assert all(result.to_local().shape[:1] == (0,) for result in results)
        expected = [a + b, a * 2, a @ b.mT, a.mT @ b, a.norm(), a.sum(dim=0)]
        for result, value in zip(results, expected, strict=True):
            assert result.placements[0] == OwnerShard(1)
            torch.testing.assert_close(result.full_tensor(), value)
        x.add_(distribute_tensor(b, mesh, [Replicate(), Replicate()]))
        torch.testing.assert_close(x.full_tensor(), a + b)
        torch._foreach_mul_([x, y], 2.0)
        torch.testing.assert_close(x.full_tensor(), (a + b) * 2)
        assert x.max().full_tensor().item() == ((a + b) * 2).max().item()


@on_ranks(4)
def test_replicas_and_two_owner_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    a = matrix(6, 4, seed=1)
    for placements in ([Replicate(), OwnerShard(1)], [OwnerShard(1), OwnerShard(0)], [Tail(0), Replicate()]):
        x = owned(a, mesh, *placements)
        result = silent(lambda x=x: (x @ x.mT).add_(1))
        assert result.placements == tuple(placements)
        assert torch.equal(result.full_tensor(), (a @ a.mT).add_(1))
        assert x.sum().item() == a.sum().item()
        assert torch.equal(torch.nonzero(x > 0).full_tensor(), torch.nonzero(a > 0))


@on_ranks(8)
def test_replicas_owners_and_tensor_parallelism_together() -> None:
    """(Replicate, OwnerShard, Shard(0)): both replicas of the owner's TP group work, nobody else."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    a, b = matrix(8, 4, seed=1), matrix(8, 4, seed=2)
    x = owned(a, mesh, Replicate(), OwnerShard(1), Shard(0))
    y = owned(b, mesh, Replicate(), OwnerShard(1), Shard(0))
    with CommCounter() as comm:
        product, total = x @ y.mT, (x * y).sum()
        x.add_(y, alpha=2)
        torch._foreach_mul_([x, y], 0.5)
    if mesh.get_coordinate()[1] != 1:  # type: ignore[index]
        assert comm.collectives == 0, comm
        assert x.to_local().shape == (0, 4)
    torch.testing.assert_close(product.full_tensor(), a @ b.mT)
    torch.testing.assert_close(total.full_tensor(), (a * b).sum())
    torch.testing.assert_close(x.full_tensor(), (a + 2 * b) / 2)
    assert abs(x.max().item() - ((a + 2 * b) / 2).max().item()) < 1e-6
    slice_of_it = mesh["shard"]
    z = owned(a, slice_of_it, OwnerShard(0))
    assert torch.equal(silent(lambda: z @ z.mT).full_tensor(), a @ a.mT)
    assert z.sum().item() == a.sum().item()


@on_ranks(4)
def test_meshes_of_some_ranks_in_any_order() -> None:
    a = matrix()
    for ranks in ([1, 3], [3, 1], [2, 0, 1]):
        mesh = DeviceMesh("cpu", ranks)
        for owner in (0, len(ranks) - 1):
            x = owned(a, mesh, OwnerShard(owner))
            product = silent(lambda x=x: (x @ x.mT).mul_(2))
            if dist.get_rank() not in ranks:
                continue
            assert product.placements == (OwnerShard(owner),)
            assert product.to_local().numel() == (36 if dist.get_rank() == ranks[owner] else 0)
            assert torch.equal(product.full_tensor(), (a @ a.mT).mul_(2))
            assert x.sum().item() == a.sum().item()
            assert torch.equal(torch.nonzero(x > 0).full_tensor(), torch.nonzero(a > 0))
            norms = torch.stack([x.norm(), owned(a, mesh, OwnerShard(1)).norm()])
            assert torch.equal(norms.full_tensor(), torch.stack([a.norm(), a.norm()]))


@on_ranks(2)
def test_numbers_and_plain_0d_tensors_promote_as_on_plain_tensors(mesh: DeviceMesh) -> None:
    # The dispatcher's key takes 2.5 and torch.tensor(2.5, dtype=torch.float64) for the same.
    others = [2, 2.5, True, 2 + 1j]
    others += [torch.tensor(2.5, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    others += [torch.tensor(2), torch.tensor(2, dtype=torch.int32), torch.tensor(2 + 1j, dtype=torch.complex128)]
    bases = [torch.tensor(3), torch.tensor(1.5), torch.tensor(1.5, dtype=torch.bfloat16)]
    bases += [base.expand(2, 2).contiguous() for base in bases]
    for name in ("add", "mul", "true_divide", "maximum"):
        op = getattr(torch, name)
        for base in bases:
            tensor = owned(base, mesh)
            for other in [*others, *reversed(others)]:
                if name == "maximum" and (not isinstance(other, Tensor) or other.is_complex()):
                    continue  # torch has none
                expected = op(base, other)
                result = silent(lambda op=op, tensor=tensor, other=other: op(tensor, other))
                about = f"{name} of {base.dtype} {tuple(base.shape)} and {other!r}"
                assert result.dtype == result.to_local().dtype == expected.dtype, about
                torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=0, msg=about)
