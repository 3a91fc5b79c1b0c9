"""What can be wrong with a checkpoint on disk."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CheckpointError", "Damage", "DamagedCheckpointError"]

_NAMES_SHOWN = 50


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read or used; the message names what is wrong and what to do about it."""


@dataclass(frozen=True)
class Damage:
    """What is wrong with one file of a checkpoint.

    Attributes:
        file: its name within the checkpoint.
        fault: what is wrong with it, as the end of a sentence.
        names: of the tensors, and of other values, that lie in it.
    """

    file: str
    fault: str
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.file} {self.fault}"
        if self.names:
            more = len(self.names) - _NAMES_SHOWN
            text += "; in it: " + ", ".join(self.names[:_NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")
        return text


class DamagedCheckpointError(CheckpointError):
    """Files of a checkpoint are missing, or are not what was written.

    Args:
        path: the checkpoint's folder.
        damages: at least one for each such file; of one file, the first counts.
    """

    def __init__(self, path: Path, damages: Iterable[Damage]) -> None:
        by_file: dict[str, Damage] = {}
        for damage in damages:
            by_file.setdefault(damage.file, damage)
        self.path, self.damages = path, tuple(by_file.values())
        files = "1 file is" if len(by_file) == 1 else f"{len(by_file)} files are"
        lines = "".join(f"\n  {damage}" for damage in self.damages)
        super().__init__(
            f"the checkpoint {path} is damaged: {files} not what was saved. Nothing was loaded; load another "
            f"checkpoint, or bring these files back.{lines}"
        )

    def __reduce__(self) -> tuple[type, tuple[Path, tuple[Damage, ...]]]:
        return type(self), (self.path, self.damages)  # errors travel between ranks
