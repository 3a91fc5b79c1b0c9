"""What in a checkpoint does not fit what it is to be loaded into: all of it, told at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mfsdp.checkpoint.errors import CheckpointError

__all__ = ["Misfits"]


@dataclass
class Misfits:
    """Findings, by kind.

    Attributes:
        folder: the checkpoint's.
        missing: names that the checkpoint lacks.
        unexpected: names that only the checkpoint has.
        others: sentences, such as those on shapes.
    """

    folder: Path
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)

    def check_shape(self, name: str, saved: Sequence[int], here: Sequence[int]) -> bool:
        """Whether the shapes are equal; if not, it is a finding."""
        if tuple(saved) == tuple(here):
            return True
        self.others.append(f"{name}: its shape is {tuple(saved)} in the checkpoint and {tuple(here)} here")
        return False

    def raise_if_any(self) -> None:
        """Raise CheckpointError if there are findings."""
        lines = [f"{name}: missing in the checkpoint" for name in self.missing]
        lines += [f"{name}: only in the checkpoint" for name in self.unexpected]
        lines += self.others
        if lines:
            raise CheckpointError(
                f"the checkpoint {self.folder} is not one of this model and optimizer; nothing was loaded:"
                + "".join(f"\n  {line}" for line in lines)
            )
