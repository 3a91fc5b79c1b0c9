"""Training by several systems in turns in one run, and what each of them cost.

All train the same GPT on the same text. Times are those of the slowest rank. ``mfsdp`` runs twice: what the two runs
differ by is noise. Collectives and bytes of an optimizer step are counted at the process group, of the rank that hands
most to it, and at the network interface.
"""

import argparse
import copy
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from chart import Bars
from launching import Wire, launch, slowest, world, write_results
from options import positive
from report import Column, Table, factor, mib
from systems import AGAIN, OURS, SYSTEMS, add_model_arguments, model_of
from timing import in_order, milliseconds, noise, ratio, spread
from torch import Tensor

import mfsdp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import corpus
from setups import Setup

STOCK = "On gloo DTensor replaces all-to-all by all-gather, so that stock would be faster on NCCL."
CORES = "All ranks share this machine's cores, so that a rank's arithmetic is slower the more ranks there are"


@dataclass
class Measured:
    """One rank's numbers for one system.

    Attributes:
        backward: seconds of forward and backward, by round.
        step: seconds of the optimizer step, by round.
        losses: by round, the warm-up first.
        collectives: of one optimizer step.
        given: bytes that this rank handed to them.
        got: bytes that it got from them.
        wire_sent, wire_received: bytes at the interface during a step, this rank's share, by round.
    """

    backward: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    collectives: int = 0
    given: int = 0
    got: int = 0
    wire_sent: list[float] = field(default_factory=list)
    wire_received: list[float] = field(default_factory=list)


def add_comparison_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """The model, and which systems train it how often."""
    add_model_arguments(parser)
    parser.add_argument("--rounds", type=positive, default=rounds, help="training steps, beside one that warms up")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))


def work(args: argparse.Namespace) -> None:
    """One rank."""
    with world() as mesh:
        model = model_of(args)
        setups = {name: SYSTEMS[name](copy.deepcopy(model), mesh) for name in dict.fromkeys([OURS, *args.systems])}
        setups[AGAIN] = SYSTEMS[OURS](copy.deepcopy(model), mesh)
        text = corpus.load(None, args.context)
        results = {name: Measured() for name in setups}
        for number in range(args.rounds + 1):
            tokens, targets = text.batch(text.train, args.batch, args.context, number * mesh.size() + dist.get_rank())
            for name in in_order(setups, number):
                _train(setups[name], tokens, targets, results[name], warm_up=number == 0)
        write_results({name: asdict(measured) for name, measured in results.items()})


def _train(setup: Setup, tokens: Tensor, targets: Tensor, measured: Measured, warm_up: bool) -> None:
    """One training step; the one that warms up is not timed, but counted, which costs time."""
    dist.barrier()
    start = time.perf_counter()
    loss = setup.model(tokens, targets)
    loss.backward()
    dist.barrier()
    middle, before = time.perf_counter(), Wire.now()
    with mfsdp.CommCounter() if warm_up else nullcontext() as counter:
        for optimizer in setup.optimizers:
            optimizer.step()
    end = time.perf_counter()
    dist.barrier()
    wire = Wire.now() - before
    if counter is not None:
        measured.collectives, measured.given, measured.got = counter.collectives, counter.bytes, counter.received
    else:
        measured.backward.append(middle - start)
        measured.step.append(end - middle)
        measured.wire_sent.append(wire.sent)
        measured.wire_received.append(wire.received)
    measured.losses.append(loss.item())
    for optimizer in setup.optimizers:
        optimizer.zero_grad()


@dataclass(frozen=True)
class Result:
    """One system's numbers over all ranks.

    As :class:`Measured`, with ``whole`` for the seconds of a training step; of the bytes at the interface, the mean of
    the ranks in the round in which it is least: other programs use it, too.
    """

    system: str
    step: list[float]
    whole: list[float]
    losses: list[float]
    collectives: int
    given: int
    got: int
    wire_sent: float
    wire_received: float

    @staticmethod
    def of(system: str, ranks: list[Measured]) -> "Result":
        step, backward = slowest(rank.step for rank in ranks), slowest(rank.backward for rank in ranks)
        most = max(ranks, key=lambda rank: rank.given)
        return Result(
            system,
            step,
            [first + second for first, second in zip(backward, step, strict=True)],
            [statistics.mean(values) for values in zip(*(rank.losses for rank in ranks), strict=True)],
            most.collectives,
            most.given,
            most.got,
            *(
                min(statistics.mean(together) for together in zip(*by_round, strict=True))
                for by_round in ([rank.wire_sent for rank in ranks], [rank.wire_received for rank in ranks])
            ),
        )


def measure(ranks: int, nodes: int = 0, rate: str = "1gbit", arguments: list[str] | None = None) -> list[Result]:
    """Train on so many ranks, see :func:`launching.launch`; mfsdp comes first."""
    by_rank: list[dict[str, Any]] = launch(ranks, nodes, rate, arguments or [])
    return [Result.of(name, [Measured(**rank[name]) for rank in by_rank]) for name in by_rank[0]]


STEP_COLUMNS = (
    Column("system", "", str),
    Column("step", "optimizer step", milliseconds),
    Column("step_ratio", "over mfsdp", factor),
    Column("whole", "training step", milliseconds),
    Column("whole_ratio", "over mfsdp", factor),
    Column("collectives", "collectives in a step", "{:,}".format),
    Column("given", "bytes given to them", mib),
    Column("got", "bytes got from them", mib),
    Column("wire_sent", "sent by the interface", mib),
    Column("wire_received", "received", mib),
)


def with_ratios(results: list[Result]) -> list[dict[str, Any]]:
    """The results as rows, with ``step_ratio`` and ``whole_ratio`` over mfsdp's."""
    ours = results[0]
    return [
        {
            **asdict(result),
            "step_ratio": ratio(result.step, ours.step),
            "whole_ratio": ratio(result.whole, ours.whole),
        }
        for result in results
    ]


def noise_notes(results: list[Result]) -> list[str]:
    """What the two runs of mfsdp differ by."""
    ours = results[0]
    again = next(result for result in results if result.system == AGAIN)
    return [
        noise("mfsdp's optimizer step", ours.step, again.step),
        noise("mfsdp's training step", ours.whole, again.whole),
    ]


def step_table(title: str, results: list[Result], notes: tuple[str, ...] = (), plot: bool = True) -> Table:
    """Everything about the steps of all systems, at one number of ranks."""
    charts = step_charts(title, results) if plot else []
    return Table(title, STEP_COLUMNS, with_ratios(results), [*notes, *noise_notes(results)], charts)


def step_charts(title: str, results: list[Result]) -> list[Bars]:
    """The times of all systems."""
    return [
        Bars(
            f"{what}, {title}",
            "milliseconds, median; the line is the spread",
            {result.system: statistics.median(times(result)) * 1e3 for result in results},
            log=log,
            errors={
                result.system: statistics.median(times(result)) * spread(times(result)) * 1e3 for result in results
            },
        )
        for what, times, log in (
            ("optimizer step", lambda result: result.step, True),
            ("training step", lambda result: result.whole, False),
        )
    ]
