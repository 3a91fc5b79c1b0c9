"""Everything that can be said about a plan without running it, as text and as JSON."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean
from textwrap import fill
from typing import Any

from mfsdp.planning.advice import advice, bounds
from mfsdp.planning.bounds import LowerBound
from mfsdp.planning.comparison import Scheme, compare
from mfsdp.planning.cost import CostModel
from mfsdp.planning.planner import plan_specs
from mfsdp.planning.rates import Rates
from mfsdp.planning.report import WIDTH, format_bytes, format_flops, grid, table
from mfsdp.planning.shard_plan import ShardPlan
from mfsdp.planning.traffic import replica_bytes, unit_traffic

__all__ = ["Summary"]

_EVEN = 1.05
"""Above this ratio to the bound, the summary says what stops the plan from being more even."""


@dataclass(frozen=True)
class Summary:
    """A plan with its context.

    Args:
        plan: who owns what.
        cost_model: the one that the plan was made with.
        rates: how fast a device is, if step times are to be estimated.
        capped: whether the plan was made under a cap of the user's.
    """

    plan: ShardPlan
    cost_model: CostModel
    rates: Rates | None = None
    capped: bool = False

    @cached_property
    def bounds(self) -> tuple[LowerBound, LowerBound]:
        """Of the largest operations, of the largest bytes."""
        return bounds(self.plan)

    @cached_property
    def schemes(self) -> list[Scheme]:
        """The plan beside other ways to shard."""
        return compare(self.plan, self.cost_model)

    @cached_property
    def reached(self) -> tuple[int, int]:
        """The largest operations, the largest bytes."""
        loads = self.plan.loads()
        return max(load.step_flops for load in loads), max(load.resident_bytes for load in loads)

    @cached_property
    def ratios(self) -> tuple[float, float]:
        """How far operations and bytes are above ``max(mean, largest item)``."""
        ratios = [
            reached / bound.simple if bound.simple else 1.0
            for reached, bound in zip(self.reached, self.bounds, strict=True)
        ]
        return ratios[0], ratios[1]

    def limits(self) -> Iterator[str]:
        """Why operations or bytes are more than 5% above ``max(mean, largest item)``, if they are."""
        formats = (("step", format_flops), ("resident", format_bytes))
        for (what, show), bound, reached in zip(formats, self.bounds, self.reached, strict=True):
            if reached <= _EVEN * bound.simple:
                continue
            if reached <= 1.01 * bound.value:
                yield f"{what}: no plan is below {show(bound.value)}, because of {bound.reason}."
            elif what == "step":
                yield from self._without_cap()
            else:
                yield f"{what}: bytes give way to operations; no plan is below {show(bound.value)}."

    def _without_cap(self) -> Iterator[str]:
        specs = [entry.spec for entry in self.plan.entries.values()]
        spread = any(entry.parts for entry in self.plan.entries.values())
        free = Summary(
            plan_specs(
                specs,
                self.plan.world_size,
                cost_model=self.cost_model,
                bytes_cap=1 << 62,
                spread_stacks=spread,
            ),
            self.cost_model,
        )
        cap = "the cap" if self.capped else "the default cap on bytes"
        yield (
            f"step: held back by {cap}. Without it the ratios are {free.ratios[0]:.3f} for the step and "
            f"{free.ratios[1]:.3f} for resident bytes; no plan is below {format_flops(self.bounds[0].value)}."
        )

    def text(self) -> str:
        """The summary for people, at most 100 columns wide."""
        sections = [
            table(self.plan),
            self._evenness(),
            self._traffic(),
            self._comparison(),
            *([self._times(self.rates)] if self.rates else []),
            "\n".join(fill(f"note: {line}", WIDTH, subsequent_indent="  ") for line in advice(self.plan)),
        ]
        return "\n\n".join(section for section in sections if section)

    def _evenness(self) -> str:
        rows = []
        formats = (("step", format_flops), ("resident", format_bytes))
        for (what, show), bound, reached, ratio in zip(formats, self.bounds, self.reached, self.ratios, strict=True):
            largest = show(bound.largest)
            rows.append([what, show(bound.mean), largest, show(reached), f"{ratio:.3f}", show(bound.value)])
        header = ["fullest rank", "mean", "with largest item", "planned", "ratio", "proven bound"]
        lines = [fill(line, WIDTH, subsequent_indent="  ") for line in self.limits()]
        return "\n".join([*grid(header, rows), *lines])

    def _traffic(self) -> str:
        precision = self.cost_model.precision
        units = unit_traffic(self.plan, precision)
        if not units:
            return ""
        owned = [unit for unit in units if unit.owners]
        largest = max(units, key=lambda unit: unit.gather_bytes)
        lines = [
            f"gather per pass {format_bytes(sum(unit.gather_bytes for unit in units))} in {len(units)} units, "
            f"reduce {format_bytes(sum(unit.reduce_bytes for unit in units))}",
            f"largest unit {largest.unit or '(root)'}: gather {format_bytes(largest.gather_bytes)}, "
            f"reduce {format_bytes(largest.reduce_bytes)}",
        ]
        if owned:
            lines.append(
                f"owners per unit {fmean(unit.owners for unit in owned):.1f}, the one with most has "
                f"{fmean(unit.largest_share for unit in owned):.0%} of it (means over units)"
            )
        if self.plan.replicas > 1:
            most = max(replica_bytes(self.plan, precision))
            factor = 2 * (self.plan.replicas - 1) / self.plan.replicas
            lines.append(
                f"all-reduce among {self.plan.replicas} replicas: up to {format_bytes(most)} of gradients per rank, "
                f"{format_bytes(most * factor)} sent in a ring"
            )
        return "\n".join(lines)

    def _comparison(self) -> str:
        header = ["fullest or busiest rank", "resident", "peak in step", "moved in step", "step"]
        rows = [
            [
                scheme.name,
                format_bytes(scheme.resident_bytes),
                format_bytes(scheme.peak_bytes),
                format_bytes(scheme.moved_bytes),
                format_flops(scheme.step_flops),
            ]
            for scheme in self.schemes
        ]
        return "\n".join(grid(header, rows))

    def _times(self, rates: Rates) -> str:
        seconds = self.step_seconds(rates)
        ideal = fmean(seconds)
        return (
            f"step on {rates.device}: {max(seconds):.4g} s on the busiest rank, {ideal:.4g} s if it were even "
            f"({max(seconds) / ideal if ideal else 1.0:.3f} times)"
        )

    def step_seconds(self, rates: Rates) -> list[float]:
        """The estimated time of the optimizer step, per rank."""
        seconds = [0.0] * self.plan.world_size
        for entry in self.plan.entries.values():
            nanoseconds = round(rates.seconds(entry.spec, entry.step_flops) * 1e9)
            for rank, part in entry.divide(nanoseconds, self.plan.world_size):
                seconds[rank] += part / 1e9
        return seconds

    def json(self) -> dict[str, Any]:
        """The summary for programs; ``"plan"`` is what :meth:`ShardPlan.from_json` reads."""
        names = ("step_flops", "resident_bytes")
        values: Sequence[tuple[str, LowerBound, int, float]] = list(
            zip(names, self.bounds, self.reached, self.ratios, strict=True)
        )
        found: dict[str, Any] = {
            "evenness": {
                name: {
                    "mean": bound.mean,
                    "largest_item": bound.largest,
                    "lower_bound": bound.value,
                    "planned": reached,
                    "ratio": ratio,
                }
                for name, bound, reached, ratio in values
            },
            "loads": [asdict(load) for load in self.plan.loads()],
            "units": [asdict(unit) for unit in unit_traffic(self.plan, self.cost_model.precision)],
            "replica_bytes": replica_bytes(self.plan, self.cost_model.precision),
            "comparison": [asdict(scheme) for scheme in self.schemes],
            "notes": [*self.limits(), *advice(self.plan)],
            "plan": json.loads(self.plan.to_json()),
        }
        if self.rates:
            found["step_seconds"] = self.step_seconds(self.rates)
        return found
