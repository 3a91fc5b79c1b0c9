"""What cannot be saved or loaded: one clear error on every rank, and nothing is lost or changed by it."""

import json
import re
import resource
import shutil
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.device_mesh import DeviceMesh

import mfsdp
from mfsdp.checkpoint import CheckpointError, latest, load, save
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.fsdp.objects import all_gather_object
from test_multiprocess.checkpoint_cases import Trained, assert_holds, in_layout, sharded, train, whole_state
from test_multiprocess.fsdp_cases import TinyLM
from test_multiprocess.world import on_ranks


def trained(mesh: DeviceMesh, kind: str = "muon", seed: int = 1) -> Trained:
    model, optimizers = in_layout("mfsdp", mesh, kind, seed)
    train(model, optimizers, [0])
    return model, optimizers


def refusal(call: Callable[[], Any], *, shown: str | None = None, folder: Path | None = None) -> str:
    """The text of the CheckpointError that ``call`` raises on every rank alike; ``folder`` stands as DIR in it."""
    with pytest.raises(CheckpointError) as refused:
        call()
    text = str(refused.value)
    assert set(all_gather_object(text)) == {text}
    if shown is not None:
        assert re.search(shown, text), text
    return text.replace(str(folder), "DIR")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint and not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root; test_a_rank_that_cannot_write covers the rest")
    yield folder
    subprocess.run(["umount", folder], check=True)


@on_ranks(2)
def test_a_full_disk_loses_nothing(mesh: DeviceMesh, small_disk: Path) -> None:
    model, optimizers = trained(mesh)
    first = save(small_disk / "step-1", model, optimizers)
    saved = whole_state(model, optimizers)
    train(model, optimizers, [1])
    for _ in range(2):
        refusal(lambda: save(small_disk / "step-2", model, optimizers), shown="No space left on device")
        assert [each.name for each in small_disk.iterdir()] == ["step-1"]
    # the very name of the last good one
    refusal(lambda: save(small_disk / "step-1", model, optimizers), shown="No space left on device")
    assert latest(small_disk) == first
    load(first, model, optimizers)
    assert_holds(model, optimizers, saved, "after a full disk")


@on_ranks(2)
def test_a_read_only_disk(mesh: DeviceMesh, small_disk: Path) -> None:
    model, optimizers = trained(mesh)
    path = save(small_disk / "step-1", model, optimizers)
    if dist.get_rank() == 0:
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    dist.barrier()
    text = refusal(lambda: save(small_disk / "step-2", model, optimizers), shown="Read-only file system")
    assert text.startswith(f"saving to {small_disk / 'step-2'} failed on rank 0: [Errno 30]")
    load(path, model, optimizers)


@on_ranks(3)
def test_a_rank_that_cannot_write(mesh: DeviceMesh, tmp_path: Path) -> None:
    """It alone reaches a limit, in the middle of its file; the last good checkpoint stays."""
    model, optimizers = trained(mesh)
    first = save(tmp_path / "step-1", model, optimizers)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, unlimited[1]))
    try:
        text = refusal(lambda: save(tmp_path / "step-2", model, optimizers, keep=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert text == f"saving to {tmp_path / 'step-2'} failed on rank 1: [Errno 27] File too large"
    assert list(tmp_path.iterdir()) == [first]
    save(tmp_path / "step-2", model, optimizers, keep=1)
    assert [each.name for each in tmp_path.iterdir()] == ["step-2"]


@on_ranks(2)
def test_paths_that_cannot_be(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = trained(mesh)[0]
    if dist.get_rank() == 0:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "one.jpeg").write_text("dear")
    dist.barrier()
    refusal(lambda: save(tmp_path / "file" / "step-1", model), shown="Not a directory")
    refusal(lambda: save(tmp_path / "file", model), shown="is a file")
    refusal(lambda: save(tmp_path / "photos", model), shown=r"holds what no checkpoint does: one\.jpeg")
    refusal(lambda: load(tmp_path / "nowhere", model), shown="there is no checkpoint")
    refusal(lambda: load(tmp_path / "photos", model), shown="is no checkpoint of torch.distributed.checkpoint")
    assert (tmp_path / "photos" / "one.jpeg").read_text() == "dear"
    with pytest.raises(ValueError, match="keep must be at least 1"):
        save(tmp_path / "step-1", model, keep=0)
    assert not (tmp_path / "step-1").exists()


class Other(TinyLM):
    """Has a layer less than the small model, another width in places, and something more."""

    def __init__(self) -> None:
        super().__init__(width=6, depth=1)
        self.layers[0].down = nn.Linear(18, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))


@on_ranks(2)
def test_the_checkpoint_of_another_model(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = trained(mesh)
    path = save(tmp_path / "step-1", model, optimizers)
    other = sharded(Other(), mesh)
    its_optimizers = [mfsdp.optim.build_optimizer(other)]
    before = whole_state(other, its_optimizers)
    assert_expected_inline(
        refusal(lambda: load(path, other), folder=tmp_path),
        """\
the checkpoint DIR/step-1 is not one of this model and optimizer; nothing was loaded:
  scale: missing in the checkpoint
  layers.1.norm.weight: only in the checkpoint
  layers.1.norm.bias: only in the checkpoint
  layers.1.up.weight: only in the checkpoint
  layers.1.up.bias: only in the checkpoint
  layers.1.down.weight: only in the checkpoint
  layers.1.down.bias: only in the checkpoint
  layers.0.down.weight: its shape is (6, 18) in the checkpoint and (5, 18) here
  layers.0.down.bias: its shape is (6,) in the checkpoint and (5,) here""",
    )
    text = refusal(lambda: load(path, other, its_optimizers))
    for line in (
        "scale: missing in the checkpoint",
        "scale (in the optimizer): missing in the checkpoint",
        "layers.1.up.weight (in the optimizer): only in the checkpoint",
        "layers.0.down.weight.momentum_buffer: its shape is (6, 18) in the checkpoint and (5, 18) here",
        "layers.0.down.bias.exp_avg: its shape is (6,) in the checkpoint and (5,) here",
    ):
        assert f"\n  {line}" in text, text
    assert_holds(other, its_optimizers, before, "after refusals")


@pytest.mark.parametrize("saving", ["muon", "soap"])
@on_ranks(2)
def test_the_state_of_another_optimizer(mesh: DeviceMesh, tmp_path: Path, saving: str) -> None:
    model, optimizers = trained(mesh, saving)
    path = save(tmp_path / "step-1", model, optimizers)
    for loading in ("muon", "shampoo", "soap", "adamw"):
        if loading == saving:
            continue
        if loading == "adamw":
            other = in_layout("mfsdp", mesh, "muon", seed=2)[0]
            theirs: list[Any] = [torch.optim.AdamW(other.parameters())]
        else:
            other, theirs = in_layout("mfsdp", mesh, loading, seed=2)
        before = whole_state(other, theirs)
        expected = "root" if (saving, loading) == ("soap", "shampoo") else "saved by another optimizer than"
        refusal(lambda other=other, theirs=theirs: load(path, other, theirs), shown=expected)
        assert_holds(other, theirs, before, loading)


@on_ranks(2)
def test_options_that_change_the_state_are_taken_over(mesh: DeviceMesh, tmp_path: Path) -> None:
    """NorMuon's second moment, of a run that was started without it."""
    model, optimizers = trained(mesh, "normuon")
    path = save(tmp_path / "step-1", model, optimizers)
    other, theirs = in_layout("mfsdp", mesh, "muon", seed=2)
    load(path, other, theirs)
    assert theirs[0].param_groups[0]["second_moment"] == 0.95
    assert_holds(other, theirs, whole_state(model, optimizers), "normuon")


@on_ranks(2)
def test_what_users_put_into_groups_is_no_sign_of_another_class(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Nor is it loaded, unless a scheduler put it there."""
    model, optimizers = in_layout("fsdp2", mesh, "muon", seed=1)
    optimizers[0].param_groups[0].update(label="matrices", label_lr=0.1, max_lr=0.5)
    train(model, optimizers, [0])
    path = save(tmp_path / "step-1", model, optimizers)
    other, theirs = in_layout("mfsdp", mesh, "muon", seed=2)
    load(path, other, theirs)
    assert_holds(other, theirs, whole_state(model, optimizers), "labelled")
    group = theirs[0].param_groups[0]
    assert group["max_lr"] == 0.5
    assert not {"label", "label_lr"} & group.keys()
    # the state of SGD has Muon's names and shapes
    sgd = torch.optim.SGD(model.parameters(), momentum=0.9)
    train(model, [sgd], [1])
    path = save(tmp_path / "step-2", model, sgd)
    refusal(lambda: load(path, other, theirs), shown="another optimizer than Muon: its options have dampening")


@on_ranks(2)
def test_a_newer_format(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = trained(mesh)
    path = save(tmp_path / "step-1", model, optimizers)
    if dist.get_rank() == 0:
        manifest = json.loads((path / "manifest.json").read_text())
        text = json.dumps(manifest | {"version": 99, "checksum": "00000000"}, indent=1).encode()
        (path / "manifest.json").write_bytes(text.replace(b"00000000", b"%08x" % zlib.crc32(text), 1))
    dist.barrier()
    refusal(lambda: load(path, model, optimizers), shown="version 99; this mfsdp reads .* up to version 1")


@on_ranks(2)
def test_what_cannot_be_saved_or_loaded(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = trained(mesh)
    weight = model.layers[0].up.weight  # type: ignore[union-attr, index]
    refusal(lambda: save(tmp_path / "a", model, extra={"best": [weight]}), shown="extra holds a DTensor")
    others = in_layout("mfsdp", mesh, "muon", seed=2)[1]
    refusal(lambda: save(tmp_path / "a", model, others), shown="a parameter of shape .* that the model has not")
    refusal(lambda: save(tmp_path / "a", model, extra=lambda: None), shown="on rank 0: .*[Pp]ickl")
    assert not list(tmp_path.iterdir())
    path = save(tmp_path / "model", model)
    refusal(lambda: load(path, model, optimizers), shown="no state of an optimizer; load the model alone")
    with torch.device("meta"):
        empty = sharded(TinyLM(width=6, depth=2), mesh)
    refusal(lambda: load(path, empty), shown=r"embedding\.weight: on the meta device here; call model\.to_empty")
    empty.to_empty(device="cpu")
    load(path, empty)
    assert_holds(empty, [], whole_state(model, []), "materialised")


@on_ranks(1)
def test_states_by_number(mesh: DeviceMesh, tmp_path: Path) -> None:
    """Numbers are told by the names in the groups, where there are any."""
    model, optimizers = in_layout("single", mesh, "muon", seed=1)
    train(model, optimizers, [0])
    for named in (True, False):
        state = optimizers[0].state_dict()
        if not named:
            for group in state["param_groups"]:
                del group["param_names"]
        torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "file.pt")
        torch_save_to_dcp(tmp_path / "file.pt", tmp_path / "dcp")
        other, theirs = in_layout("mfsdp", mesh, "muon", seed=2)
        if named:
            load(tmp_path / "dcp", other, theirs)
            assert_holds(other, theirs, whole_state(model, optimizers), "by number")
        else:
            refusal(lambda other=other, theirs=theirs: load(tmp_path / "dcp", other, theirs), shown="by numbers")
        shutil.rmtree(tmp_path / "dcp")


@on_ranks(2)
def test_ranks_load_one_checkpoint(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=0)
    paths = [mfsdp.checkpoint.save(tmp_path / f"step-{step}", model, optimizers) for step in (1, 2)]
    for order in (paths, paths[::-1]):
        mine = order[dist.get_rank()]
        assert refusal(lambda mine=mine: mfsdp.checkpoint.load(mine, model, optimizers)) == (
            f"the ranks were to load different checkpoints: rank 0 that in {order[0]}, rank 1 another, in {order[1]}. "
            f"Let one rank choose, as by latest(), and give all ranks its path."
        )
    mfsdp.checkpoint.load(paths[1], model, optimizers)


@on_ranks(3)
def test_ranks_fail_together(mesh: DeviceMesh) -> None:
    ranks = Ranks()

    def fail(on: set[int], error: BaseException) -> Callable[[], int]:
        def work() -> int:
            if ranks.rank in on:
                raise error
            return ranks.rank

        return work

    assert ranks.together("counting", fail(set(), OSError())) == [0, 1, 2]
    assert ranks.on_first("counting", lambda: ranks.rank) == 0
    for on, error, text in [
        ({1}, ValueError("no"), "counting failed on rank 1: ValueError: no"),
        ({0, 2}, OSError(5, "bad"), "counting failed on rank 0, 2: [Errno 5] bad"),
        ({0, 1, 2}, OSError(5, "bad"), "counting failed: [Errno 5] bad"),
        ({2}, CheckpointError("all is said."), "all is said."),
        (
            {0, 1},
            OSError(ranks.rank, "bad"),
            "counting failed:\n  on rank 0: [Errno 0] bad\n  on rank 1: [Errno 1] bad",
        ),
    ]:
        assert refusal(lambda on=on, error=error: ranks.together("counting", fail(on, error))) == text
    # whoever is told to stop, stops; the others hear of it
    with pytest.raises(KeyboardInterrupt if ranks.rank == 1 else CheckpointError):
        ranks.together("counting", fail({1}, KeyboardInterrupt()))
