"""The save that runs in the background: one at a time, so that there is one copy of the state at most."""

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

__all__ = ["in_background", "wait_for_saves"]

_executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mfsdp-checkpoint")
_last: Future[Path] | None = None


def in_background(save: Callable[[], Path]) -> Future[Path]:
    """Run ``save`` in the thread that saves; Python does not end before it has."""
    global _last
    _last = _executor.submit(save)
    return _last


def wait_for_saves() -> None:
    """Wait until no save runs in the background; whether it succeeded is told by its future."""
    if _last is not None:
        concurrent.futures.wait([_last])
