"""What to tell a user whose cap on bytes per rank cannot be kept."""

from collections.abc import Callable, Sequence

from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import RankLoad
from mfsdp.planning.records import MatrixShard

__all__ = ["check_cap"]


def _named(held: dict[str, int]) -> str:
    ordered = sorted(held.items(), key=lambda item: -item[1])
    names = ", ".join(f"{name} ({nbytes})" for name, nbytes in ordered[:3])
    return names + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _smallest_ranks(cap: int, world_size: int, most_bytes: Callable[[int], int]) -> int | None:
    """The smallest number of ranks found for which the cap works; None if 64 times as many do not help."""
    enough = 2 * world_size
    while most_bytes(enough) > cap:
        enough *= 2
        if enough > 64 * world_size:
            return None
    least = max(world_size, enough // 2)
    while least + 1 < enough:
        middle = (least + enough) // 2
        if most_bytes(middle) > cap:
            least = middle
        else:
            enough = middle
    return enough


def check_cap(
    cap: int,
    entries: Sequence[MatrixShard],
    loads: Sequence[RankLoad],
    most_bytes: Callable[[int], int],
    *,
    more_ranks: bool,
) -> None:
    """Raise if some rank has more than ``cap`` bytes.

    Args:
        cap: bytes that a rank may have.
        entries: the plan's records.
        loads: what each rank has under the plan.
        most_bytes: number of ranks -> the most bytes a rank has, when bytes alone are balanced.
        more_ranks: whether another number of ranks can be suggested.

    Raises:
        PlanError: names the parameters that do not fit, the smallest cap that works, and the smallest number
            of ranks that does.
    """
    heaviest = max(range(len(loads)), key=lambda rank: loads[rank].resident_bytes)
    if loads[heaviest].resident_bytes <= cap:
        return
    alone = {
        entry.name: entry.resident_bytes for entry in entries if entry.owner is not None and entry.resident_bytes > cap
    }
    held = {entry.name: dict(entry.divide(entry.resident_bytes, len(loads))).get(heaviest, 0) for entry in entries}
    here = {name: nbytes for name, nbytes in held.items() if nbytes}
    works = min(most_bytes(len(loads)), loads[heaviest].resident_bytes)
    what = "too large by itself: " if alone else f"no room on rank {heaviest} for "
    message = (
        f"bytes_cap={cap}: {what}{_named(alone or here)} (bytes in brackets). The smallest cap that works on "
        f"{len(loads)} ranks is {works}"
    )
    ranks = _smallest_ranks(cap, len(loads), most_bytes) if more_ranks and not alone else None
    raise PlanError(f"{message}, or at least {ranks} ranks for this cap." if ranks else f"{message}.")
