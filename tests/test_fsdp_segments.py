"""The layout of a unit: packed, owner by owner, nothing lost."""

import math

import pytest
import torch

from mfsdp.fsdp.segments import Segment, Slot, UnitLayout

SHAPES = [torch.Size(shape) for shape in ((3, 4), (2, 2), (5,), (), (0, 7), (6, 1))]


@pytest.mark.parametrize("owners", [[0, 0, 0, 0, 0, 0], [2, 0, 2, 5, 0, 2], [5, 4, 3, 2, 1, 0]])
def test_every_element_has_one_place(owners: list[int]) -> None:
    layout = UnitLayout.of(SHAPES, owners)
    assert [segment.owner for segment in layout.segments] == sorted(set(owners))
    assert layout.numel == sum(math.prod(shape) for shape in SHAPES)
    placed = {}
    for segment in layout.segments:
        flat = torch.arange(segment.numel)
        taken = torch.zeros(segment.numel, dtype=torch.long)
        for slot in segment.slots:
            placed[slot.index] = segment.owner
            view = slot.view(flat)
            assert view.shape == SHAPES[slot.index]
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            taken[view.flatten()] += 1
        assert torch.equal(taken, torch.ones_like(taken))
    assert placed == dict(enumerate(owners))


def test_order_within_a_segment_is_that_of_the_unit() -> None:
    layout = UnitLayout.of(SHAPES, [1, 0, 1, 1, 0, 1])
    assert [slot.index for slot in layout.owned_by(1).slots] == [0, 2, 3, 5]
    assert [slot.offset for slot in layout.owned_by(1).slots] == [0, 12, 17, 18]


def test_a_part_of_the_unit_is_packed_again() -> None:
    layout = UnitLayout.of(SHAPES, [1, 0, 1, 1, 0, 1]).only({2, 5, 1})
    assert [(segment.owner, segment.numel) for segment in layout.segments] == [(0, 4), (1, 11)]
    assert [slot.offset for slot in layout.owned_by(1).slots] == [0, 5]


def test_who_owns_nothing_has_an_empty_segment() -> None:
    layout = UnitLayout.of(SHAPES, [1] * 6)
    assert layout.owned_by(0) == Segment(0, ())
    assert layout.owned_by(0).numel == 0
    assert UnitLayout.of([], []).numel == 0


def test_segments_have_no_gaps() -> None:
    with pytest.raises(ValueError, match="segment of rank 3: slot at 5, expected at 4"):
        Segment(3, (Slot(0, torch.Size((2, 2)), 0), Slot(1, torch.Size((2,)), 5)))
