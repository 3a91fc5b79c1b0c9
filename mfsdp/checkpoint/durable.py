"""Writing that has reached the disk when the call returns."""

import os
from pathlib import Path

__all__ = ["sync_folder", "write_file"]


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file, and wait until the disk has it.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of the files in a folder.

    Raises:
        OSError: it cannot be read.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
