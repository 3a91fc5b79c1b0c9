"""How good assignments are: against brute force, against bounds, and what else they promise."""

import random
from collections.abc import Iterable

import expecttest
import pytest
import torch

from mfsdp.planning import ParameterSpec, PlanError, RankLoad, Role, plan_specs
from mfsdp.planning.assign import Items, Ranks, assign
from mfsdp.planning.bounds import lower_bound, tight_lower_bound
from mfsdp.planning.improve import Search
from mfsdp.planning.packing import packing_bound


def listed(costs: Iterable[tuple[int, int, str]]) -> Items:
    """Matrices of the given operations, bytes and units."""
    items = Items()
    for flops, nbytes, unit in costs:
        items.add(flops, nbytes, unit)
    return items


def instance(seed: int) -> tuple[Items, int]:
    """Up to 8 items for up to 3 ranks, of four kinds."""
    rng = random.Random(seed)
    number, ranks = rng.randint(1, 8), rng.randint(1, 3)
    items = Items()
    for _ in range(number):
        nbytes = rng.randint(1, 1000)
        match seed % 4:
            case 0:  # operations have nothing to do with bytes
                flops = rng.randint(1, 1000)
            case 1:  # within a factor
                flops = nbytes * rng.randint(1, 9)
            case 2:  # few sizes
                flops = nbytes = 100 * rng.choice([1, 2, 3, 5, 8])
            case _:  # Muon
                rows, columns = rng.choice([8, 16, 32, 64]), rng.choice([8, 16, 32, 64, 128])
                small, large = min(rows, columns), max(rows, columns)
                flops, nbytes = 5 * (4 * small**2 * large + 2 * small**3), 12 * rows * columns
        items.add(flops, nbytes, "")
    return items, ranks


def all_maxima(items: Items, ranks: int) -> set[tuple[int, int]]:
    """(most operations, most bytes) of every assignment."""
    found = set()
    flops, nbytes = [0] * ranks, [0] * ranks

    def place(index: int, used: int) -> None:
        if index == len(items):
            found.add((max(flops), max(nbytes)))
            return
        for rank in range(min(ranks, used + 1)):  # empty ranks are interchangeable
            flops[rank] += items.flops[index]
            nbytes[rank] += items.nbytes[index]
            place(index + 1, max(used, rank + 1))
            flops[rank] -= items.flops[index]
            nbytes[rank] -= items.nbytes[index]

    place(0, 0)
    return found


def assigned(items: Items, ranks: int, cap: int | None = None) -> tuple[int, int]:
    """(most operations, most bytes) of what ``assign`` does."""
    state = Ranks([0] * ranks, [0] * ranks)
    owners = assign(items, state, cap)
    for costs, values in ((items.flops, state.flops), (items.nbytes, state.nbytes)):
        again = [0] * ranks
        for cost, owner in zip(costs, owners, strict=True):
            again[owner] += cost
        assert again == values
    return max(state.flops), max(state.nbytes)


class TestAgainstBruteForce:
    @pytest.mark.parametrize("start", range(0, 500, 100))
    def test_within_ten_percent_of_the_optimum(self, start: int) -> None:
        for seed in range(start, start + 100):
            items, ranks = instance(seed)
            everything = all_maxima(items, ranks)
            least_bytes = min(nbytes for _, nbytes in everything)
            cap = int(1.05 * lower_bound(items.nbytes, [0] * ranks).simple)
            flops, nbytes = assigned(items, ranks)
            if least_bytes <= cap:
                assert nbytes <= cap, seed
                best = min(flops for flops, nbytes in everything if nbytes <= cap)
            else:
                assert nbytes <= 1.1 * least_bytes, seed
                best = min(flops for flops, held in everything if held <= nbytes)
            assert flops <= 1.1 * best, seed

    def test_local_search_alone_is_nearly_as_good(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What models get, which are too large to enumerate."""
        monkeypatch.setattr("mfsdp.planning.assign._FEW_WAYS", 0)
        far = 0
        for seed in range(400):
            items, ranks = instance(seed)
            everything = all_maxima(items, ranks)
            cap = int(1.05 * lower_bound(items.nbytes, [0] * ranks).simple)
            cap = max(cap, min(nbytes for _, nbytes in everything))
            best = min(flops for flops, nbytes in everything if nbytes <= cap)
            flops, nbytes = assigned(items, ranks, cap)
            far += flops > 1.1 * best or nbytes > cap
        assert far <= 4

    def test_bounds_are_below_every_optimum_and_often_reach_it(self) -> None:
        reached = 0
        for seed in range(300):
            items, ranks = instance(seed)
            values = items.flops
            best = min(flops for flops, _ in all_maxima(items, ranks))
            bound = packing_bound(values, ranks, sum(values))
            assert bound <= best, seed
            assert lower_bound(values, [0] * ranks).value <= best, seed
            reached += tight_lower_bound(values, [0] * ranks, sum(values)).value == best
        assert reached > 200

    def test_bounds_hold_on_uneven_ranks(self) -> None:
        rng = random.Random(1)
        for _ in range(100):
            values = [rng.randint(1, 20) for _ in range(rng.randint(0, 6))]
            base = [rng.randint(0, 10) for _ in range(3)]
            state = Ranks(list(base), list(base))
            assign(listed((value, value, "") for value in values), state)
            assert tight_lower_bound(values, base, max(state.flops)).value <= max(state.flops)


class TestLargeModels:
    def test_close_to_the_mean_with_many_items(self) -> None:
        rng = random.Random(0)
        sizes = [rng.randint(100, 1000) for _ in range(2000)]
        items = listed((size * size, size, str(number // 10)) for number, size in enumerate(sizes))
        state = Ranks([0] * 32, [0] * 32)
        assign(items, state)
        assert max(state.flops) <= 1.01 * sum(state.flops) / 32
        assert max(state.nbytes) <= 1.05 * sum(state.nbytes) / 32

    def test_search_is_better_than_longest_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        items = listed((size, size, "") for size in (8, 7, 6, 5, 4, 4, 4, 3, 3, 3, 2, 2) * 3)
        searched = assigned(items, 5)
        monkeypatch.setattr(Search, "run", lambda self: None)
        assert searched < assigned(items, 5)

    def test_equal_items_of_a_unit_go_to_different_owners(self) -> None:
        items = listed((5, 5, f"unit{number // 4}") for number in range(32))
        owners = assign(items, Ranks([0] * 8, [0] * 8))
        for unit in range(8):
            assert len(set(owners[4 * unit : 4 * unit + 4])) == 4

    def test_equal_input_gives_equal_output(self) -> None:
        items, _ = instance(7)
        assert assign(items, Ranks([0] * 3, [0] * 3)) == assign(items, Ranks([0] * 3, [0] * 3))

    def test_tails_fill_up_ranks_with_few_bytes(self) -> None:
        items = listed([(100, 100, "a")])
        for number in range(10):
            items.add(0, 10, str(number), tail=True)
        state = Ranks([0, 0], [0, 0])
        assign(items, state)
        assert state.nbytes == [100, 100]


def matrices(*shapes: tuple[int, int]) -> list[ParameterSpec]:
    return [ParameterSpec(f"w{number}", Role.MATRIX, shape, torch.float32) for number, shape in enumerate(shapes)]


class TestCap(expecttest.TestCase):
    def test_cap_is_kept_at_the_cost_of_operations(self) -> None:
        # three flat matrices have most bytes, three square ones most operations
        specs = matrices((4, 600), (4, 600), (4, 600), (40, 40), (40, 40), (40, 40))
        free = plan_specs(specs, 2, bytes_cap=10**9)
        tight = plan_specs(specs, 2, bytes_cap=12 * (2 * 2400 + 1600))
        assert max(load.resident_bytes for load in tight.loads()) <= 12 * (2 * 2400 + 1600)
        assert max(load.step_flops for load in free.loads()) <= max(load.step_flops for load in tight.loads())

    def test_caps_that_cannot_be_kept(self) -> None:
        specs = matrices((40, 40), (40, 40), (40, 40), (10, 10))
        cases = [
            (specs, 2, 12 * 3000, None),
            (specs, 4, 12 * 1500, None),
            (specs, 2, -1, None),
            (specs, 2, 12 * 3000, [RankLoad(), RankLoad(10)]),
        ]
        found = []
        for planned, ranks, cap, initial in cases:
            with pytest.raises(PlanError) as caught:
                plan_specs(planned, ranks, bytes_cap=cap, initial_loads=initial)
            found.append(str(caught.value))
        self.assertExpectedInline(
            "\n".join(found),
            """\
bytes_cap=36000: no room on rank 0 for w0 (19200), w2 (19200) (bytes in brackets). The smallest cap that works on 2 ranks is 38400, or at least 3 ranks for this cap.
bytes_cap=18000: too large by itself: w0 (19200), w1 (19200), w2 (19200) (bytes in brackets). The smallest cap that works on 4 ranks is 19200.
bytes_cap=-1 must not be negative.
bytes_cap=36000: no room on rank 0 for w0 (19200), w2 (19200) (bytes in brackets). The smallest cap that works on 2 ranks is 38400.""",
        )

    def test_what_the_error_suggests_works(self) -> None:
        specs = matrices((40, 40), (40, 40), (40, 40), (10, 10))
        plan_specs(specs, 2, bytes_cap=12 * 3200)
        with pytest.raises(PlanError):
            plan_specs(specs, 2, bytes_cap=12 * 3200 - 1)
        plan_specs(specs, 3, bytes_cap=12 * 3000)
