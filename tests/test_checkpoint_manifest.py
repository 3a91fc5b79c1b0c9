"""The manifest: it knows every byte of a checkpoint and what lies where."""

import importlib.util
import itertools
import json
import pickle
import sys
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from expecttest import assert_expected_inline
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from mfsdp.checkpoint import checksums
from mfsdp.checkpoint.checksums import ChecksumStream, FileSum, checksum_of_block, checksum_of_file
from mfsdp.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError
from mfsdp.checkpoint.manifest import MANIFEST, FileRecord, Manifest, names_by_file


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    for module in ("checksums", "manifest"):
        monkeypatch.setattr(f"mfsdp.checkpoint.{module}.BLOCK", 1000)
    monkeypatch.setattr(checksums, "_PIECE", 300)
    return 1000


@pytest.fixture
def saved(tmp_path: Path, small_blocks: int) -> tuple[Path, Manifest]:
    """Three files of 2,500, 0 and 1,000 bytes, and their manifest."""
    contents = {"__0_0.distcp": bytes(range(250)) * 10, "__1_0.distcp": b"", "plan.json": b"x" * 1000}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    names = {"__0_0.distcp": ("model.bias", "model.weight")}
    records = {name: FileRecord(checksum_of_file(tmp_path / name), names.get(name, ())) for name in contents}
    manifest = Manifest(records, saved_at=12.5)
    manifest.write(tmp_path)
    return tmp_path, manifest


def test_checksums_are_crc32_of_blocks(tmp_path: Path, small_blocks: int) -> None:
    data = torch.randint(256, (3700,), dtype=torch.uint8).numpy().tobytes()
    expected = FileSum(3700, tuple(zlib.crc32(data[start : start + 1000]) for start in range(0, 3700, 1000)))
    with (tmp_path / "file").open("wb") as file:
        stream = ChecksumStream(file)
        for start in range(0, 3700, 777):
            assert stream.write(memoryview(data)[start : start + 777]) == len(data[start : start + 777])
            assert stream.tell() == min(start + 777, 3700)
    assert stream.sum() == expected
    assert (tmp_path / "file").read_bytes() == data
    assert checksum_of_file(tmp_path / "file") == expected
    assert tuple(checksum_of_block(tmp_path / "file", block) for block in range(4)) == expected.checksums
    assert checksum_of_block(tmp_path / "file", 4) == 0


def test_checksums_are_the_same_without_zlib_ng(saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    assert checksums.crc32 is not zlib.crc32, "the tests are to run with zlib-ng: pip install -e .[test]"
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)  # as if it were not installed
    spec = importlib.util.spec_from_file_location("without_zlib_ng", checksums.__file__)
    assert spec is not None
    assert spec.loader is not None
    other = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_zlib_ng", other)
    spec.loader.exec_module(other)
    assert other.crc32 is zlib.crc32
    monkeypatch.setattr(other, "BLOCK", 1000)
    folder, manifest = saved
    for name, record in manifest.files.items():
        found = other.checksum_of_file(folder / name)
        assert (found.size, found.checksums) == (record.sum.size, record.sum.checksums)


def test_a_sum_fits_its_size() -> None:
    with pytest.raises(ValueError, match="has 2 blocks of 33554432 bytes, not 1"):
        FileSum(checksums.BLOCK + 1, (0,))
    with pytest.raises(ValueError, match="32 bits"):
        FileSum(1, (1 << 32,))


def test_reads_what_was_written(saved: tuple[Path, Manifest]) -> None:
    folder, manifest = saved
    assert Manifest.read(folder) == manifest
    assert Manifest.claimed_time(folder) == manifest.saved_at
    assert Manifest.claimed_time(folder / "nowhere") == 0
    manifest.verify(folder)
    assert manifest.has_its_sizes(folder)


def test_names_what_is_damaged_and_what_lay_there(saved: tuple[Path, Manifest]) -> None:
    folder, manifest = saved
    (folder / "__1_0.distcp").unlink()
    with (folder / "plan.json").open("ab") as file:
        file.write(b"x")
    assert not manifest.has_its_sizes(folder)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[2499] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedCheckpointError) as raised:
        manifest.verify(folder)
    assert_expected_inline(
        str(raised.value).replace(str(folder), "FOLDER"),
        """\
the checkpoint FOLDER is damaged: 3 files are not what was saved. Nothing was loaded; load another checkpoint, or bring these files back.
  __0_0.distcp has other bytes than were written, between byte 2,000 and byte 2,499; in it: model.bias, model.weight
  __1_0.distcp is missing
  plan.json has 1,001 bytes where 1,000 were written""",
    )
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.damages) == (str(raised.value), raised.value.damages)


def test_long_lists_of_names_are_cut() -> None:
    names = tuple(f"layer.{index}" for index in range(53))
    assert str(Damage("file", "is missing", names)).endswith("layer.48, layer.49 and 3 more")
    twice = DamagedCheckpointError(Path("here"), [Damage("file", "is missing"), Damage("file", "is short")])
    assert [damage.fault for damage in twice.damages] == ["is missing"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_share_the_blocks(saved: tuple[Path, Manifest], ranks: int) -> None:
    folder, manifest = saved
    shares = [manifest.blocks(rank, ranks) for rank in range(ranks)]
    assert list(itertools.chain(*shares)) == [
        ("__0_0.distcp", 0),
        ("__0_0.distcp", 1),
        ("__0_0.distcp", 2),
        ("__1_0.distcp", 0),
        ("plan.json", 0),
    ]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[1500] ^= 128
    (folder / "__0_0.distcp").write_bytes(data)
    found = [manifest.damages(folder, share) for share in shares]
    assert [bool(damages) for damages in found] == [("__0_0.distcp", 1) in share for share in shares]


def test_every_flipped_byte_of_the_manifest_is_noticed(saved: tuple[Path, Manifest]) -> None:
    folder, _ = saved
    text = (folder / MANIFEST).read_bytes()
    for position in range(len(text)):
        (folder / MANIFEST).write_bytes(text[:position] + bytes([text[position] ^ 4]) + text[position + 1 :])
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not what was written"):
            Manifest.read(folder)
    for size in (0, 1, len(text) // 2, len(text) - 1):
        (folder / MANIFEST).write_bytes(text[:size])
        with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not what was written"):
            Manifest.read(folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is missing"):
        Manifest.read(folder)


def test_a_newer_format_is_refused(saved: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, manifest = saved
    with monkeypatch.context() as patched:
        patched.setattr("mfsdp.checkpoint.manifest.VERSION", 2)
        manifest.write(folder)
        assert Manifest.read(folder) == manifest
    with pytest.raises(
        CheckpointError, match=r"version 2; this mfsdp reads 'mfsdp\.checkpoint' up to version 1"
    ) as error:
        Manifest.read(folder)
    assert not isinstance(error.value, DamagedCheckpointError)
    assert json.loads((folder / MANIFEST).read_text())["version"] == 2


def test_knows_where_dcp_put_what(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(3, 4), "bias": torch.zeros(())}, "extra": {"step": 3}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    names = names_by_file(metadata)
    assert names.keys() == {path.name for path in tmp_path.iterdir()} - {".metadata"}
    assert sorted(itertools.chain(*names.values())) == ["extra.step", "model.bias", "model.weight"]
    sums = {path.name: checksum_of_file(path) for path in tmp_path.iterdir()}
    manifest = Manifest.of(sums, metadata, saved_at=1.0)
    manifest.write(tmp_path)
    Manifest.read(tmp_path).verify(tmp_path)
    assert {file: record.names for file, record in manifest.files.items()} == {**names, ".metadata": ()}
    del sums[min(names)]
    with pytest.raises(ValueError, match="mentions files without a checksum"):
        Manifest.of(sums, metadata, saved_at=1.0)
    assert names_by_file(Metadata({}, storage_data={})) == {}
    assert MetadataIndex("a").fqn == "a"


def test_a_manifest_lists_files_of_its_folder_only() -> None:
    for name in ("../other", "/etc/passwd", MANIFEST, ""):
        with pytest.raises(ValueError, match="cannot list the file"):
            Manifest({name: FileRecord(FileSum(0, ()))}, saved_at=0.0)
