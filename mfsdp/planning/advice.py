"""How even a plan is against what is possible, and what would help, in words."""

from collections.abc import Iterator

from mfsdp.planning.bounds import LowerBound, tight_lower_bound
from mfsdp.planning.loads import loads_of
from mfsdp.planning.records import MatrixShard, Role
from mfsdp.planning.report import elementwise_note
from mfsdp.planning.shard_plan import ShardPlan

__all__ = ["advice", "bounds", "idle_ranks"]


def _items(entry: MatrixShard, cost: int) -> list[int]:
    """The costs of what had to be placed for ``entry``: single matrices, where a stack was spread."""
    return [cost // entry.shape[0]] * entry.shape[0] if entry.parts else [cost]


def bounds(plan: ShardPlan) -> tuple[LowerBound, LowerBound]:
    """What no plan for these ranks can be better than: of the largest operations, of the largest bytes.

    ``ROWS`` lie on all ranks whatever the plan, and count as what ranks have before anything is placed.
    """
    entries = plan.entries.values()
    base = loads_of((entry for entry in entries if entry.role is Role.ROWS), plan.world_size)
    placed = [entry for entry in entries if entry.role is not Role.ROWS]
    flops = [cost for entry in placed for cost in _items(entry, entry.step_flops)]
    nbytes = [cost for entry in placed for cost in _items(entry, entry.resident_bytes)]
    loads = plan.loads()
    return (
        tight_lower_bound(flops, [load.step_flops for load in base], max(load.step_flops for load in loads)),
        tight_lower_bound(nbytes, [load.resident_bytes for load in base], max(load.resident_bytes for load in loads)),
    )


def idle_ranks(plan: ShardPlan) -> int:
    """How many ranks own no matrix."""
    return sum(not load.matrices for load in plan.loads())


def _matrices(plan: ShardPlan) -> list[MatrixShard]:
    return [entry for entry in plan.entries.values() if entry.role is Role.MATRIX]


def advice(plan: ShardPlan) -> Iterator[str]:
    """One sentence for each thing that a user should know about the plan; none for an even plan."""
    matrices = _matrices(plan)
    elementwise = elementwise_note(plan)
    if elementwise:
        yield elementwise
    if not matrices:
        return
    flops, _ = bounds(plan)
    idle = idle_ranks(plan)
    if idle:
        yield (
            f"{_number(len(matrices), 'matrix', 'matrices')} for {_number(plan.world_size, 'rank')}: "
            f"{_number(idle, 'rank')} without any, idle in the step."
        )
    if flops.largest <= flops.mean:
        return
    largest = max(matrices, key=lambda entry: entry.step_flops // (entry.shape[0] if entry.parts else 1))
    yield (
        f"the step takes as long as that of {largest.name}, {flops.largest / flops.mean:.2f} times the mean of all "
        f"ranks; more ranks do not make it faster."
    )
    helps = [*_shapes(int(flops.mean * plan.world_size / flops.largest), plan.world_size)]
    if largest.split is None:
        helps.append(f"splits= if {largest.name} is several matrices, which are less work apart")
    elif largest.split.stack > 1 and not largest.parts:
        helps.append("spread_stacks= to let several ranks own a stack")
    yield f"what would help: {'; '.join(helps)}." if helps else "nothing but a smaller matrix would help."


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _shapes(even: int, ranks: int) -> Iterator[str]:
    """Fewer owners, up to ``even`` of them, as a number and as an HSDP shape that uses all ranks."""
    if even < 2:
        return
    owners = max(owners for owners in range(1, even + 1) if ranks % owners == 0)
    shape = f", or replicas: --mesh {ranks // owners}x{owners}" if 1 < owners < ranks else ""
    yield f"{even} ranks or fewer{shape}"
