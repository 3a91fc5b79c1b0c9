"""Pictures of results, by matplotlib, which is an optional extra of the package (``plots``)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MISSING = "plots need matplotlib (pip install 'mfsdp[plots]'); --no-plot does without."
SUFFIX = " (again)"
"""Of the second run of a variant, which shows the noise: drawn paler."""


def can_draw() -> bool:
    """Whether matplotlib is there."""
    return find_spec("matplotlib") is not None


@dataclass(frozen=True)
class Bars:
    """One value for each name, as horizontal bars, or as points on a logarithmic axis.

    Attributes:
        title: what the values are.
        unit: of the values.
        values: name to value.
        log: whether the axis is logarithmic.
        errors: name to half of the spread, in the same unit.
        predicted: name to what was predicted, drawn as a mark.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    log: bool = False
    errors: Mapping[str, float] | None = None
    predicted: Mapping[str, float] | None = None

    def draw(self, axes: "Axes", colours: Mapping[str, str]) -> None:
        ours = [name for name in self.values if name.startswith("mfsdp")] or list(self.values)[:1]
        for name, value in self.values.items():
            error = (self.errors or {}).get(name)
            style: dict[str, Any] = {
                "color": "tab:blue" if name in ours else "tab:gray",
                "alpha": 0.5 if SUFFIX in name else 1,
            }
            if self.log:  # which has no zero for a bar to start from
                axes.errorbar(value, name, xerr=error, fmt="o", ms=8, capsize=3, **style)
            else:
                axes.barh(name, value, xerr=error, ecolor="black", capsize=3, **style)
            axes.annotate(
                _short(value), (value + (error or 0), name), (7, 0), textcoords="offset points", va="center", size=8
            )
        if self.predicted:
            marks = [name for name in self.values if name in self.predicted]
            axes.plot([self.predicted[name] for name in marks], marks, "|", color="tab:red", ms=18, label="predicted")
            axes.legend(fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(self.unit)
        axes.set_title(self.title, fontsize=10)
        axes.margins(x=0.2)
        if self.log:
            axes.set_xscale("log")
            axes.margins(y=0.15)
            axes.grid(axis="x", alpha=0.3)
            _plain_ticks(axes.xaxis)
        axes.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Lines:
    """Series of values over a common axis.

    Attributes:
        title: what the values are.
        unit: of the values.
        axis: what ``at`` counts.
        at: the places on the axis.
        series: name to values, one for each place; None where there is none.
        log: whether the axis of the values is logarithmic.
        log_axis: whether the other one is, with base 2.
    """

    title: str
    unit: str
    axis: str
    at: Sequence[float]
    series: Mapping[str, Sequence[float | None]]
    log: bool = False
    log_axis: bool = False

    def draw(self, axes: "Axes", colours: Mapping[str, str]) -> None:
        for name, values in self.series.items():
            found = [(place, value) for place, value in zip(self.at, values, strict=True) if value is not None]
            again = SUFFIX in name
            marker = "o" if len(found) < 20 else ""
            places, heights = zip(*found, strict=True) if found else ((), ())
            axes.plot(places, heights, color=colours[name], marker=marker, ms=4, ls=":" if again else "-", label=name)
        if self.log_axis:
            axes.set_xscale("log", base=2)
            axes.set_xticks(self.at, [f"{place:,g}" for place in self.at])
        if self.log:
            axes.set_yscale("log")
            _plain_ticks(axes.yaxis)
        elif all(value is None or value >= 0 for values in self.series.values() for value in values):
            axes.set_ylim(bottom=0)
        axes.set_xlabel(self.axis)
        axes.set_ylabel(self.unit)
        axes.set_title(self.title, fontsize=10)
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)


Chart = Bars | Lines


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _plain_ticks(axis: "Axis") -> None:
    """1, 2, 5, 10, ... where there is room for them, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def draw(charts: Sequence[Chart], title: str, note: str, file: Path) -> None:
    """All charts in one picture, two beside each other, with a title above and a note below them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(6.4 * columns, 3.6 * rows + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel(note, fontsize=7, color="gray")
    names = dict.fromkeys(name for chart in charts if isinstance(chart, Lines) for name in chart.series)
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for number, chart in enumerate(charts, 1):
        chart.draw(figure.add_subplot(rows, columns, number), colours)
    figure.savefig(file, dpi=120)
