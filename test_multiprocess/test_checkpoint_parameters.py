"""Parameters of every sort in one model: each is written once, by its owner, and comes back as it was."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp import ShardPlan
from mfsdp.checkpoint import Manifest
from mfsdp.fsdp import plan_of
from test_multiprocess.checkpoint_cases import assert_holds, assert_written_once, moved, train, whole_state
from test_multiprocess.fsdp_cases import VOCABULARY
from test_multiprocess.world import on_ranks


class Odd(nn.Module):
    """Tied, frozen, never used, without dimensions, without elements, in bf16; and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.narrow = nn.Linear(6, 6, dtype=torch.bfloat16)
        self.unused = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(6, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.frozen(self.embedding(tokens))
        x = x + self.narrow(x.bfloat16()).float() + self.nothing.sum()
        return self.head(x * self.temperature)


def odd(mesh: DeviceMesh, seed: int, owner: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """An ``Odd`` in two units, all of whose owned parameters ``owner`` owns."""
    torch.manual_seed(seed)
    model = Odd()
    plan = moved(mfsdp.plan(model, mesh), model, lambda old: old if owner is None else owner)
    mfsdp.fully_shard(model.unused, mesh=mesh, plan=plan)
    mfsdp.fully_shard(model, mesh=mesh, plan=plan)
    return model, mfsdp.optim.build_optimizer(model, "soap", groups={"*.bias": {"weight_decay": 0.0}})


@on_ranks(2, 3)
def test_all_sorts_of_parameters(mesh: DeviceMesh, tmp_path: Path) -> None:
    last = mesh.size() - 1
    model, optimizer = odd(mesh, seed=1, owner=last)
    train(model, [optimizer], range(2))
    path = mfsdp.checkpoint.save(tmp_path / "step-2", model, optimizer)
    saved = whole_state(model, [optimizer])
    for owner in (0, last):
        other, its_optimizer = odd(mesh, seed=2, owner=owner)
        assert mfsdp.checkpoint.load(path, other, its_optimizer) is None
        assert_holds(other, [its_optimizer], saved, f"owner {owner}")
        assert torch.equal(other.seen, torch.full((3,), 2))
        # what has never had a gradient has no state, before and after
        assert not its_optimizer.state.get(other.unused.weight)
        assert not its_optimizer.state.get(other.frozen.weight)
        state = its_optimizer.state[other.narrow.weight]
        assert (state["exp_avg"].dtype, state["row_factor_0"].dtype) == (torch.bfloat16, torch.float32)
        train(other, [its_optimizer], [2])


@on_ranks(2, 3)
def test_each_byte_is_written_once_and_by_its_owner(mesh: DeviceMesh, tmp_path: Path) -> None:
    last = mesh.size() - 1
    model, optimizer = odd(mesh, seed=1, owner=last)
    train(model, [optimizer], range(2))
    path = mfsdp.checkpoint.save(tmp_path / "step-2", model, optimizer)
    metadata = FileSystemReader(path).read_metadata()
    places = {(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()}
    tied = ("model.embedding.weight", "model.head.weight")
    # one place for each, but that two names of a tied tensor lead to the same places
    assert len(places) == len(metadata.storage_data) - mesh.size()
    assert metadata.state_dict_metadata[tied[0]] == metadata.state_dict_metadata[tied[1]]
    assert_written_once(path)
    files = Manifest.read(path).files
    assert ShardPlan.from_json((path / "plan.json").read_text()).hash() == plan_of(model).hash()
    names = {file: record.names for file, record in files.items()}
    owned = {f"model.{name}" for name, param in model.named_parameters() if name != "embedding.weight"}
    assert owned <= set(names[f"__{last}_0.distcp"])
    for rank in range(last):
        # its rows, its generator's state, and a share of what every rank has
        written = {name for name in names[f"__{rank}_0.distcp"] if name.startswith(("model.", "optimizer.state."))}
        assert not owned & written
        for name in written - set(tied) - {"model.seen"}:
            assert name.startswith("optimizer.state.embedding.weight.") or name.endswith(".step"), name


@on_ranks(3)
def test_ranks_that_own_nothing_make_no_difference(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Fewer matrices than ranks, and nothing that is sharded by rows."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4, bias=False)
        mfsdp.fully_shard(model, mesh=mesh)
        return model, mfsdp.optim.build_optimizer(model)

    model, optimizer = made(1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = mfsdp.checkpoint.save(tmp_path / "one", model, optimizer)
    other, its_optimizer = made(2)
    mfsdp.checkpoint.load(path, other, its_optimizer)
    assert_holds(other, [its_optimizer], whole_state(model, [optimizer]), "one matrix")


def continued(mesh: DeviceMesh, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of steps with dropout, on batches that the generator draws."""
    losses = []
    for _ in steps:
        tokens = torch.randint(VOCABULARY, (4, 6))
        logits = nn.functional.dropout(model(tokens), 0.1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("matrix", ["muon", "shampoo", "soap"])
@on_ranks(2)
def test_a_resumed_run_is_the_uninterrupted_one(mesh: DeviceMesh, tmp_path: Path, matrix: str) -> None:
    """To the bit, drawn batches and dropout included: each rank's generator goes on where it was."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(seed)
        model = Odd()
        mfsdp.fully_shard(model, mesh=mesh, plan=mfsdp.plan(model, mesh))
        optimizer = mfsdp.optim.build_optimizer(model, matrix)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    model, optimizer, scheduler = made(1)
    torch.manual_seed(10 + dist.get_rank())
    continued(mesh, model, optimizer, range(3))
    scheduler.step()
    extra = {"step": 3, "scheduler": scheduler.state_dict()}
    path = mfsdp.checkpoint.save(tmp_path / "step-3", model, optimizer, extra=extra)
    losses = continued(mesh, model, optimizer, range(3))
    saved = whole_state(model, [optimizer])

    other, its_optimizer, its_scheduler = made(2)
    found = mfsdp.checkpoint.load(path, other, its_optimizer)
    assert found == extra
    its_scheduler.load_state_dict(found["scheduler"])
    assert continued(mesh, other, its_optimizer, range(3)) == losses
    assert_holds(other, [its_optimizer], saved, matrix)
    assert its_scheduler.get_last_lr() == scheduler.get_last_lr()
    mfsdp.checkpoint.load(path, other, its_optimizer, rng=False)
    assert continued(mesh, other, its_optimizer, range(1)) != losses[:1]
