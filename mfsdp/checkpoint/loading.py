"""Loading: everything is checked and read before anything is changed."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mfsdp.checkpoint import directory
from mfsdp.checkpoint.collecting import Optimizers, listed
from mfsdp.checkpoint.contents import Contents, Entry, Seen, check_same, find_contents
from mfsdp.checkpoint.misfits import Misfits
from mfsdp.checkpoint.model_targets import ModelTargets
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.optimizer_targets import OptimizerTargets
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.reading import Reading, read
from mfsdp.checkpoint.rng import set_rng_state
from mfsdp.checkpoint.saved_groups import group_targets, saved_groups

__all__ = ["load"]


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    rng: bool = True,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Load a checkpoint into a model, and into its optimizer; all ranks call it.

    It may have been saved by any number of ranks, under another plan, by FSDP2, or by one process: by :func:`save`,
    or by ``torch.distributed.checkpoint.save`` from the states that ``get_model_state_dict`` and
    ``get_optimizer_state_dict`` return. Values are converted to the model's dtypes; states keep the dtypes that they
    were saved in, if the optimizer is mfsdp's, and the optimizer takes the options that were saved (``lr``,
    ``betas``, ...) except those that are code: ``split`` and functions.

    Every file is checked before anything else, and everything is read before anything is changed: a load that
    raises leaves model and optimizer as they were. For that each rank needs memory for its share of the parameters
    once more. Load only what you trust: the format has pickled objects in it.

    Args:
        path: the folder.
        model: what to load into; its parameters have their final sharding and device.
        optimizer: its optimizer, or several; by default only the model is loaded.
        rng: whether to set torch's random number generators to the states that were saved for this rank, if as
            many ranks have saved the checkpoint.
        process_group: the ranks that hold the model; by default all.

    Returns:
        The ``extra`` that was saved; None if there was none.

    Raises:
        DamagedCheckpointError: a file is missing or is not what was written; it names each, and what lies in it.
        CheckpointError: the checkpoint cannot be read, or is not one of this model and optimizer; all names that
            are missing, unexpected or of another shape are listed.

        Both are raised on every rank.
    """
    ranks = Ranks(process_group)
    folder = directory.resolve(Path(path))
    loading: _Loading | None = None

    def read_all() -> Seen:
        nonlocal loading
        contents = find_contents(folder)
        loading = _Loading(contents, model, optimizer, ranks)
        loading.read()
        return contents.seen

    check_same(ranks.together(f"loading {folder}", read_all))
    assert loading is not None
    return loading.finish(rng)


class _Loading:
    """One rank's part, without communication.

    Args:
        contents: the checkpoint's.
        model: what to load into.
        optimizer: likewise.
        ranks: all of them.
    """

    def __init__(self, contents: Contents, model: nn.Module, optimizer: Optimizers, ranks: Ranks) -> None:
        self._contents, self._model, self._optimizers = contents, model, listed(optimizer)
        self._ranks = ranks
        self._model_targets: ModelTargets | None = None
        self._optimizer_targets: OptimizerTargets | None = None
        self._values: dict[str, Any] = {}

    def read(self) -> None:
        """Check that everything fits, check this rank's share of the files, and read what this rank needs.

        Raises:
            DamagedCheckpointError: in this rank's share there is damage, which may also be why something does not fit.
            CheckpointError: something does not fit.
            OSError: a file cannot be read.
        """
        rank, ranks = self._ranks.rank, self._ranks.size
        try:
            reading = self._planned()
        except BaseException:  # damage can lead to anything
            self._contents.check(rank, ranks)
            raise
        self._contents.check(rank, ranks, reading.memory)
        self._values |= reading.finish()

    def _planned(self) -> Reading:
        contents, misfits = self._contents, Misfits(self._contents.folder)
        state = ModelState.of(self._model)
        self._model_targets = ModelTargets.of(state, contents, misfits)
        targets = dict(self._model_targets.values)
        prefix = contents.find_optimizer(state.values) if self._optimizers else None
        self._values = read(contents, self._small_targets(prefix))
        if prefix is not None:
            groups = saved_groups(contents, prefix, self._values, state.values)
            self._optimizer_targets = OptimizerTargets.of(self._optimizers, state, contents, prefix, groups, misfits)
            targets |= self._optimizer_targets.values
        elif self._optimizers:
            misfits.others.append("it has no state of an optimizer; load the model alone, without optimizer=")
        misfits.raise_if_any()
        return Reading(contents, targets)

    def _small_targets(self, prefix: str | None) -> dict[str, Any]:
        """For what is read before anything is checked: parameter groups, and what does not belong to a parameter."""
        entries = self._contents.entries
        targets: dict[str, Any] = {} if prefix is None else group_targets(self._contents, prefix)
        if self._contents.is_own:
            targets |= {key: None for key in ("extra", "mfsdp.ranks") if key in entries}
            for kind in self._contents.below(f"rng.{self._ranks.rank}"):
                targets[f"rng.{self._ranks.rank}.{kind}"] = _like(entries[f"rng.{self._ranks.rank}.{kind}"])
        return targets

    def finish(self, rng: bool) -> Any:
        """Give model and optimizers what was read, and the generators if ``rng``; returns the extra."""
        assert self._model_targets is not None
        self._model_targets.load_into(self._model, self._values)
        if self._optimizer_targets is not None:
            self._optimizer_targets.load_into(self._optimizers, self._values)
        if rng and self._values.get("mfsdp.ranks") == self._ranks.size:
            start = f"rng.{self._ranks.rank}."
            set_rng_state({key.removeprefix(start): self._values[key] for key in self._values if key.startswith(start)})
        return self._values.get("extra") if self._contents.is_own else None


def _like(entry: Entry) -> torch.Tensor | None:
    return torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
