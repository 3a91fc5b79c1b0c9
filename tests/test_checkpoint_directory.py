"""Folders of checkpoints: names appear whole, are replaced whole, and what dead runs left is put in order."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mfsdp.checkpoint import directory
from mfsdp.checkpoint.checksums import checksum_of_file
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.manifest import MANIFEST, FileRecord, Manifest


def write(folder: Path, content: str = "", saved_at: float | None = None) -> Path:
    """A checkpoint of one file, in place."""
    folder.mkdir()
    (folder / "__0_0.distcp").write_text(content)
    when = directory.time_of_saving(folder.parent) if saved_at is None else saved_at
    Manifest({"__0_0.distcp": FileRecord(checksum_of_file(folder / "__0_0.distcp"))}, when).write(folder)
    return folder


def save(path: Path, content: str = "") -> Path:
    """The same as a save does it."""
    path = directory.destination(path)
    directory.commit(write(directory.temporary_for(path), content), path)
    return path


def content(path: Path) -> str:
    return (directory.resolve(path) / "__0_0.distcp").read_text()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def left_by_a_dead_run(path: Path, kind: str) -> Path:
    """A temporary name beside ``path`` of a process of this machine that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = directory.temporary_for(path).name
    return path.with_name(mine.replace(f"-{os.getpid()}-", f"-{ended.pid}-").replace(".writing", f".{kind}"))


def test_appears_whole_and_is_replaced_whole(tmp_path: Path) -> None:
    path = save(tmp_path / "last", "first")
    assert (names(tmp_path), content(path)) == (["last"], "first")
    save(path, "second")
    assert (names(tmp_path), content(path)) == (["last"], "second")


DEADLY = ((Path, "rename"), (directory, "sync_folder"), (shutil, "rmtree"), (os, "unlink"), (os, "rmdir"))
"""What changes folders."""


def save_until_killed(path: Path, calls: int) -> int:
    """Save in a child process that is killed at the given call of what is in ``DEADLY``; its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = calls

    def dying(function: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    try:
        for owner, name in DEADLY:
            setattr(owner, name, dying(getattr(owner, name)))
        save(path, "second")
        os._exit(0)
    finally:
        os._exit(1)


def test_one_is_there_wherever_a_save_is_killed(tmp_path: Path) -> None:
    found = []
    for calls in itertools.count(1):
        root = tmp_path / str(calls)
        root.mkdir()
        path = save(root / "last", "first")
        exit_code = save_until_killed(path, calls)
        assert exit_code in (0, -signal.SIGKILL)
        found.append(content(path))
        assert directory.latest(root) == directory.resolve(path)
        directory.clean(root)
        assert names(root) == ["last"]
        assert content(path) == found[-1]
        assert directory.latest(root) == path
        if exit_code == 0:
            break
    # killed before: to the disk, rename, rename | to the disk, rmtree, unlink of two files, rmdir | and not at all
    assert found == ["first"] * 3 + ["second"] * 6


def test_a_failed_rename_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "last", "first")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".writing"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"):
        save(path, "second")
    assert path.exists()
    assert content(path) == "first"


def test_nothing_but_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_inside = runs / "step-1"
    runs.mkdir()
    save(save_inside)
    (runs / "log.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"would replace the folder.*no checkpoint does: log\.txt, step-1\."):
        directory.destination(runs)
    (save_inside / "notes").write_text("precious")
    with pytest.raises(CheckpointError, match=r"no checkpoint does: notes\."):
        directory.destination(save_inside)
    with pytest.raises(CheckpointError, match=r"log\.txt is a file"):
        directory.destination(runs / "log.txt")
    plain = tmp_path / "dcp"
    plain.mkdir()
    assert directory.destination(plain) == plain  # empty
    for name in (".metadata", "__0_0.distcp"):
        (plain / name).touch()
    assert directory.destination(plain) == plain
    (tmp_path / "link").symlink_to(plain)
    assert directory.destination(tmp_path / "link") == plain


def test_latest_passes_over_what_is_not_complete(tmp_path: Path) -> None:
    assert directory.latest(tmp_path / "nowhere") is None
    assert directory.latest(tmp_path) is None
    good = save(tmp_path / "step-9")
    damage: dict[str, Callable[[Path], None]] = {
        "short": lambda path: os.truncate(path / "__0_0.distcp", 1),
        "lacking": lambda path: (path / "__0_0.distcp").unlink(),
        "no-manifest": lambda path: (path / MANIFEST).unlink(),
        "bad-manifest": lambda path: os.truncate(path / MANIFEST, 9),
    }
    for name, damaging in damage.items():
        damaging(save(tmp_path / name, "content"))
    write(directory.temporary_for(tmp_path / "step-10"))
    (tmp_path / "step-11").touch()
    (tmp_path / "link").symlink_to(good)
    assert directory.checkpoints(tmp_path) == [good]
    assert directory.latest(tmp_path) == good


def test_newest_is_what_was_saved_last_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path / "step-100")
    monkeypatch.setattr(time, "time", lambda: 5.0)
    second = save(tmp_path / "step-200")
    assert directory.checkpoints(tmp_path) == [first, second]
    twins = [write(tmp_path / f"twin-{number}", saved_at=3.0) for number in (9, 10)]
    assert directory.checkpoints(tmp_path) == [*twins, first, second]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    best = save(tmp_path / "best")
    steps = [save(tmp_path / f"step-{number}") for number in (8, 9, 10, 11)]
    incomplete = save(tmp_path / "step-7", "content")
    os.truncate(incomplete / "__0_0.distcp", 1)
    assert directory.prune(tmp_path, keep=2, like="step-11") == steps[:2]
    assert names(tmp_path) == ["best", "step-10", "step-11", "step-7"]
    assert directory.prune(tmp_path, keep=2) == [best]
    assert directory.prune(tmp_path, keep=5) == []
    with pytest.raises(ValueError, match="keep must be at least 1, but is 0"):
        directory.prune(tmp_path, keep=0)
    assert names(tmp_path) == ["step-10", "step-11", "step-7"]


def test_clean_removes_what_dead_runs_left_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path / "step-1", "kept")
    living = write(directory.temporary_for(tmp_path / "step-2"))
    for kind in ("writing", "removed", "replaced"):
        write(left_by_a_dead_run(path, kind))
    elsewhere = write(tmp_path / ".step-3.othernode-4711-1767225600.writing")
    (tmp_path / ".mine").mkdir()
    directory.clean(tmp_path)
    assert names(tmp_path) == sorted(["step-1", living.name, elsewhere.name, ".mine"])
    assert content(path) == "kept"
    long_ago = time.time() - 2 * directory.ABANDONED_AFTER
    for each in (*elsewhere.iterdir(), elsewhere):
        os.utime(each, (long_ago, long_ago))
    directory.clean(tmp_path)
    assert names(tmp_path) == sorted(["step-1", living.name, ".mine"])


def test_a_process_number_used_again_is_another_run(tmp_path: Path) -> None:
    mine = directory.temporary_for(tmp_path / "step-1").name
    started = mine.rpartition("-")[2].partition(".")[0]
    (tmp_path / mine.replace(started, str(int(started) - 1000))).mkdir()
    directory.clean(tmp_path)
    assert names(tmp_path) == []


def test_what_was_put_aside_gets_its_name_back(tmp_path: Path) -> None:
    older = write(left_by_a_dead_run(tmp_path / "last", "replaced"), "older", saved_at=1.0)
    write(tmp_path / older.name.replace(".last.", ".last.x-"), "newer", saved_at=2.0).rename(
        left_by_a_dead_run(tmp_path / "last", "replaced")
    )
    plain = left_by_a_dead_run(tmp_path / "plain", "replaced")
    plain.mkdir()
    (plain / ".metadata").touch()
    assert content(tmp_path / "last") == "newer"
    assert directory.resolve(tmp_path / "plain") == plain
    assert [content(path) for path in directory.checkpoints(tmp_path)] == ["newer"]
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    assert directory.prune(tmp_path.parent / "copy", keep=1) == []
    directory.clean(tmp_path)
    assert names(tmp_path) == ["last", "plain"]
    assert content(tmp_path / "last") == "newer"
