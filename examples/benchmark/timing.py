"""Times of repeated work, in seconds: their middle, their spread, and what two runs of the same differ by."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

MEDIAN = "median ± half of the distance between the quartiles"
SLOWEST = f"of the slowest rank, {MEDIAN}"


def spread(times: Sequence[float]) -> float:
    """Half of the distance between the quartiles, over the median; 0 for a single time."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def milliseconds(times: Sequence[float]) -> str:
    """Median and spread, as a cell of a table."""
    median = statistics.median(times) * 1e3
    digits = 0 if median >= 100 else 1 if median >= 10 else 2 if median >= 1 else 3
    return f"{median:,.{digits}f} ms ± {spread(times):.0%}"


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Median of ``times`` over that of ``reference``."""
    return statistics.median(times) / statistics.median(reference)


def noise(what: str, times: Sequence[float], again: Sequence[float]) -> str:
    """A note on what two runs of the same thing, in turns with everything else, differ by."""
    return f"noise: two runs of {what} differ by {abs(ratio(again, times) - 1):.1%}."


def slowest_rank(call: Callable[[], object]) -> float:
    """Seconds of a call that all ranks start together, on the rank that takes longest; the same on every rank."""
    taken = torch.tensor(own_time(call), dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


def own_time(call: Callable[[], object]) -> float:
    """Seconds that a call takes on this rank, when all ranks start it together."""
    dist.barrier()
    return seconds(call)


def until_all(call: Callable[[], object]) -> float:
    """Seconds until all ranks have done a call that they start together."""

    def run() -> None:
        call()
        dist.barrier()

    return own_time(run)


def seconds(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_order(names: Iterable[str], number: int) -> list[str]:
    """The order of a round: every other one is the opposite, so that nothing always runs after the same neighbour."""
    return list(names)[:: 1 if number % 2 else -1]


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    clock: Callable[[Callable[[], object]], float] = seconds,
) -> dict[str, list[float]]:
    """Times of each call by round.

    In a round each is called once, see :func:`in_order`, so that other load on the machine hits all alike.

    Args:
        calls: by name.
        rounds: how often each is timed.
        warm_up: rounds before those.
        clock: what times a call.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name in in_order(calls, number):
            taken = clock(calls[name])
            if number >= warm_up:
                times[name].append(taken)
    return times
