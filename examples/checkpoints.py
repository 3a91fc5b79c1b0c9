"""The checkpoints of a run: what is saved besides the model and its optimizer, and where a run goes on."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from setups import Setup
from torch.optim.lr_scheduler import LRScheduler

import mfsdp

SAME = ("seed", "data", "optimizer", "dtype", "lr", "other_lr", "warmup", "batch", "context")
"""Arguments that a run that is resumed must have in common with its beginning; the model's sizes are its own."""


class Checkpoints:
    """A folder of checkpoints ``step-1``, ``step-2`` and so on.

    Args:
        args: of the run: ``checkpoint`` (the folder), ``keep``, and ``SAME``.
        setup: what is saved and loaded.
        schedules: likewise.
    """

    def __init__(self, args: argparse.Namespace, setup: Setup, schedules: Sequence[LRScheduler]) -> None:
        self.args, self.setup, self.schedules = args, setup, schedules

    def save(self, step: int) -> None:
        """Save what there is after ``step``."""
        extra = {
            "step": step,
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "arguments": {name: vars(self.args)[name] for name in SAME},
        }
        path = Path(self.args.checkpoint, f"step-{step}")
        mfsdp.checkpoint.save(path, self.setup.model, self.setup.optimizers, extra=extra, keep=self.args.keep)

    def resume(self) -> int:
        """Load the newest complete checkpoint; the step after which it was saved, or 0 if there is none.

        Raises:
            ValueError: the run that saved it was another one.
        """
        path = mfsdp.checkpoint.latest(self.args.checkpoint)
        if path is None:
            return 0
        extra = mfsdp.checkpoint.load(path, self.setup.model, self.setup.optimizers)
        for name, before in extra["arguments"].items():
            if vars(self.args)[name] != before:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{path} is of a run with {option} {before}; --resume goes on with the same.")
        for schedule, state in zip(self.schedules, extra["schedules"], strict=True):
            schedule.load_state_dict(state)
        return extra["step"]
