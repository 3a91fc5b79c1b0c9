"""What lies in a checkpoint of ``torch.distributed.checkpoint``, by name, whoever has written it."""

import pickle
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from mfsdp.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError
from mfsdp.checkpoint.manifest import MANIFEST, FindsMemory, Manifest
from mfsdp.checkpoint.ranks import Ranks

__all__ = ["Contents", "Entry", "Seen", "check_same", "find_contents", "open_checkpoint"]

_METADATA = ".metadata"
_MARK = "mfsdp.ranks"
"""An entry of every checkpoint that mfsdp has written, so that a missing manifest is noticed."""
_BYTE_ORDER = f"mfsdp.{sys.byteorder}_endian"
"""An entry of those that were written with this machine's byte order."""

Entry = TensorStorageMetadata | BytesStorageMetadata


@dataclass(frozen=True)
class Contents:
    """The entries of a checkpoint.

    Attributes:
        folder: where it is.
        metadata: DCP's.
        manifest: mfsdp's, if there is one.
        entries: key -> what lies there; nested keys are joined by dots.
    """

    folder: Path
    metadata: Metadata
    manifest: Manifest | None = None

    @property
    def entries(self) -> Mapping[str, Entry]:
        return self.metadata.state_dict_metadata

    @property
    def is_own(self) -> bool:
        """Whether mfsdp has written it."""
        return _MARK in self.entries

    @property
    def save_id(self) -> str | None:
        """What tells this checkpoint from any other, if whoever wrote it gave it such a thing, as DCP does."""
        return self.metadata.storage_meta.save_id if self.metadata.storage_meta else None

    @property
    def is_stored_plainly(self) -> bool:
        """Whether tensors lie in the files as they lie in memory, contiguous."""
        return self.is_own and _BYTE_ORDER in self.entries

    @property
    def seen(self) -> "Seen":
        """Which checkpoint it is."""
        return Seen(str(self.folder), self.save_id)

    def check(self, rank: int, ranks: int, memory: FindsMemory | None = None) -> None:
        """Check the share of ``rank`` in the files; that of all ``ranks`` is everything.

        Args:
            rank: whose share.
            ranks: how many there are.
            memory: see :meth:`Manifest.damages`.

        Raises:
            DamagedCheckpointError: a file is missing or is not what was written.
        """
        if self.manifest is None:
            return
        if damages := self.manifest.damages(self.folder, self.manifest.blocks(rank, ranks), memory):
            raise DamagedCheckpointError(self.folder, damages)

    def below(self, prefix: str) -> Iterator[str]:
        """The keys that start with ``prefix`` and a dot, without these."""
        start = f"{prefix}." if prefix else ""
        return (key.removeprefix(start) for key in self.entries if key.startswith(start))

    def find_model(self, names: Collection[str]) -> str:
        """The key under which there are entries with a model's ``names``: ``"model"``, or ``""`` for the top.

        Raises:
            CheckpointError: there is none, or several fit equally well.
        """
        known = set(names)
        if self.is_own:
            return "model"
        found: Counter[str] = Counter()
        for key in self.entries:
            found.update(prefix for prefix, name in _splits(key) if name in known)
        if not found:
            shown = ", ".join(list(self.entries)[:5])
            raise CheckpointError(f"none of the model's names is in the checkpoint {self.folder}; it has {shown}, ...")
        return self._most(found, "model")

    def find_optimizer(self, names: Collection[str]) -> str | None:
        """The key under which there is the state of an optimizer of parameters with ``names``, if there is any."""
        known = set(names)
        if self.is_own:
            return "optimizer" if any(key.startswith("optimizer.param_groups.") for key in self.entries) else None
        found: Counter[str] = Counter()
        for key in self.entries:
            prefix, groups, rest = f".{key}".partition(".param_groups.")
            if groups:
                found[prefix.removeprefix(".")] += 1
            prefix, state, rest = f".{key}".partition(".state.")
            if state and any(name in known for name, _ in _splits(rest)):
                found[prefix.removeprefix(".")] += 1
        return self._most(found, "optimizer") if found else None

    def _most(self, found: Counter[str], usual: str) -> str:
        most = max(found.values())
        best = [prefix for prefix, count in found.items() if count == most]
        if len(best) == 1:
            return best[0]
        if usual in best:
            return usual
        raise CheckpointError(
            f"the checkpoint {self.folder} has the names that are looked for under several keys: {', '.join(best)}. "
            f"Load the one that you want by torch.distributed.checkpoint.load."
        )


def _splits(key: str) -> Iterator[tuple[str, str]]:
    """Every way to cut ``key`` in two at a dot, and with nothing before the cut."""
    yield "", key
    position = key.find(".")
    while position >= 0:
        yield key[:position], key[position + 1 :]
        position = key.find(".", position + 1)


def find_contents(folder: Path) -> Contents:
    """The contents of the checkpoint in ``folder``, by files that tell of the others and are checked here.

    Raises:
        DamagedCheckpointError: the manifest or the metadata is missing or is not what was written.
        CheckpointError: there is no checkpoint that can be read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder}.")
    manifest = Manifest.read(folder) if (folder / MANIFEST).exists() else None
    if manifest is not None:
        blocks = [block for block in manifest.blocks() if block[0] == _METADATA]
        if damages := manifest.damages(folder, blocks):
            raise DamagedCheckpointError(folder, damages)
    contents = Contents(folder, _read_metadata(folder), manifest)
    if contents.is_own and manifest is None:
        raise DamagedCheckpointError(folder, (Damage(MANIFEST, "is missing"),))
    return contents


def open_checkpoint(folder: Path, ranks: Ranks) -> Contents:
    """The contents of the checkpoint in ``folder``, after all ranks together have checked its files; one exchange.

    A checkpoint that mfsdp has not written has no manifest, and is not checked.

    Raises:
        DamagedCheckpointError: on every rank, if a file is missing or is not what was written.
        CheckpointError: on every rank, if there is no checkpoint that can be read, or the ranks see different ones.
    """
    contents: Contents | None = None

    def look() -> Seen:
        nonlocal contents
        contents = find_contents(folder)
        contents.check(ranks.rank, ranks.size)
        return contents.seen

    check_same(ranks.together(f"reading {folder}", look))
    assert contents is not None
    return contents


@dataclass(frozen=True)
class Seen:
    """Which checkpoint a rank has found."""

    folder: str
    save_id: str | None


def check_same(seen: Sequence[Seen]) -> None:
    """Refuse that ranks, here in their order, load different checkpoints.

    Raises:
        CheckpointError: they do.
    """
    for rank, each in enumerate(seen):
        if each.save_id != seen[0].save_id:
            raise CheckpointError(
                f"the ranks were to load different checkpoints: rank 0 that in {seen[0].folder}, rank {rank} another, "
                f"in {each.folder}. Let one rank choose, as by latest(), and give all ranks its path."
            )


def _read_metadata(folder: Path) -> Metadata:
    try:
        return FileSystemReader(folder).read_metadata()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} is no checkpoint of torch.distributed.checkpoint: it has no file {_METADATA}."
        ) from None
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
        raise CheckpointError(f"{folder / _METADATA} cannot be read: {error}") from error
