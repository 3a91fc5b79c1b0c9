"""What a checkpoint consists of: written last, so that a folder that has a manifest is complete.

A manifest is a JSON file. It holds the size and checksums of every file, and the names of what lies in each:

    {
     "format": "mfsdp.checkpoint",
     "version": 1,
     "checksum": "1c291ca3",               # of this text, with zeros in place of these eight digits
     "saved_at": 1767225600.25,
     "files": {
      "__0_0.distcp": {"size": 6291456, "checksums": [305419896], "names": ["model.blocks.0.up.weight", ...]},
      ...
     }
    }
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from mfsdp.checkpoint.checksums import BLOCK, FileSum, checksum_of_block
from mfsdp.checkpoint.durable import write_file
from mfsdp.checkpoint.errors import CheckpointError, Damage, DamagedCheckpointError

__all__ = ["FORMAT", "MANIFEST", "VERSION", "Block", "FileRecord", "Manifest", "names_by_file"]

FORMAT = "mfsdp.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
"""The file's name."""

_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{8})"')
_SAVED_AT = re.compile(rb'"saved_at": ([0-9.e+]+),')
_BEGINNING = 512
"""Bytes of a manifest that have all but the files in them."""
_NO_CHECKSUM = b'"checksum": "00000000"'

Block = tuple[str, int]
"""A file's name and the number of a block in it."""

FindsMemory = Callable[[str, int, int], memoryview]
"""(file, position in it, number of bytes) -> where the bytes from there on are to be read to, or some of them."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        sum: its size and checksums.
        names: of the tensors, and of other values, that lie in it, sorted.
    """

    sum: FileSum
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but the manifest itself.

    Attributes:
        files: by name within the checkpoint's folder.
        saved_at: when it was saved, in seconds since 1970; later checkpoints of a folder have larger ones.
    """

    files: Mapping[str, FileRecord]
    saved_at: float

    def __post_init__(self) -> None:
        for name in self.files:
            if not name or name == MANIFEST or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"a manifest cannot list the file {name!r}: it lists the other files in its folder.")

    @classmethod
    def of(cls, sums: Mapping[str, FileSum], metadata: Metadata, saved_at: float) -> "Manifest":
        """The manifest of the files in ``sums``, where ``metadata`` says what lies in which."""
        names = names_by_file(metadata)
        if unsummed := sorted(names.keys() - sums.keys()):
            raise ValueError(f"the metadata mentions files without a checksum: {', '.join(unsummed)}.")
        return cls({file: FileRecord(sums[file], names.get(file, ())) for file in sorted(sums)}, saved_at)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest in ``folder``.

        Raises:
            DamagedCheckpointError: there is none, or it is not what was written.
            CheckpointError: a newer mfsdp has written it.
        """
        try:
            text = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise DamagedCheckpointError(folder, (Damage(MANIFEST, "is missing"),)) from None
        return cls._parsed(folder, text)

    @staticmethod
    def claimed_time(folder: Path) -> float:
        """``saved_at`` of the manifest in ``folder``, which is not checked; 0 if there is none.

        Quick where there are many checkpoints: only the manifest's beginning is read.
        """
        try:
            with (folder / MANIFEST).open("rb") as file:
                found = _SAVED_AT.search(file.read(_BEGINNING))
        except OSError:
            return 0.0
        return float(found[1]) if found else 0.0

    @classmethod
    def _parsed(cls, folder: Path, text: bytes) -> "Manifest":
        checksum = _CHECKSUM.search(text)
        if not checksum or int(checksum[1], 16) != zlib.crc32(_CHECKSUM.sub(_NO_CHECKSUM, text, count=1)):
            raise DamagedCheckpointError(folder, (Damage(MANIFEST, "is not what was written"),))
        fields = json.loads(text)
        if fields["format"] != FORMAT or fields["version"] > VERSION:
            raise CheckpointError(
                f"the checkpoint {folder} has format {fields['format']!r}, version {fields['version']}; this mfsdp "
                f"reads {FORMAT!r} up to version {VERSION}. Load it with a newer mfsdp."
            )
        return cls({file: _record(each) for file, each in fields["files"].items()}, fields["saved_at"])

    def write(self, folder: Path) -> None:
        """Write it into ``folder``, as the last of the files there, and to the disk."""
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "checksum": "00000000",
            "saved_at": self.saved_at,
            "files": {file: _fields(record) for file, record in self.files.items()},
        }
        text = json.dumps(fields, indent=1).encode()
        text = text.replace(_NO_CHECKSUM, b'"checksum": "%08x"' % zlib.crc32(text), 1)
        write_file(folder / MANIFEST, text)

    def blocks(self, rank: int = 0, ranks: int = 1) -> list[Block]:
        """The blocks that ``rank`` of ``ranks`` is to check, so that together they check each once.

        A rank's blocks are neighbours, about as many as those of any other rank.
        """
        everything = [(file, block) for file, record in self.files.items() for block in _block_numbers(record)]
        first, last = (len(everything) * each // ranks for each in (rank, rank + 1))
        return everything[first:last]

    def damages(
        self, folder: Path, blocks: Iterable[Block] | None = None, memory: FindsMemory | None = None
    ) -> tuple[Damage, ...]:
        """What is wrong with the files in ``folder``.

        Args:
            folder: where they are.
            blocks: those to check, by default all. Sizes are checked in any case, of the files that these are in.
            memory: tells where to read to, by default nowhere. What was read may turn out to be damaged.
        """
        faults: dict[str, str] = {}
        for file, block in self.blocks() if blocks is None else blocks:
            if file not in faults and (fault := self._fault(folder, file, block, memory)):
                faults[file] = fault
        return tuple(Damage(file, fault, self.files[file].names) for file, fault in faults.items())

    def _fault(self, folder: Path, file: str, block: int, memory: FindsMemory | None) -> str | None:
        expected, path = self.files[file].sum, folder / file
        of_file = partial(memory, file) if memory is not None else None
        try:
            if (size := path.stat().st_size) != expected.size:
                return f"has {size:,} bytes where {expected.size:,} were written"
            if not expected.size or checksum_of_block(path, block, of_file) == expected.checksums[block]:
                return None
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        last = min((block + 1) * BLOCK, expected.size) - 1
        return f"has other bytes than were written, between byte {block * BLOCK:,} and byte {last:,}"

    def verify(self, folder: Path) -> None:
        """Check all files in ``folder``.

        Raises:
            DamagedCheckpointError: names all that are missing or are not what was written.
        """
        if damages := self.damages(folder):
            raise DamagedCheckpointError(folder, damages)

    def has_its_sizes(self, folder: Path) -> bool:
        """Whether all files are in ``folder`` and as long as they should be; their bytes are not read."""
        return all(
            (folder / file).is_file() and (folder / file).stat().st_size == record.sum.size
            for file, record in self.files.items()
        )


def names_by_file(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """What lies in which file of a DCP checkpoint on a file system: names of tensors and other values, sorted."""
    names: defaultdict[str, set[str]] = defaultdict(set)
    for index, info in metadata.storage_data.items():
        names[info.relative_path].add(index.fqn)
    return {file: tuple(sorted(each)) for file, each in names.items()}


def _block_numbers(record: FileRecord) -> range:
    return range(max(1, len(record.sum.checksums)))  # an empty file, too, is to be there


def _fields(record: FileRecord) -> dict[str, Any]:
    return {"size": record.sum.size, "checksums": list(record.sum.checksums), "names": list(record.names)}


def _record(fields: Mapping[str, Any]) -> FileRecord:
    return FileRecord(FileSum(fields["size"], tuple(fields["checksums"])), tuple(fields["names"]))
