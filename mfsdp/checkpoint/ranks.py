"""The ranks that save or load a checkpoint together, and how they fail together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from mfsdp.checkpoint.errors import CheckpointError, DamagedCheckpointError
from mfsdp.fsdp.objects import all_gather_object

__all__ = ["Ranks"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Report:
    """What a rank tells the others of its part in a step: its result, or what went wrong."""

    result: Any = None
    failure: str | None = None
    explained: bool = False  # a failure that says by itself what failed
    damaged: DamagedCheckpointError | None = None


class Ranks:
    """Those of a process group; without ``torch.distributed`` a single one.

    Args:
        group: by default all ranks, if there is a process group.

    Attributes:
        rank: of the calling process, within the group.
        size: how many there are.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)
        if self.rank < 0:
            raise CheckpointError("this rank is not in process_group: only its members save or load the checkpoint.")

    def together(self, doing: str, work: Callable[[], _T]) -> list[_T]:
        """Do ``work`` on every rank, and learn what came of it on all of them; one exchange.

        Args:
            doing: what the work is, for the message.
            work: may raise whatever it likes, on some ranks or all, but communicates nothing.

        Returns:
            What each rank's ``work`` returned, by rank.

        Raises:
            DamagedCheckpointError: on every rank, if ``work`` has raised it on any; it has the damages of all.
            CheckpointError: on every rank, if ``work`` has failed on any.
        """
        report, mine = _Report(), None
        try:
            report = _Report(work())
        except BaseException as error:  # whatever it is, the others must not wait for this rank in vain
            report, mine = _failed(error), error
        reports = [report] if self._alone else all_gather_object(report, self.group)
        if any(each.failure is not None for each in reports):
            if mine is not None and not isinstance(mine, Exception):
                raise mine  # the process is to end
            raise _error(doing, reports) from mine
        return [each.result for each in reports]

    def on_first(self, doing: str, work: Callable[[], _T]) -> _T:
        """Do ``work`` on rank 0 of the group; every rank gets its result, or its failure."""
        return self.together(doing, lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _failed(error: BaseException) -> _Report:
    told = isinstance(error, (CheckpointError, OSError))
    text = str(error) if told else f"{type(error).__name__}: {error}"
    damaged = error if isinstance(error, DamagedCheckpointError) else None
    return _Report(failure=text, explained=isinstance(error, CheckpointError), damaged=damaged)


def _error(doing: str, reports: Sequence[_Report]) -> CheckpointError:
    # damage may be why other ranks failed
    found = [each.damaged for each in reports if each.damaged is not None]
    if found:
        return DamagedCheckpointError(found[0].path, [damage for each in found for damage in each.damages])
    return CheckpointError(_message(doing, reports))


def _message(doing: str, reports: Sequence[_Report]) -> str:
    failures = [(rank, each) for rank, each in enumerate(reports) if each.failure is not None]
    first = failures[0][1]
    if all(each == first for _, each in failures):
        if first.explained:
            return str(first.failure)
        where = "" if len(failures) == len(reports) else f" on rank {', '.join(str(rank) for rank, _ in failures)}"
        return f"{doing} failed{where}: {first.failure}"
    return f"{doing} failed:" + "".join(f"\n  on rank {rank}: {each.failure}" for rank, each in failures)
