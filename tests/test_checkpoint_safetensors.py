"""``.safetensors`` files in one process: their layout, against the package, and which pieces of a tensor go where."""

import json
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from safetensors.torch import load_file, save_file
from torch import nn

from mfsdp.checkpoint import checkpoint_to_safetensors, load_safetensors, save, save_safetensors
from mfsdp.checkpoint.errors import CheckpointError, DamagedCheckpointError
from mfsdp.checkpoint.safetensors_export import _runs
from mfsdp.checkpoint.safetensors_layout import DTYPES, INDEX, Layout, TensorEntry


class Odd(nn.Module):
    """What is rare in a state dict: tied, 0-d, empty, and buffers of other dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 4)
        self.low = nn.Linear(4, 3, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.rand(3, 3) > 0.5)
        self.register_buffer("seen", torch.tensor(12))


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    model = Odd()
    folder = save_safetensors(tmp_path / "export", model)
    assert sorted(path.name for path in folder.iterdir()) == ["model.safetensors", INDEX]
    found, expected = load_file(folder / "model.safetensors"), model.state_dict()
    assert found.keys() == expected.keys() - {"head.weight"}
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name


def test_layout_is_that_of_the_format(tmp_path: Path) -> None:
    entries = [
        TensorEntry("b", torch.bfloat16, (2, 3)),
        TensorEntry("naïve", torch.int64, ()),
        TensorEntry("e", torch.float32, (0, 9)),
        TensorEntry("large", torch.float32, (5, 5)),
        TensorEntry("last", torch.bool, (3,)),
    ]
    layout = Layout.of(entries, {"tied": "b"}, max_file_bytes=30)
    assert_expected_inline(
        "\n".join(f"{file.name} {file.size}: {file.header[8:].decode().rstrip()}" for file in layout.files),
        """\
model-00001-of-00003.safetensors 244: {"__metadata__":{"format":"pt","tied":"b"},"naïve":{"dtype":"I64","shape":[],"data_offsets":[0,8]},"e":{"dtype":"F32","shape":[0,9],"data_offsets":[8,8]},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]}}
model-00002-of-00003.safetensors 204: {"__metadata__":{"format":"pt"},"large":{"dtype":"F32","shape":[5,5],"data_offsets":[0,100]}}
model-00003-of-00003.safetensors 107: {"__metadata__":{"format":"pt"},"last":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]}}""",
    )
    assert json.loads(layout.index()) == {
        "metadata": {"total_size": 123},
        "weight_map": {
            **dict.fromkeys(["b", "naïve", "e"], "model-00001-of-00003.safetensors"),
            "large": "model-00002-of-00003.safetensors",
            "last": "model-00003-of-00003.safetensors",
        },
    }
    for file in layout.files:
        assert len(file.header) % 8 == 0
        (tmp_path / file.name).write_bytes(file.header.ljust(file.size, b"\0"))
        read = load_file(tmp_path / file.name)
        assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in read.items()} == {
            entry.name: (entry.dtype, entry.shape) for entry in file.entries
        }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_both_ways(tmp_path: Path, dtype: torch.dtype) -> None:
    def model() -> nn.Module:
        module = nn.Module()
        module.register_buffer("values", torch.zeros(3, 5, dtype=dtype))
        return module

    saved, loaded = model(), model()
    saved.values.view(torch.uint8).copy_(torch.randint(2, (3, 5 * dtype.itemsize), dtype=torch.uint8))
    folder = save_safetensors(tmp_path / "export", saved)
    read = load_file(folder / "model.safetensors")["values"]
    assert read.dtype == dtype
    assert torch.equal(read.view(torch.uint8), saved.values.view(torch.uint8))
    load_safetensors(folder, loaded)
    assert torch.equal(loaded.values.view(torch.uint8), saved.values.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (3, 4, 2), (2, 0, 3)])
def test_pieces_go_where_they_belong(shape: tuple[int, ...]) -> None:
    whole = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].view(shape)
    ranges = [[(start, stop) for start in range(size) for stop in range(start, size + 1)] for size in shape]
    for bounds in product(*ranges):
        piece = whole[tuple(slice(*each) for each in bounds)].contiguous()
        runs = list(_runs(shape, tuple(start for start, _ in bounds), tuple(piece.shape)))
        copied = [(there + n, piece.flatten()[here + n].item()) for there, here, count in runs for n in range(count)]
        assert copied == [(value, value) for value in piece.flatten().tolist()]
    assert len(list(_runs((6, 4), (2, 0), (3, 4)))) == 1  # rows
    assert len(list(_runs((6, 4), (2, 1), (3, 2)))) == 3


@pytest.mark.parametrize("max_file_bytes", [1, 60, 10**9])
def test_comes_back_from_one_file_or_several(tmp_path: Path, max_file_bytes: int) -> None:
    saved, loaded = Odd(), Odd(seed=1)
    folder = save_safetensors(tmp_path / "export", saved, max_file_bytes=max_file_bytes)
    files = len(list(folder.glob("*.safetensors")))
    assert files == {1: 7, 60: 3, 10**9: 1}[max_file_bytes]
    load_safetensors(folder, loaded)
    assert loaded.head.weight is loaded.embedding.weight
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved.state_dict()[name]), name


@pytest.mark.parametrize("saved_by", ["mfsdp", "dcp"])
def test_exports_a_saved_checkpoint(tmp_path: Path, saved_by: str) -> None:
    model = Odd()
    if saved_by == "mfsdp":
        save(tmp_path / "step-1", model, torch.optim.AdamW(model.parameters()))
        folder = checkpoint_to_safetensors(tmp_path / "step-1", tmp_path / "export", max_file_bytes=60)
    else:
        dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path / "step-1", no_dist=True)
        with pytest.raises(CheckpointError, match="has nothing under 'model'; pass prefix="):
            checkpoint_to_safetensors(tmp_path / "step-1", tmp_path / "export")
        folder = checkpoint_to_safetensors(tmp_path / "step-1", tmp_path / "export", prefix="net", max_file_bytes=60)
    other = save_safetensors(tmp_path / "live", model, max_file_bytes=60)
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    expected = model.state_dict()
    if saved_by == "mfsdp":  # dcp does not know what is tied
        del expected["head.weight"]
        for file in other.iterdir():
            assert (folder / file.name).read_bytes() == file.read_bytes()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    save(tmp_path / "step-1", Odd())
    (tmp_path / "step-1" / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"__0_0\.distcp is missing"):
        checkpoint_to_safetensors(tmp_path / "step-1", tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_loads_what_others_have_written(tmp_path: Path) -> None:
    saved, loaded = Odd(), Odd(seed=1)
    state = {f"transformer.{name}": tensor for name, tensor in saved.state_dict().items() if name != "embedding.weight"}
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "weights.safetensors")
    for path in (tmp_path, tmp_path / "weights.safetensors"):  # no index, no metadata
        load_safetensors(path, loaded)
        assert all(torch.equal(loaded.state_dict()[name], saved.state_dict()[name]) for name in saved.state_dict())
        loaded = Odd(seed=1)
    # into another dtype
    load_safetensors(tmp_path, loaded.double())
    assert loaded.low.weight.dtype == torch.float64
    assert torch.equal(loaded.low.weight, saved.low.weight.double())


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    saved, loaded = Odd(), Odd(seed=1)
    saved.scale = nn.Parameter(torch.zeros(2))
    saved.more = nn.Linear(2, 2, bias=False)
    del saved.mask
    folder = save_safetensors(tmp_path / "export", saved)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_safetensors(folder, loaded)
    assert_expected_inline(
        str(raised.value).replace(str(tmp_path), ""),
        """\
the checkpoint /export is not one of this model and optimizer; nothing was loaded:
  mask: missing in the checkpoint
  more.weight: only in the checkpoint
  scale: its shape is (2,) in the checkpoint and () here""",
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder = save_safetensors(tmp_path / "export", Odd(), max_file_bytes=60)
    second = folder / "model-00002-of-00003.safetensors"
    whole = second.read_bytes()
    for damage in (b"", whole[:5], whole[:-1], whole[:20], b"\xff" * 16, whole + b"x"):
        second.write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors"):
            load_safetensors(folder, Odd())
    second.unlink()
    with pytest.raises(CheckpointError, match=r"No such file.*model-00002-of-00003\.safetensors"):
        load_safetensors(folder, Odd())
    save_file({"other": torch.zeros(1)}, second)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors lacks what .* says is in it: "):
        load_safetensors(folder, Odd())
    (folder / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged: it is no JSON object with a weight_map"):
        load_safetensors(folder, Odd())
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="it has 3 such files and no model"):
        load_safetensors(folder, Odd())


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    class WithMore(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"step": 1}

    with pytest.raises(CheckpointError, match=r"hold tensors only, and these entries are none: _extra_state\."):
        save_safetensors(tmp_path / "export", WithMore())
    module = nn.Module()
    module.register_buffer("spectrum", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"cannot hold the dtypes of spectrum \(torch\.complex128\)"):
        save_safetensors(tmp_path / "export", module)
    with pytest.raises(CheckpointError, match="there is no tensor to write"):
        save_safetensors(tmp_path / "export", nn.ReLU())
    with pytest.raises(ValueError, match="max_file_bytes must be at least 1, but is 0"):
        save_safetensors(tmp_path / "export", Odd(), max_file_bytes=0)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").touch()
    for taken in (tmp_path, tmp_path / "mine"):
        with pytest.raises(CheckpointError, match="exists, and is no empty folder"):
            save_safetensors(taken, Odd())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_without_the_package_only_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    folder = save_safetensors(tmp_path / "export", Odd())
    with pytest.raises(CheckpointError, match=r"needs the package safetensors: install mfsdp\[safetensors\]"):
        load_safetensors(folder, Odd())
