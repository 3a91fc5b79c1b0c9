"""Kill a training run at random moments, resume it each time, and compare it with a run that was never killed.

    python examples/kill_and_resume.py --kills 20

A small GPT is trained by the code of train_lm.py, saving every two steps. The run is ended by SIGKILL, all ranks at
once or one of them, at moments that a seed decides, half of them while a checkpoint is being written. Each time it goes
on from the newest complete checkpoint, on another number of ranks. After each kill it is checked that

- what is left of a run that lost one rank ends by itself;
- the newest complete checkpoint is no older than it was before, and its bytes are as they were written.

At the end the last checkpoint is compared with that of a run of two ranks that was never killed: every parameter,
every optimizer state and every schedule must be equal to the bit. For that the arithmetic must not depend on the
number of ranks: every rank computes the same whole batch, and there are 1, 2 or 4 ranks, so that the mean of their
gradients is exact.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import arguments
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from train_lm import Trainer

from mfsdp.checkpoint import Manifest, latest

SAVE_EVERY = 2
RANKS = (1, 2, 4)
MOST_SAVES = 1
"""Checkpoints that a start gets to write, at most, before it is killed in or after the next."""
PATIENCE = 90.0
"""Seconds after which ranks that were to get on, or to end, count as hanging."""
COLLECTIVE_TIMEOUT = timedelta(seconds=30)


class SameBatchTrainer(Trainer):
    """Every rank computes the loss of the whole batch."""

    def loss_of(self, pieces: Sequence[Tensor]) -> Tensor:
        return self.setup.model(*pieces)


def options(folder: Path, steps: int) -> argparse.Namespace:
    """Those of a small run."""
    sizes = ["--width", "24", "--layers", "2", "--heads", "2", "--context", "16", "--batch", "8"]
    saving = ["--checkpoint", str(folder), "--save-every", str(SAVE_EVERY), "--keep", "3", "--resume"]
    return arguments.parse(["--steps", str(steps), "--data", str(Path(__file__).parent), *sizes, *saving])


class Run:
    """The processes of one start of the run.

    Args:
        folder: of the checkpoints.
        steps: how far to train.
        ranks: how many processes.
    """

    def __init__(self, folder: Path, steps: int, ranks: int) -> None:
        self.ranks = ranks
        self._files = tempfile.TemporaryDirectory(prefix="kill-and-resume-")
        self._codes: dict[int, int | None] = {}  # process -> exit code; None while it runs
        sys.stdout.flush()
        for rank in range(ranks):
            # what takes time was imported already
            process = os.fork() or self._train(folder, steps, rank)
            self._codes[process] = None

    def _train(self, folder: Path, steps: int, rank: int) -> NoReturn:
        code = 1
        try:
            with (Path(self._files.name) / "log").open("a") as log:
                os.dup2(log.fileno(), sys.stdout.fileno())
                os.dup2(log.fileno(), sys.stderr.fileno())
            signal.alarm(60 + 5 * steps)  # not to outlive the parent, whatever becomes of it
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{self._files.name}/rendezvous",
                rank=rank,
                world_size=self.ranks,
                timeout=COLLECTIVE_TIMEOUT,
            )
            SameBatchTrainer(options(folder, steps), init_device_mesh("cpu", (self.ranks,))).run()
            dist.barrier()
            code = 0
        except BaseException:  # whatever it is, this process must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def running(self) -> list[int]:
        """The processes that have not ended."""
        for process in [process for process, code in self._codes.items() if code is None]:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                self._codes[process] = os.waitstatus_to_exitcode(status)
        return [process for process, code in self._codes.items() if code is None]

    def kill(self, processes: Sequence[int]) -> None:
        for process in processes:
            os.kill(process, signal.SIGKILL)

    def await_end(self) -> list[int]:
        """Wait until all processes have ended; their exit codes by rank."""
        wait_for("the end of all ranks", lambda: not self.running(), self)
        return [code for code in self._codes.values() if code is not None]

    def close(self) -> None:
        """Leave no process behind."""
        self.kill(self.running())
        wait_for("killed ranks", lambda: not self.running(), self)
        self._files.cleanup()

    def is_training(self) -> bool:
        """Whether all ranks have found each other, loaded, and begun."""
        return " train loss " in self.log()

    def log(self) -> str:
        """What the ranks have said."""
        log = Path(self._files.name) / "log"
        return log.read_text() if log.exists() else ""


def wait_for(what: str, condition: Callable[[], bool], run: Run) -> None:
    """Wait until ``condition()``; ends the program if that takes too long."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            sys.exit(f"{what}: not within {PATIENCE:.0f} s\n{run.log()}")
        time.sleep(0.002)


@dataclass(frozen=True)
class Moment:
    """When, and how, a start of the run is killed.

    Attributes:
        saves: after this many checkpoints,
        while_saving: and when the next has been begun,
        delay: and then so much of the time from one save to the next.
        victim: the rank to be killed, modulo the number of ranks; None for all at once.
    """

    saves: int
    while_saving: bool
    delay: float
    victim: int | None

    @classmethod
    def drawn(cls, rng: random.Random) -> "Moment":
        while_saving = rng.random() < 0.5
        return cls(
            saves=rng.randint(0, MOST_SAVES),
            while_saving=while_saving,
            delay=rng.random() * (0.3 if while_saving else 1.0),
            victim=rng.randrange(4) if rng.random() < 0.5 else None,
        )


class Killing:
    """A run and what is done to it.

    Args:
        folder: of its checkpoints.
        steps: how far it is to get.
        interval: seconds from one save to the next.
    """

    def __init__(self, folder: Path, steps: int, interval: float) -> None:
        self.folder, self.steps, self.interval = folder, steps, interval

    def start_and_kill(self, ranks: int, moment: Moment) -> str:
        """One start, up to its end; what happened, in a line."""
        before = newest(self.folder)
        run = Run(self.folder, self.steps, ranks)
        try:
            self._await(run, moment, before + moment.saves * SAVE_EVERY)
            saving = is_saving(self.folder)
            lasted = self._kill(run, moment)
        finally:
            run.close()
        after = newest(self.folder)
        if after < before:
            sys.exit(f"step {before} had been saved, and now the newest complete checkpoint is of step {after}")
        if after:
            folder = self.folder / f"step-{after}"
            Manifest.read(folder).verify(folder)
        how = f"rank {moment.victim % ranks}" if moment.victim is not None else "all"
        return f"{ranks:5d}  {how:6}  {'yes' if saving else 'no':6}  {before:5d}  {after:5d}  {lasted:9.2f}"

    def _await(self, run: Run, moment: Moment, step: int) -> None:
        def reached() -> bool:
            if len(run.running()) < run.ranks:
                sys.exit(f"the run has ended before it was killed\n{run.log()}")
            return newest_name(self.folder) >= step

        wait_for(f"step {step}", reached, run)
        if moment.victim is not None:
            # who loses another while it looks for it learns of that by the timeout of torch's rendezvous only
            wait_for("the first step", lambda: run.is_training() or len(run.running()) < run.ranks, run)
        if moment.while_saving:
            wait_for("a save", lambda: is_saving(self.folder) or len(run.running()) < run.ranks, run)
        time.sleep(moment.delay * self.interval)

    def _kill(self, run: Run, moment: Moment) -> float:
        """Kill it; the seconds that the ranks took to end that were not killed."""
        processes = run.running()
        run.kill(processes if moment.victim is None else [processes[moment.victim % len(processes)]])
        began = time.monotonic()
        if 0 in run.await_end():
            sys.exit(f"a rank has ended as if nothing had happened\n{run.log()}")
        return time.monotonic() - began

    def finish(self, ranks: int) -> Path:
        """Start it once more and let it end; the last checkpoint."""
        run = Run(self.folder, self.steps, ranks)
        try:
            if any(run.await_end()):
                sys.exit(f"the run has failed\n{run.log()}")
        finally:
            run.close()
        return self.folder / f"step-{self.steps}"


def newest_name(folder: Path) -> int:
    """The step of the newest checkpoint, by names; 0 if there is none."""
    names = [path.name for path in folder.glob("step-*")]
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def newest(folder: Path) -> int:
    """The step of the newest complete checkpoint; 0 if there is none."""
    path = latest(folder)
    return 0 if path is None else int(path.name.removeprefix("step-"))


def is_saving(folder: Path) -> bool:
    return any(folder.glob(".*.writing"))


def interval_of(folder: Path) -> float:
    """Seconds from one save to the next, by the checkpoints that are there."""
    times = sorted(Manifest.read(path).saved_at for path in folder.glob("step-*"))
    return statistics.median(later - earlier for earlier, later in pairwise(times))


def contents(checkpoint: Path, scratch: Path) -> dict[str, Any]:
    """A checkpoint's model, optimizer state and extra, read by torch's own means."""
    dcp_to_torch_save(checkpoint, scratch)
    read = torch.load(scratch, weights_only=False)
    return {key: read[key] for key in ("model", "optimizer", "extra")}


def compare(one: Any, other: Any, label: str) -> int:
    """Ends the program if the values differ in a bit; the number of tensors in them."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return sum(compare(one[key], other[key], f"{label}.{key}") for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return sum(compare(*pair, f"{label}[{index}]") for index, pair in enumerate(zip(one, other, strict=True)))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            sys.exit(f"{label} differs from that of the run that was never killed")
        return 1
    if one != other:
        sys.exit(f"{label} is {one!r}, and {other!r} in the run that was never killed")
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    steps = SAVE_EVERY * (MOST_SAVES + 2) * (args.kills + 1)
    with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as root:
        expected = Killing(Path(root, "never"), steps, 0.0).finish(ranks=2)
        killing = Killing(Path(root, "killed"), steps, interval_of(expected.parent))
        print(f"{steps} steps, a save every {killing.interval:.2f} s")
        print(" kill  ranks  killed  saving  before  after  others end, s", flush=True)
        ranks, lines = 2, []
        for kill in range(args.kills):
            lines.append(killing.start_and_kill(ranks, Moment.drawn(rng)))
            print(f"{kill + 1:5d}  {lines[-1]}", flush=True)
            ranks = rng.choice([each for each in RANKS if each != ranks])
        found = killing.finish(ranks=2)
        scratch = Path(root, "scratch")
        tensors = compare(contents(found, scratch), contents(expected, scratch), "")
    saving = sum(line.split()[-4] == "yes" for line in lines)
    print(f"{args.kills} kills, {saving} of them while saving: all {tensors} tensors equal to the bit")


if __name__ == "__main__":
    main()
