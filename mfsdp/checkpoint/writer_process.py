"""A process beside this one that writes, so that Python's lock is free for training meanwhile.

It is started with the first save and ends with the process that started it. Data comes to it in shared memory.
"""

import os
import pickle
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from torch.distributed.checkpoint.planner import SavePlan

from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.staging import Layout
from mfsdp.checkpoint.writing import Writer, Written

__all__ = ["WriterProcess", "serve"]

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class _Request:
    """What is to be written where."""

    folder: Path
    rank: int
    plan: SavePlan
    layout: Layout


class WriterProcess:
    """Another Python process, which imports mfsdp and nothing of the program that runs here."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from mfsdp.checkpoint.writer_process import serve; serve({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
                start_new_session=True,  # an interrupt from the keyboard is for the program, which decides
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def write(self, folder: Path, rank: int, plan: SavePlan, memory: BinaryIO, layout: Layout) -> Written:
        """What :meth:`Writer.write` does, there.

        Args:
            folder: where to write.
            rank: whose part it is.
            plan: the items.
            memory: their data.
            layout: of the data.

        Raises:
            OSError: it cannot be written, or the process has ended.
            CheckpointError: something else is wrong.
        """
        try:
            socket.send_fds(self._socket, [b"\0"], [memory.fileno()])
            _send(self._socket, _Request(folder, rank, plan, layout))
            answer = _receive(self._socket)
        except (EOFError, ConnectionError):
            code = self._process.wait()
            raise ChildProcessError(f"the process that writes ended with exit code {code}") from None
        if isinstance(answer, BaseException):
            raise answer
        return cast(Written, answer)

    def close(self) -> None:
        """Let it end."""
        self._socket.close()
        self._process.wait()


def serve(handle: int) -> None:
    """Write what is asked for through the socket ``handle``, until the other end is closed."""
    with socket.socket(fileno=handle) as connection:
        while True:
            _, files, _, _ = socket.recv_fds(connection, 1, 1)
            if not files:
                return
            try:
                answer = _answer(cast(_Request, _receive(connection)), files[0])
            except EOFError:
                return
            finally:
                os.close(files[0])
            _send(connection, answer)


def _answer(request: _Request, memory: int) -> Written | BaseException:
    try:
        return Writer(request.folder, request.rank).write(request.plan, request.layout.planner(memory))
    except OSError as error:
        return error
    except BaseException as error:  # whatever it is, it is the other process that can tell it
        return CheckpointError(f"{type(error).__name__}: {error}")


def _send(connection: socket.socket, value: object) -> None:
    content = pickle.dumps(value)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive(connection: socket.socket) -> object:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return pickle.loads(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
