"""What a benchmark found, as Markdown, JSON and a picture, with everything that the figures depend on."""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chart import MISSING, Chart, can_draw, draw
from machine import Machine


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: of its values in the rows.
        heading: what is printed above it.
        show: how a value is printed; None is printed as an empty cell.
    """

    key: str
    heading: str
    show: Callable[[Any], str] = str

    def cell(self, row: Mapping[str, Any]) -> str:
        value = row.get(self.key)
        return "" if value is None else self.show(value)


@dataclass(frozen=True)
class Table:
    """Rows that belong together.

    Attributes:
        title: what tells it from the report's other tables.
        columns: what is printed of each row; the first column is aligned to the left.
        rows: all numbers, which the JSON file holds as they are.
        notes: on noise, and on what is special.
        charts: for the picture.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    charts: Sequence[Chart] = ()

    def markdown(self) -> str:
        lines = [
            "| " + " | ".join(column.heading for column in self.columns) + " |",
            "|---|" + "---:|" * (len(self.columns) - 1),
            *("| " + " | ".join(column.cell(row) for column in self.columns) + " |" for row in self.rows),
        ]
        notes = ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join([f"## {self.title}", "", *lines, *notes])


class Report:
    """The tables of one run of a benchmark; printed, and written, as they come.

    Args:
        args: with what :func:`options.benchmark_parser` adds.
        title: what is measured.
        measured: shapes, batch size and repeats, as one line.
        limits: what limits the figures, as one line.
        threads: torch's in each process that is measured; None for those of this one.

    Raises:
        SystemExit: a picture is wanted, and matplotlib is missing.
    """

    def __init__(
        self, args: argparse.Namespace, title: str, measured: str, limits: str, threads: int | None = None
    ) -> None:
        self._stem: Path | None = args.output
        self._plot = not args.no_plot
        if self._stem and self._plot and not can_draw():
            raise SystemExit(MISSING)
        self.title, self.measured, self.limits = title, measured, limits
        self.machine = Machine.here(threads)
        self.command = shlex.join(["python", *_from_root(sys.argv)])
        self.tables: list[Table] = []
        print(self._head(), flush=True)

    def add(self, table: Table) -> None:
        """Print a table, and write the files anew."""
        self.tables.append(table)
        print(f"\n{table.markdown()}", flush=True)
        if self._stem:
            self._write(self._stem)

    def _head(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.machine.versions.items())
        return "\n".join(
            [
                f"# {self.title}",
                "",
                f"    {self.command}",
                "",
                f"- measured: {self.measured}",
                f"- machine: {self.machine}",
                f"- versions: {versions}",
                f"- limits: {self.limits}",
            ]
        )

    def _write(self, stem: Path) -> None:
        stem.parent.mkdir(parents=True, exist_ok=True)
        name = str(stem)
        text = "\n\n".join([self._head(), *(table.markdown() for table in self.tables)])
        Path(f"{name}.md").write_text(f"{text}\n")
        numbers = {
            "title": self.title,
            "command": self.command,
            "measured": self.measured,
            "machine": asdict(self.machine),
            "limits": self.limits,
            "tables": [{"title": table.title, "rows": table.rows, "notes": table.notes} for table in self.tables],
        }
        Path(f"{name}.json").write_text(json.dumps(numbers, indent=1) + "\n")
        charts = [chart for table in self.tables for chart in table.charts]
        if self._plot and charts:
            draw(charts, self.title, f"{self.measured}\n{self.machine}", Path(f"{name}.png"))


def _from_root(command: list[str]) -> list[str]:
    """The command as it would be given in the repository's root."""
    script = Path(command[0]).resolve()
    return [script.relative_to(script.parents[2]).as_posix(), *command[1:]]


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"


def factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"
