"""A plan as text that a person can read, at most 100 columns wide."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from textwrap import fill
from typing import TYPE_CHECKING

from mfsdp.planning.dtypes import dtype_name
from mfsdp.planning.loads import RankLoad
from mfsdp.planning.records import MatrixShard, Role

if TYPE_CHECKING:
    from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["elementwise_note", "format_bytes", "format_count", "format_flops", "grid", "page", "table"]

WIDTH = 100
_ALL_ENTRIES = 40
"""Up to so many parameters are listed one by one; beyond, those that differ in a number are one line."""
_ALL_RANKS = 16
"""Up to so many ranks are listed; beyond, the busiest and the idlest."""


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """Three significant digits and the largest unit that leaves at least 1 before the point."""
    exponent = 0
    while value >= base - 0.5 and exponent < len(units) - 1:
        value /= base
        exponent += 1
    digits = 0 if exponent == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[exponent]}".rstrip()


def format_bytes(nbytes: float) -> str:
    """``1536`` -> ``"1.50 KiB"``."""
    return _scaled(nbytes, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"])


def format_flops(flops: float) -> str:
    """``2.5e12`` -> ``"2.50 TFLOP"``."""
    return _scaled(flops, 1000, ["FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"])


def format_count(count: float) -> str:
    """``124_000_000`` -> ``"124 M"``."""
    return _scaled(count, 1000, ["", "k", "M", "G", "T"])


def grid(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """Columns aligned under ``header``; the first ``left`` of them to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def shorten(name: str, width: int) -> str:
    """``name``, its middle left out where it is longer than ``width``."""
    if len(name) <= width:
        return name
    tail = width * 2 // 3
    return f"{name[: width - tail - 1]}…{name[len(name) - tail :]}"


def _ranges(numbers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2,5"``."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _owners(entries: Sequence[MatrixShard]) -> str:
    owners = {entry.owner for entry in entries if entry.owner is not None}
    owners |= {part.owner for entry in entries for part in entry.parts}
    if not owners:
        return "all"
    text = _ranges(owners)
    return text if len(text) <= 12 else f"{len(owners)} ranks"


def _head(plan: "ShardPlan") -> str:
    units = len({entry.unit for entry in plan.entries.values()})
    elements = sum(entry.numel for entry in plan.entries.values())
    ranks = f"{plan.world_size} ranks" + (f" x {plan.replicas} replicas" if plan.replicas > 1 else "")
    head = (
        f"ShardPlan for {ranks}: {len(plan.entries)} parameters, {format_count(elements)} elements, "
        f"{units} units, cost model {plan.cost_model}"
    )
    return fill(head, WIDTH, subsequent_indent="  ")


def _roles(plan: "ShardPlan") -> list[str]:
    rows = []
    for role in Role:
        entries = [entry for entry in plan.entries.values() if entry.role is role]
        if entries:
            rows.append(
                [
                    role.name,
                    str(len(entries)),
                    format_count(sum(entry.numel for entry in entries)),
                    format_bytes(sum(entry.resident_bytes for entry in entries)),
                    format_flops(sum(entry.step_flops for entry in entries)),
                    _owners(entries),
                ]
            )
    return grid(["role", "parameters", "elements", "resident", "step", "owners"], rows)


def _of_mean(value: int, mean: float) -> str:
    return f"{value / mean:.3f}" if mean else "-"


def _rank_rows(plan: "ShardPlan") -> Iterable[list[str]]:
    loads = plan.loads()
    flops = fmean(load.step_flops for load in loads)
    nbytes = fmean(load.resident_bytes for load in loads)

    def row(label: str, load: RankLoad) -> list[str]:
        return [
            label,
            str(load.matrices),
            format_flops(load.step_flops),
            _of_mean(load.step_flops, flops),
            format_bytes(load.resident_bytes),
            _of_mean(load.resident_bytes, nbytes),
        ]

    if len(loads) <= _ALL_RANKS:
        for rank, load in enumerate(loads):
            yield row(str(rank), load)
        return
    order = sorted(range(len(loads)), key=lambda rank: (-loads[rank].step_flops, rank))
    for rank in order[:4]:
        yield row(str(rank), loads[rank])
    yield [f"({len(loads) - 8} more)", "", "", "", "", ""]
    for rank in order[-4:]:
        yield row(str(rank), loads[rank])


def _imbalance(plan: "ShardPlan") -> str:
    imbalance = plan.imbalance()
    return (
        f"largest over mean: step {imbalance.step_flops:.3f}, resident {imbalance.resident_bytes:.3f}, "
        f"matrices {imbalance.matrices:.3f}"
    )


def _entry_rows(plan: "ShardPlan") -> Iterable[list[str]]:
    entries = list(plan.entries.values())
    if len(entries) <= _ALL_ENTRIES:
        groups = [(entry.name, [entry]) for entry in entries]
    else:
        merged: defaultdict[tuple[object, ...], list[MatrixShard]] = defaultdict(list)
        for entry in entries:
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name)
            merged[pattern, entry.role, entry.shape, entry.dtype].append(entry)
        groups = [(str(key[0]), group) for key, group in merged.items()]
    for name, group in groups:
        first = group[0]
        yield [
            shorten(name, 36),
            first.role.name,
            "x".join(map(str, first.shape)) or "scalar",
            dtype_name(first.dtype),
            str(len(group)),
            format_bytes(sum(entry.resident_bytes for entry in group)),
            format_flops(sum(entry.step_flops for entry in group)),
            _owners(group),
        ]


def _entries(plan: "ShardPlan") -> list[str]:
    header = ["parameter", "role", "shape", "dtype", "n", "resident", "step", "owners"]
    rows = list(_entry_rows(plan))
    if all(row[4] == "1" for row in rows):  # every line is one parameter
        header, rows = [*header[:4], *header[5:7], "owner"], [[*row[:4], *row[5:]] for row in rows]
    return grid(header, rows, left=4)


def table(plan: "ShardPlan") -> str:
    """``plan`` as a table: roles, ranks, how even they are, and the parameters."""
    rank_header = ["rank", "matrices", "step", "of mean", "resident", "of mean"]
    sections = [
        [_head(plan)],
        _roles(plan),
        [*grid(rank_header, _rank_rows(plan)), _imbalance(plan)],
        _entries(plan),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def elementwise_note(plan: "ShardPlan") -> str | None:
    """That parameters of 3 or more dimensions are stepped elementwise, if any are."""
    tails = [entry.name for entry in plan.entries.values() if entry.role is Role.TAIL and len(entry.shape) > 2]
    if not tails:
        return None
    return (
        f"{len(tails)} parameter{'s' * (len(tails) > 1)} of 3 or more dimensions stepped elementwise, such as "
        f"{tails[0]}; name the matrices with splits= if there are any in it."
    )


def page(plan: "ShardPlan") -> str:
    """The table, and below it what the user may not have meant."""
    note = elementwise_note(plan)
    return "\n\n".join([table(plan), *([fill(f"note: {note}", WIDTH, subsequent_indent="  ")] if note else [])])
