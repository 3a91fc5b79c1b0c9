"""Train a small byte-level GPT with every weight matrix whole on one rank.

    torchrun --nproc-per-node 2 examples/train_lm.py

With --checkpoint DIR --save-every 50 it saves as it goes, and with --resume it goes on from there, on any number of
ranks.

The same run by PyTorch's own means: --baseline fsdp2 (FSDP2 with torch.optim.Muon) and --baseline ddp (DDP,
with torch.optim.Muon on full matrices).
"""

import argparse
import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from arguments import check, parse
from checkpoints import Checkpoints
from corpus import Corpus, load
from gpt import GPT
from setups import SETUPS, Setup
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from mfsdp.checkpoint import CheckpointError
from mfsdp.comm_counter import CommCounter

COUNTERS = {"step", "failures"}
"""Names of optimizer state that is one number for each parameter; plans do not count it."""


@dataclass
class Result:
    """What a run came to.

    Attributes:
        validation_losses: nats per byte, before the first step and at each progress line.
        train_losses: nats per byte, of each step's batch over all ranks.
        comm: what this rank's optimizer steps communicated, in the steps that were counted.
        steps_counted: how many these were.
    """

    validation_losses: list[float] = field(default_factory=list)
    train_losses: list[float] = field(default_factory=list)
    comm: CommCounter = field(default_factory=CommCounter)
    steps_counted: int = 0


class Trainer:
    """The loop: the same whatever shards the model."""

    def __init__(self, args: argparse.Namespace, mesh: DeviceMesh) -> None:
        check(args, mesh.size())
        self.args, self.mesh = args, mesh
        self.corpus: Corpus = load(args.data, args.context)
        torch.manual_seed(args.seed)  # every rank starts from the same weights
        model = GPT(args.width, args.layers, args.heads, args.context).to(mesh.device_type)
        say(f"{sum(param.numel() for param in model.parameters()):,} parameters on {mesh.size()} ranks")
        say(f"{len(self.corpus.train):,} bytes of training text: {self.corpus.source}")
        self.setup: Setup = SETUPS[args.baseline](model, mesh, args)
        if self.setup.remark:
            say(self.setup.remark)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor(args.steps, args.warmup))
            for optimizer in self.setup.optimizers
        ]
        self.checkpoints = Checkpoints(args, self.setup, self.schedules)
        self.result = Result()

    def run(self) -> Result:
        """Train up to step ``args.steps``, with a progress line every ``args.report_every``."""
        args, result = self.args, self.result
        if self.setup.plan is not None:
            say(f"\n{self.setup.plan}")
        begun = self.checkpoints.resume() if args.resume else 0
        if args.resume:
            say(f"\ngoing on after step {begun}" if begun else f"\nno checkpoint in {args.checkpoint}: from the start")
        say("\n step   train loss   validation loss   tokens/s   optimizer step")
        result.validation_losses.append(self.validate())
        say(f"{begun:5d} {'':12} {result.validation_losses[0]:17.3f}")
        clock = Clock(self.mesh.device_type)
        for step in range(begun + 1, args.steps + 1):
            reporting = step % args.report_every == 0 or step == args.steps
            with clock.time("gradients"):
                result.train_losses.append(self.compute_gradients(step))
            # Counting slows a step down, so that a step is either timed or counted.
            with result.comm if reporting else clock.time("step"):
                for optimizer in self.setup.optimizers:
                    optimizer.step()
            for schedule in self.schedules:
                schedule.step()
            if reporting:
                result.steps_counted += 1
                result.validation_losses.append(self.validate())
                self.report(step, clock)
                clock = Clock(self.mesh.device_type)
            if args.save_every and (step % args.save_every == 0 or step == args.steps):
                self.checkpoints.save(step)
        self.report_totals()
        return result

    def compute_gradients(self, step: int) -> float:
        """Forward and backward on this rank's share of the step's batch; the loss over all ranks.

        The batch follows from the seed and the step alone, so that a run that was resumed sees the same ones.
        """
        for optimizer in self.setup.optimizers:
            optimizer.zero_grad()
        seed = self.args.seed * 1_000_003 + step
        pieces = self.corpus.batch(self.corpus.train, self.args.batch, self.args.context, seed)
        loss = self.loss_of(pieces)
        loss.backward()
        return self.mean_over_ranks(loss.detach())

    @torch.no_grad()
    def validate(self) -> float:
        """The loss on validation text, the same text each time."""
        pieces = self.corpus.batch(self.corpus.validation, 2 * self.args.batch, self.args.context, seed=0)
        return self.mean_over_ranks(self.loss_of(pieces))

    def loss_of(self, pieces: Sequence[Tensor]) -> Tensor:
        """The loss of this rank's share of a batch; all ranks together see the same whatever their number."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        tokens, targets = (piece.chunk(ranks)[rank].to(self.mesh.device_type) for piece in pieces)
        # FSDP casts the parameters itself.
        casting = self.args.dtype == "bf16" and self.args.baseline == "ddp"
        with torch.autocast(self.mesh.device_type, torch.bfloat16) if casting else nullcontext():
            return self.setup.model(tokens, targets)

    def mean_over_ranks(self, value: Tensor) -> float:
        total = value.clone()
        dist.all_reduce(total)
        return total.item() / self.mesh.size()

    def report(self, step: int, clock: "Clock") -> None:
        """One progress line."""
        result = self.result
        tokens = self.args.batch * self.args.context * clock.calls["gradients"] / clock.total()
        step_time = f"{clock.mean('step') * 1e3:.1f} ms" if clock.calls["step"] else "-"
        say(
            f"{step:5d} {result.train_losses[-1]:12.3f} {result.validation_losses[-1]:17.3f} "
            f"{tokens:10,.0f} {step_time:>16}"
        )

    def report_totals(self) -> None:
        """What each rank holds, and what the optimizer steps communicated."""
        say()
        comm = self.result.comm
        mine = [self.resident_bytes(), comm.collectives, comm.bytes]
        everywhere = [torch.empty(3, dtype=torch.int64, device=self.mesh.device_type) for _ in range(self.mesh.size())]
        dist.all_gather(everywhere, torch.tensor(mine, device=self.mesh.device_type))
        for rank, (held, _, _) in enumerate(torch.stack(everywhere).tolist()):
            planned = f"; the plan says {self.setup.plan.loads()[rank].resident_bytes:,}" if self.setup.plan else ""
            say(f"rank {rank} holds {held:,} bytes of parameters, gradients and optimizer state{planned}")
        _, collectives, nbytes = torch.stack(everywhere).sum(0).tolist()
        say(
            f"collectives in the {self.result.steps_counted} counted optimizer steps, over all ranks: "
            f"{collectives:,}, with {nbytes:,} bytes"
        )

    def resident_bytes(self) -> int:
        """Bytes that this rank holds: parameters, gradients and optimizer state, without counters."""
        groups = [group for optimizer in self.setup.optimizers for group in optimizer.param_groups]
        params = [param for group in groups for param in group["params"]]
        states = [state for optimizer in self.setup.optimizers for state in optimizer.state.values()]
        held = [*params, *(param.grad for param in params)]
        held += [value for state in states for name, value in state.items() if name not in COUNTERS]
        locals_ = [value.to_local() if isinstance(value, DTensor) else value for value in held]
        return sum(local.numel() * local.element_size() for local in locals_ if local is not None)


class Clock:
    """Seconds spent in each of several activities."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @contextmanager
    def time(self, activity: str) -> Iterator[None]:
        began = self._now()
        yield
        self.seconds[activity] += self._now() - began
        self.calls[activity] += 1

    def mean(self, activity: str) -> float:
        return self.seconds[activity] / self.calls[activity]

    def total(self) -> float:
        return sum(self.seconds.values())

    def _now(self) -> float:
        if self._device_type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def learning_rate_factor(steps: int, warmup: int) -> Callable[[int], float]:
    """Step -> what learning rates are multiplied by: rising over the warm-up, then falling to 0."""
    warmup = min(warmup, steps)

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else (steps - step) / max(1, steps - warmup)

    return factor


def say(message: str = "") -> None:
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def main() -> None:
    args = parse(ranks=int(os.environ.get("WORLD_SIZE", 1)))  # torchrun sets it
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:  # and this
        dist.init_process_group()
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        Trainer(args, init_device_mesh(device_type, (dist.get_world_size(),))).run()
    except (ValueError, CheckpointError) as error:  # what the user asked for cannot be had, on any rank
        say(f"train_lm: {error}")
        sys.exit(2)
    finally:
        gc.collect()  # sharded modules are cycles; what they hold of the group must not outlive it
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
