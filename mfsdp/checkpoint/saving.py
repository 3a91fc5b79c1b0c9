"""Saving: every rank writes what it owns, and the checkpoint appears when all have done so."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from mfsdp.checkpoint import directory
from mfsdp.checkpoint.checksums import FileSum, checksum_of_file
from mfsdp.checkpoint.collecting import Optimizers, check_extra, collect, listed
from mfsdp.checkpoint.durable import write_file
from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.in_flight import wait_for_saves
from mfsdp.checkpoint.manifest import Manifest
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.writing import PlannedSave, Writer, Written
from mfsdp.fsdp import plan_of

__all__ = ["Destination", "plan_save", "save"]

PLAN = "plan.json"
"""The file that holds the model's plan, for people and tools; loading does not need it."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    keep: int | None = None,
    process_group: ProcessGroup | None = None,
) -> Path:
    """Save a model, and the state of its optimizer, as the folder ``path``; all ranks call it.

    The checkpoint is one of ``torch.distributed.checkpoint``, with full shapes and the names of the unsharded
    model. Each owner writes its own tensors, each byte is written once, and a tensor that is tied to another lies
    at the same bytes. It is written beside ``path`` and renamed when it is complete, so that a checkpoint that was
    ``path`` before stays until then, whatever happens. The states of torch's random number generators are saved
    for each rank.

    Args:
        path: the folder to be made, for instance ``runs/step-100``, on a file system that all ranks share.
        model: sharded by ``mfsdp.fully_shard`` or by FSDP2, wrapped by DDP, or a plain module of one process.
        optimizer: its optimizer, or a sequence of those that share its parameters out.
        extra: whatever else is needed to go on, such as ``{"step": 100, "scheduler": scheduler.state_dict()}``;
            that of rank 0 is saved, by ``pickle``.
        keep: after success, remove all but this many of the newest checkpoints beside ``path`` whose names
            differ from its own in numbers only.
        process_group: the ranks that hold the model; by default all.

    Returns:
        The checkpoint's folder, an absolute path.

    Raises:
        ValueError: ``keep`` is less than 1.
        CheckpointError: on every rank, if it cannot be saved; what was at ``path`` is as it was.
    """
    wait_for_saves()
    ranks = Ranks(process_group)
    planned, target = plan_save(path, model, optimizer, extra, keep, ranks)
    with target:
        writer = Writer(target.temporary, ranks.rank)
        plan = planned.plans[ranks.rank]
        written = ranks.together(f"saving to {target.path}", lambda: writer.write(plan, planned.planner))
        return target.publish(planned, written, ranks)


class Destination:
    """The folder that a checkpoint becomes, and the temporary one that it is written to until then.

    To be used as a context, which ends with the temporary folder renamed or removed.

    Attributes:
        path: the folder to be.
        temporary: where to write.
    """

    def __init__(self, path: Path, keep: int | None, plan: str | None, ranks: Ranks) -> None:
        self.path = path
        self.temporary = ranks.on_first(f"saving to {path}", lambda: self._make(path))
        self._keep, self._plan, self._is_first = keep, plan, ranks.rank == 0

    @staticmethod
    def _make(path: Path) -> Path:
        directory.destination(path)
        return directory.begin(path)

    def __enter__(self) -> "Destination":
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_first:
            with suppress(OSError):  # what stays is cleaned up by the next save; what failed is what must be told
                directory.discard(self.temporary)

    def publish(self, planned: PlannedSave, written: Sequence[Written], ranks: Ranks) -> Path:
        """Complete the checkpoint, when every rank has written its part, and give it its name.

        Raises:
            CheckpointError: on every rank.
        """
        ranks.on_first(f"saving to {self.path}", lambda: self._finish(planned, written))
        return self.path

    def _finish(self, planned: PlannedSave, written: Sequence[Written]) -> None:
        sums = {name: each for rank in written for name, each in rank.sums.items()}
        self._check_files(sums)
        results = [planned.with_aliases(rank.results) for rank in written]
        Writer(self.temporary, 0).finish(planned.metadata, results)
        if self._plan is not None:
            write_file(self.temporary / PLAN, self._plan.encode())
            sums[PLAN] = checksum_of_file(self.temporary / PLAN)
        sums[".metadata"] = checksum_of_file(self.temporary / ".metadata")
        saved_at = directory.time_of_saving(self.path.parent)
        Manifest.of(sums, planned.metadata, saved_at).write(self.temporary)
        directory.commit(self.temporary, self.path)
        if self._keep is not None:
            directory.prune(self.path.parent, self._keep, like=self.path.name)

    def _check_files(self, sums: dict[str, FileSum]) -> None:
        """All ranks must have written to the folder that this one sees."""
        for name, each in sums.items():
            file = self.temporary / name
            if not file.exists() or file.stat().st_size != each.size:
                raise CheckpointError(
                    f"another rank has written {name}, which is not here: {self.path.parent} must be a folder on a "
                    f"file system that all ranks share."
                )


def plan_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers,
    extra: Any,
    keep: int | None,
    ranks: Ranks,
) -> tuple[PlannedSave, Destination]:
    """Plan a save, and make the temporary folder; the arguments are those of :func:`save`."""
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, but is {keep}: the newest checkpoint always stays.")

    def collected() -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
        check_extra(extra)
        state = ModelState.of(model)
        return collect(state, listed(optimizer), ranks), state.ties

    planned = PlannedSave.of(collected, extra, ranks)
    plan = plan_of(model)
    return planned, Destination(Path(os.path.realpath(path)), keep, None if plan is None else plan.to_json(), ranks)
