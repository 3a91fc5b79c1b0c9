"""A plan as a picture: one HTML file that needs nothing else, for any browser.

Two charts, step operations and resident bytes. Ranks are columns; what a rank owns is stacked in its column,
coloured by kind; hovering over a block shows its name. Blocks that would be too thin to see are merged.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from mfsdp.planning.records import MatrixShard, Role
from mfsdp.planning.report import format_bytes, format_flops
from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["plot"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 1160.0, 320.0, 90.0, 28.0, 8.0
_THIN = 1.5
"""Blocks lower than so many pixels are merged with their like on the same rank."""

_PALETTE = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e")
_ROWS, _TAILS = "#b8b8b8", "#6e6e6e"

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 24px; max-width: 1200px; color: #222; background: #fff; }
svg { display: block; margin: 4px 0 20px; } text { font-size: 11px; fill: #444; }
rect.block:hover { stroke: #000; stroke-width: 1.5; } line { stroke: #ccc; }
line.mean { stroke: #000; stroke-dasharray: 5 4; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 14px; vertical-align: -1px; }
""".strip()


@dataclass(frozen=True, slots=True)
class _Block:
    rank: int
    kind: str
    label: str
    flops: int
    nbytes: int

    def value(self, measure: str) -> int:
        return self.flops if measure == "step operations" else self.nbytes


def _kind(entry: MatrixShard) -> str:
    if entry.role is not Role.MATRIX:
        return entry.role.name
    return "x".join(map(str, entry.shape))


def _blocks(plan: ShardPlan) -> Iterator[_Block]:
    for entry in plan.entries.values():
        flops = entry.divide(entry.step_flops, plan.world_size)
        nbytes = entry.divide(entry.resident_bytes, plan.world_size)
        for (rank, operations), (_, held) in zip(flops, nbytes, strict=True):
            yield _Block(rank, _kind(entry), entry.name, operations, held)


def _colours(plan: ShardPlan) -> dict[str, str]:
    kinds = dict.fromkeys(_kind(entry) for entry in plan.entries.values() if entry.role is Role.MATRIX)
    colours = {kind: _PALETTE[number % len(_PALETTE)] for number, kind in enumerate(kinds)}
    return colours | {Role.ROWS.name: _ROWS, Role.TAIL.name: _TAILS}


def _merged(blocks: list[_Block], measure: str, least: float) -> Iterator[_Block]:
    """``blocks`` of one rank, those below ``least`` merged by kind."""
    thin: defaultdict[str, list[_Block]] = defaultdict(list)
    for block in blocks:
        if block.value(measure) >= least:
            yield block
        else:
            thin[block.kind].append(block)
    for kind, group in thin.items():
        label = group[0].label if len(group) == 1 else f"{len(group)} of {kind}: {group[0].label}, ..."
        yield _Block(
            group[0].rank,
            kind,
            label,
            sum(block.flops for block in group),
            sum(block.nbytes for block in group),
        )


def _chart(plan: ShardPlan, blocks: list[_Block], measure: str, colours: dict[str, str]) -> str:
    ranks: defaultdict[int, list[_Block]] = defaultdict(list)
    for block in blocks:
        ranks[block.rank].append(block)
    totals = [sum(block.value(measure) for block in ranks[rank]) for rank in range(plan.world_size)]
    top = max(totals) or 1
    show = format_flops if measure == "step operations" else format_bytes
    height, step = _HEIGHT - _BOTTOM - _TOP, (_WIDTH - _LEFT) / plan.world_size
    order = {kind: number for number, kind in enumerate(colours)}
    parts = list(_axes(plan, totals, top, show, step))
    for rank in range(plan.world_size):
        y = _HEIGHT - _BOTTOM
        merged = _merged(ranks[rank], measure, _THIN * top / height)
        for block in sorted(merged, key=lambda block: (order[block.kind], -block.value(measure))):
            tall = block.value(measure) * height / top
            y -= tall
            title = f"rank {rank}: {block.label}, {format_flops(block.flops)}, {format_bytes(block.nbytes)}"
            parts.append(
                f'<rect class="block" x="{_LEFT + rank * step:.2f}" y="{y:.2f}" width="{max(0.4, step * 0.9):.2f}" '
                f'height="{tall:.2f}" fill="{colours[block.kind]}"><title>{escape(title)}</title></rect>'
            )
    return f'<h2>{measure}</h2>\n<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img">\n' + "\n".join(
        [*parts, "</svg>"]
    )


def _axes(plan: ShardPlan, totals: list[int], top: int, show: Callable[[float], str], step: float) -> Iterator[str]:
    height = _HEIGHT - _BOTTOM - _TOP
    for part in range(5):
        y = _HEIGHT - _BOTTOM - height * part / 4
        yield f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{show(top * part / 4)}</text>'
    mean = _HEIGHT - _BOTTOM - height * sum(totals) / len(totals) / top
    yield f'<line class="mean" x1="{_LEFT}" y1="{mean:.1f}" x2="{_WIDTH}" y2="{mean:.1f}"><title>mean</title></line>'
    every = max(1, plan.world_size // 16)
    for rank in range(0, plan.world_size, every):
        x = _LEFT + (rank + 0.45) * step
        yield f'<text x="{x:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{rank}</text>'


def plot(plan: ShardPlan, title: str) -> str:
    """The HTML of a picture of ``plan``.

    Args:
        plan: who owns what.
        title: the heading, for instance the model's name.
    """
    blocks, colours = list(_blocks(plan)), _colours(plan)
    present = {block.kind for block in blocks}
    legend = "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(kind)}'
        for kind, colour in colours.items()
        if kind in present
    )
    charts = "\n".join(_chart(plan, blocks, measure, colours) for measure in ("step operations", "resident bytes"))
    heading = f"{escape(title)} on {plan.world_size} ranks"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{heading}</title>\n'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{heading}</h1>\n<p>{legend}</p>\n{charts}\n</body>\n</html>\n"
    )
