"""How long planning takes, and how even plans of public models are.

``python examples/benchmark/planner.py time`` plans models of up to 100,000 parameters for up to 1,024 ranks, on
one core, and prints CPU seconds and the memory of the process. ``... evenness`` prints the table of the README.
"""

import argparse
import gc
import os
import platform
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from mfsdp.planning import ParameterSpec, Role, plan_specs
from mfsdp.planning.catalogue import catalogue_specs, model_names
from mfsdp.planning.cost import MuonCost
from mfsdp.planning.summary import Summary

LAYER = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
PARAMETERS = (1_000, 10_000, 100_000)
RANKS = (8, 64, 256, 1024)
NO_CAP = 1 << 62


def model(parameters: int, distinct: bool) -> list[ParameterSpec]:
    """``parameters`` in layers of 7 matrices and 3 vectors; with ``distinct``, no two matrices are alike."""
    rng = random.Random(0)
    specs = []
    for number in range(parameters):
        layer, index = divmod(number, len(LAYER) + 3)
        unit = f"layers.{layer}"
        if index >= len(LAYER):
            specs.append(ParameterSpec(f"{unit}.vector{index}", Role.TAIL, (4096,), torch.float32, unit))
            continue
        shape = (rng.randint(64, 8192), rng.randint(64, 8192)) if distinct else LAYER[index]
        specs.append(ParameterSpec(f"{unit}.matrix{index}.weight", Role.MATRIX, shape, torch.float32, unit))
    return specs


def seconds(specs: Sequence[ParameterSpec], ranks: int, repeats: int) -> float:
    """The least CPU seconds of a few runs: what planning itself takes, whatever else the machine does."""
    found = []
    for _ in range(repeats):
        gc.collect()
        start = time.process_time()
        plan_specs(specs, ranks)
        found.append(time.process_time() - start)
    return min(found)


def times(largest: int, repeats: int) -> Iterator[str]:
    """The rows of the table of times."""
    yield "| parameters | shapes | " + " | ".join(f"{ranks:,} ranks" for ranks in RANKS) + " |"
    yield "|---:|---|" + "---:|" * len(RANKS)
    for parameters in (number for number in PARAMETERS if number <= largest):
        for distinct in (False, True):
            specs = model(parameters, distinct)
            cells = (f"{seconds(specs, ranks, repeats):.3f} s" for ranks in RANKS)
            yield f"| {parameters:,} | {'all different' if distinct else '5'} | {' | '.join(cells)} |"


def _limit(summary: Summary) -> str:
    """What keeps operations or bytes above 1.05, in a few words."""
    (flops, nbytes), reached = summary.ratios, summary.reached
    found = []
    for what, ratio, bound, value in zip(("step", "bytes"), (flops, nbytes), summary.bounds, reached, strict=True):
        if ratio <= 1.05:
            continue
        if value <= 1.01 * bound.value:
            found.append(f"{what}: {bound.value / bound.simple:.3f} is proven to be least, {bound.reason}")
            continue
        entries = [entry.spec for entry in summary.plan.entries.values()]
        free = Summary(plan_specs(entries, summary.plan.world_size, bytes_cap=NO_CAP), summary.cost_model)
        found.append(
            f"{what}: the cap on bytes; without it {free.ratios[0]:.3f} with bytes {free.ratios[1]:.3f}; "
            f"{bound.value / bound.simple:.3f} is proven to be least"
        )
    return "; ".join(found)


def evenness(models: Sequence[str]) -> Iterator[str]:
    """The rows of the table of plans."""
    yield "| model | ranks | matrices | idle ranks | step | bytes | what is in the way |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for name in models:
        for ranks in RANKS:
            made = plan_specs(catalogue_specs(name), ranks)
            summary = Summary(made, MuonCost())
            loads = made.loads()
            idle = sum(not load.matrices for load in loads)
            flops, nbytes = summary.ratios
            yield (
                f"| {name} | {ranks:,} | {sum(load.matrices for load in loads):,} | {idle} | {flops:.3f} | "
                f"{nbytes:.3f} | {_limit(summary)} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("time", "evenness"))
    parser.add_argument("--largest", type=int, default=PARAMETERS[-1], help="most parameters to time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=model_names(), default=model_names())
    parsed = parser.parse_args(arguments)
    if parsed.table == "evenness":
        print("\n".join(evenness(parsed.models)))
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print("\n".join(times(parsed.largest, parsed.repeats)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"\nCPU seconds, least of {parsed.repeats}, one core of {platform.machine()}, Python "
        f"{platform.python_version()}. Memory of the process: {after / 1024:.0f} MiB, of which "
        f"{before / 1024:.0f} MiB before planning."
    )


if __name__ == "__main__":
    sys.exit(main())
