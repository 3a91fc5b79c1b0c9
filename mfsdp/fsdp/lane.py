"""A lane: a thread with a process group of its own, for gathers that take several steps.

A collective that consists of steps, each after the one before, needs somebody to start the next step while
the main thread computes. That is the lane's thread. It runs whole gathers in the order in which they were
given to it; as every rank gives the same gathers in the same order, and nobody else uses the lane's group,
their messages cannot be mixed up with those of collectives that the main thread starts meanwhile.

Lanes are for CPU tensors on gloo.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mfsdp.fsdp.collectives import ShardGroup

__all__ = ["Lane"]


class Lane:
    """See the module's docstring. :meth:`of` makes one lane for each process group.

    Args:
        ranks: who is to be on the lane. Every one of them must make it.

    Attributes:
        group: the lane's process group.
    """

    _of_group: ClassVar["WeakKeyDictionary[dist.ProcessGroup, Lane]"] = WeakKeyDictionary()

    def __init__(self, ranks: ShardGroup) -> None:
        options = ranks.group._get_backend(torch.device("cpu")).options
        # Between some ranks only, torch names a group after the number of groups that a rank is in, so that there the
        # members must be in equally many. Where everybody takes part that need not be so.
        everybody = ranks.size == dist.get_world_size()
        self.group: dist.ProcessGroup = dist.new_group(
            list(ranks.ranks),
            backend="gloo",
            timeout=options._timeout,
            use_local_synchronization=not everybody,
            group_desc="mfsdp_gather",
        )
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        # A daemon: where a rank waits for one that is gone, it must not also keep its process from ending.
        threading.Thread(target=_run, args=(self._jobs,), name="mfsdp_gather", daemon=True).start()

    @classmethod
    def of(cls, ranks: ShardGroup) -> Self:
        """The lane beside ``ranks.group``, made when it is first asked for."""
        lane = cls._of_group.get(ranks.group)
        if lane is None:
            lane = cls._of_group[ranks.group] = cls(ranks)
        return lane  # type: ignore[return-value]

    def run(self, job: Callable[[], None]) -> "LaneWork":
        """Let the thread run ``job`` after those that it was given before."""
        future: Future[None] = Future()
        self._jobs.put((job, future))
        return LaneWork(future)


class LaneWork:
    """A job given to a lane."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Return when it is done; raise what it raised."""
        self._future.result()


def _run(jobs: "queue.SimpleQueue[tuple[Callable[[], None], Future[None]]]") -> None:
    torch.set_grad_enabled(False)  # of this thread
    while True:
        job, future = jobs.get()
        try:
            job()
        except BaseException as error:  # whatever it is, it is the waiting thread's
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, future  # they hold the unit's memory
