"""Saving while training goes on: the state is copied, and the copy is written in the background."""

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from mfsdp.checkpoint.collecting import Optimizers
from mfsdp.checkpoint.in_flight import in_background, wait_for_saves
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.saving import Destination, plan_save
from mfsdp.checkpoint.staging import copied, copied_to_shared_memory
from mfsdp.checkpoint.writer_process import WriterProcess
from mfsdp.checkpoint.writing import PlannedSave, Writer, Written

__all__ = ["AsyncCheckpointerType", "async_save"]

_logger = logging.getLogger(__name__)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    process_group: ProcessGroup | None = None,
) -> Future[Path]:
    """Do what :func:`save` does, while the caller goes on; all ranks call it.

    When it returns, the state has been copied to CPU memory, each rank its own part, and may be changed. A save waits
    for the one before it, so that there is one copy at most. Wait for the last one before the process group is
    destroyed.

    Args:
        path: see :func:`save`; likewise the other arguments.
        model: likewise.
        optimizer: likewise.
        extra: likewise; it is copied, too.
        keep: likewise.
        async_checkpointer_type: of ``torch.distributed.checkpoint``: ``THREAD`` writes in a thread of this process,
            ``PROCESS`` in a process of its own, which is started with the first such save, stays, and does not import
            the program.
        process_group: likewise. Background communication has a gloo group of its own.

    Returns:
        What tells, by ``done()``, whether the checkpoint is there, and gives, by ``result()``, its folder. ``result()``
        raises the CheckpointError of a save that failed, on every rank; such a failure is logged as well.

    Raises:
        ValueError: ``keep`` is less than 1.
        CheckpointError: on every rank, if the save cannot begin.
    """
    wait_for_saves()
    ranks = Ranks(process_group)
    planned, target = plan_save(path, model, optimizer, extra, keep, ranks)
    stage = _STAGES[async_checkpointer_type]
    write: Callable[[], Written] | None = None

    def staged() -> None:
        nonlocal write
        write = stage(planned, target, ranks.rank)

    try:
        ranks.together(f"copying the state to be saved to {target.path}", staged)
    except BaseException:
        target.__exit__()
        raise
    assert write is not None
    future = in_background(partial(_finish, planned, target, Ranks(_background_group(ranks)), write))
    future.add_done_callback(_tell)
    return future


def _finish(planned: PlannedSave, target: Destination, ranks: Ranks, write: Callable[[], Written]) -> Path:
    with target:
        written = ranks.together(f"saving to {target.path}", write)
        return target.publish(planned, written, ranks)


def _tell(future: Future[Path]) -> None:
    error = future.exception()
    if error is not None:
        _logger.error("a checkpoint could not be saved in the background: %s", error)


def _stage_for_thread(planned: PlannedSave, target: Destination, rank: int) -> Callable[[], Written]:
    planner = copied(planned, rank)
    return lambda: Writer(target.temporary, rank).write(planned.plans[rank], planner)


def _stage_for_process(planned: PlannedSave, target: Destination, rank: int) -> Callable[[], Written]:
    memory, layout = copied_to_shared_memory(planned, rank)
    process = _writer_process()

    def write() -> Written:
        with closing(memory):
            return process.write(target.temporary, rank, planned.plans[rank], memory, layout)

    return write


_STAGES = {AsyncCheckpointerType.THREAD: _stage_for_thread, AsyncCheckpointerType.PROCESS: _stage_for_process}

_process: WriterProcess | None = None


def _writer_process() -> WriterProcess:
    global _process
    if _process is None or not _process.is_alive:
        _process = WriterProcess()
    return _process


# Collectives of two threads must not meet in one group.
_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def _background_group(ranks: Ranks) -> ProcessGroup | None:
    if not dist.is_initialized():
        return None
    group = ranks.group or dist.group.WORLD
    assert group is not None
    if group not in _groups:
        members = dist.get_process_group_ranks(group)
        _groups[group] = dist.new_group(members, backend="gloo", use_local_synchronization=True)
    return _groups[group]
