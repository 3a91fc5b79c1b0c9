"""The accounting of memory that the benchmarks rest on."""

import sys

import pytest
import torch

from test_multiprocess.benchmark_scripts import BENCHMARK

sys.path.insert(0, str(BENCHMARK))
from allocations import LiveBlocks, peak_memory, resident_memory


def test_the_peak_is_what_is_alive_at_once() -> None:
    def step() -> None:
        first = torch.empty(1000)
        del first
        second, third = torch.empty(500), torch.empty(700)
        del second, third
        torch.empty(100)

    assert peak_memory(step) == 4 * 1200


def test_what_was_allocated_before_counts_as_kept() -> None:
    kept = [torch.empty(1000)]

    def step() -> None:
        kept.clear()
        torch.empty(600)

    assert peak_memory(step) == 2400


def test_a_block_is_free_when_its_place_is_used_again() -> None:
    blocks = LiveBlocks()
    for start, size in ((100, 50), (150, 50), (300, 10)):
        blocks.allocate(start, size)
    assert blocks.level == 110
    blocks.allocate(120, 40)  # in the place of the first two, whose end nobody saw
    assert (blocks.level, blocks.peak) == (50, 110)
    for start in (100, 120, 300):
        blocks.free(start)
    assert blocks.level == 0


def test_gradients_that_python_has_not_seen_are_resident() -> None:
    before = resident_memory()
    weight = torch.nn.Parameter(torch.ones(1000))
    (weight * weight).sum().backward()
    assert resident_memory() - before == 2 * 4000


def test_views_that_autograd_refuses_to_use_count_too() -> None:
    before = resident_memory()
    root = torch.ones(1000, requires_grad=True)
    base = root.clone()
    with torch.no_grad():
        view = base[:10]
    base.mul_(2)
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        _ = view.is_leaf
    assert resident_memory() - before == 2 * 4000
