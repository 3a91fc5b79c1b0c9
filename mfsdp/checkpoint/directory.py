"""Folders of checkpoints: one appears whole or not at all, and the one before it stays until then.

    root/
      step-100/                        a checkpoint: it has a manifest, which was written last
      step-200/
      .step-300.node7-4711-1767225600.writing/     being written, or left by a run that died
      .step-200.node7-4711-1767225600.replaced/    was step-200 until the new step-200 took its name
      .step-50.node7-4711-1767225600.removed/      was step-50, and is being removed

Temporary folders carry the run that made them, so that another run can tell whether it still lives.
All functions work on one file system that the caller shares with the other ranks; one rank calls them.
"""

import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from mfsdp.checkpoint.durable import sync_folder
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.manifest import MANIFEST, Manifest

__all__ = [
    "begin",
    "checkpoints",
    "clean",
    "commit",
    "destination",
    "discard",
    "is_complete",
    "latest",
    "prune",
    "resolve",
    "temporary_for",
    "time_of_saving",
]

ABANDONED_AFTER = 3600.0
"""Seconds without a change after which a temporary folder of another machine's run counts as left behind."""

_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<host>[\w-]*)-(?P<pid>\d+)-(?P<started>\d+)\.(?P<kind>writing|replaced|removed)"
)


@dataclass(frozen=True)
class _Run:
    """A process that writes checkpoints."""

    host: str
    pid: int
    started: int  # seconds since 1970

    @classmethod
    def this(cls) -> "_Run":
        host = re.sub(r"[^\w-]", "_", socket.gethostname())
        return cls(host, os.getpid(), int(psutil.Process().create_time()))

    def is_on_this_machine(self) -> bool:
        return self.host == _Run.this().host

    def is_alive(self) -> bool:
        """Of a run on this machine: whether its process is there."""
        try:
            # the clock may have been set meanwhile
            return abs(psutil.Process(self.pid).create_time() - self.started) < 10
        except psutil.NoSuchProcess:
            return False


@dataclass(frozen=True)
class _Temporary:
    """A temporary folder, by what its name says."""

    path: Path
    name: str
    run: _Run
    kind: str

    @classmethod
    def of(cls, path: Path) -> "_Temporary | None":
        if not (match := _TEMPORARY.fullmatch(path.name)):
            return None
        run = _Run(match["host"], int(match["pid"]), int(match["started"]))
        return cls(path, match["name"], run, match["kind"])

    def is_left_behind(self) -> bool:
        if self.run.is_on_this_machine():
            return not self.run.is_alive()
        return time.time() - _last_change(self.path) > ABANDONED_AFTER


def destination(path: str | os.PathLike[str]) -> Path:
    """The folder that a checkpoint is to be saved as, an absolute path without links.

    Raises:
        CheckpointError: something is there that is no checkpoint, or that holds more than one, and would be lost.
    """
    folder = Path(os.path.realpath(path))
    if not folder.exists():
        return folder
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: a checkpoint is a folder. Save to another path.")
    if foreign := sorted(_foreign(folder)):
        shown = ", ".join(foreign[:5]) + (", ..." if len(foreign) > 5 else "")
        raise CheckpointError(
            f"saving to {folder} would replace the folder, and it holds what no checkpoint does: {shown}. "
            f"Save to a new name in it, such as {folder / 'step-1'}, or to another path."
        )
    return folder


def _foreign(folder: Path) -> set[str]:
    """Names in ``folder`` that are not part of a checkpoint there."""
    present = {each.name for each in folder.iterdir()}
    if MANIFEST in present:
        try:
            return present - Manifest.read(folder).files.keys() - {MANIFEST}
        except CheckpointError:
            pass  # damaged, or of a newer format: the usual names are all that can be told
    usual = {name for name in present if name.endswith((".distcp", ".metadata", ".json"))}
    return present - usual if present & {MANIFEST, ".metadata"} else present


def temporary_for(path: Path) -> Path:
    """Where this run, that of the calling process, writes what is to become ``path``: a folder beside it."""
    return _beside(path, "writing")


def begin(path: Path) -> Path:
    """Put the folder around ``path`` in order, and make the empty folder :func:`temporary_for` it."""
    clean(path.parent)
    temporary = temporary_for(path)
    discard(temporary)
    temporary.mkdir(parents=True)
    return temporary


def _beside(path: Path, kind: str) -> Path:
    run = _Run.this()
    return path.parent / f".{path.name}.{run.host}-{run.pid}-{run.started}.{kind}"


def commit(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name, in place of one that has it.

    All files in it must be on the disk already. If this is interrupted, ``path`` is the old checkpoint, the new
    one, or, between two renames, absent with the old one where ``resolve`` finds it.

    Args:
        temporary: made with :func:`temporary_for`; has its manifest.
        path: made with :func:`destination`.
    """
    sync_folder(temporary)
    destination(path)
    replaced = _beside(path, "replaced")
    if path.exists():
        discard(replaced)
        path.rename(replaced)
    try:
        temporary.rename(path)
    except OSError:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync_folder(path.parent)
    discard(replaced)


def discard(folder: Path) -> None:
    """Remove a temporary folder, if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Where the checkpoint ``path`` is to be read: there, or where a save that was killed had put it aside."""
    path = Path(os.path.realpath(path))
    if path.exists() or not path.parent.is_dir():
        return path
    aside = [each.path for each in _temporaries(path.parent) if each.kind == "replaced" and each.name == path.name]
    return max(aside, key=lambda folder: (is_complete(folder), Manifest.claimed_time(folder)), default=path)


def is_complete(folder: Path) -> bool:
    """Whether there is a readable manifest, and all files in it are there with their sizes; bytes are not checked."""
    try:
        return Manifest.read(folder).has_its_sizes(folder)
    except (CheckpointError, OSError):
        return False


def checkpoints(root: str | os.PathLike[str]) -> list[Path]:
    """The complete checkpoints in the folder ``root``, oldest first; none if there is no such folder.

    What is being written, was left by a run that died, or lacks files, is passed over.
    """
    return [folder for folder in _by_age(root) if is_complete(folder)]


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in the folder ``root``; None if there is none."""
    return next((folder for folder in reversed(_by_age(root)) if is_complete(folder)), None)


def _by_age(root: str | os.PathLike[str]) -> list[Path]:
    """The folders in ``root`` that may be checkpoints, oldest first by what their manifests claim."""
    root = Path(os.path.realpath(root))
    if not root.is_dir():
        return []
    temporaries = list(_temporaries(root))
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.is_symlink()}
    names = folders - {each.path.name for each in temporaries}
    names |= {each.name for each in temporaries if each.kind == "replaced"}
    saved_at = {path: Manifest.claimed_time(path) for path in (resolve(root / name) for name in names)}
    return sorted(saved_at, key=lambda path: (saved_at[path], _natural(_plain_name(path))))


def prune(root: str | os.PathLike[str], keep: int, like: str = "") -> list[Path]:
    """Remove all but the newest complete checkpoints in ``root``; to be called after a save has succeeded.

    Args:
        root: the folder of checkpoints.
        keep: how many are to stay.
        like: only checkpoints count whose names differ from this one in nothing but numbers; by default all.

    Returns:
        What was removed, oldest first.

    Raises:
        ValueError: ``keep`` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, but is {keep}: the newest checkpoint always stays.")
    alike = checkpoints(root)
    if like:
        alike = [each for each in alike if _without_numbers(_plain_name(each)) == _without_numbers(like)]
    removed = alike[:-keep]
    for path in removed:
        # under another name first: half a checkpoint must not keep its own
        hidden = _beside(path.with_name(_plain_name(path)), "removed")
        discard(hidden)
        path.rename(hidden)
        discard(hidden)
    return removed


def clean(root: str | os.PathLike[str]) -> None:
    """Put the folder ``root`` in order after runs that died: remove what they were writing and removing.

    A checkpoint that a dead run had put aside, and not yet replaced, gets its name back. What a living run is
    writing stays; whether a run of another machine lives is told by how long its folder has not changed
    (``ABANDONED_AFTER``).
    """
    root = Path(os.path.realpath(root))
    if not root.is_dir():
        return
    for each in list(_temporaries(root)):
        if not each.is_left_behind():
            continue
        named = root / each.name
        if each.kind == "replaced" and not named.exists() and resolve(named) == each.path:
            each.path.rename(named)
            sync_folder(root)
        else:
            discard(each.path)


def time_of_saving(root: Path) -> float:
    """Now, in seconds since 1970; but later than any checkpoint in ``root``, even if the clock was set back."""
    newest = latest(root)
    return time.time() if newest is None else max(time.time(), Manifest.claimed_time(newest) + 1e-3)


def _temporaries(root: Path) -> Iterator[_Temporary]:
    for path in root.iterdir():
        if (temporary := _Temporary.of(path)) and path.is_dir():
            yield temporary


def _last_change(folder: Path) -> float:
    return max(each.stat().st_mtime for each in (folder, *folder.iterdir()))


def _plain_name(path: Path) -> str:
    """The name of a checkpoint, wherever it is: its own, or that which it had before it was put aside."""
    temporary = _Temporary.of(path)
    return temporary.name if temporary else path.name


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts step-9 before step-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)
