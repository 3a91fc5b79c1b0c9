"""The placements themselves: values, equality, what they print."""

import copy
import pickle

import pytest
from expecttest import assert_expected_inline
from torch.distributed.tensor import Partial, Replicate, Shard

from mfsdp import OwnerShard, Tail
from mfsdp.placements import is_owner, owner_dims


def test_equality_is_by_kind_and_owner() -> None:
    assert OwnerShard(1) == OwnerShard(owner=1)
    assert OwnerShard() == OwnerShard(0)
    assert OwnerShard(1) != OwnerShard(0)
    assert OwnerShard(1) != Tail(1)
    for other in (Shard(1), Replicate(), Partial(), 1, None):
        assert OwnerShard(1) != other
        assert other != OwnerShard(1)
    assert len({OwnerShard(0), OwnerShard(0), Tail(0), OwnerShard(1), Shard(0)}) == 4


def test_torch_sees_none_of_its_own_kinds() -> None:
    for placement in (OwnerShard(1), Tail(1)):
        asked = (placement.is_shard(), placement.is_shard(0), placement.is_replicate(), placement.is_partial())
        assert not any(asked)


@pytest.mark.parametrize("placement", [OwnerShard(3), Tail(2)])
def test_copies_are_equal(placement: OwnerShard | Tail) -> None:
    for copied in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert copied == placement
        assert type(copied) is type(placement)
        assert hash(copied) == hash(placement)


@pytest.mark.parametrize("placement", [OwnerShard(3), Tail(2)])
def test_fx_repr_evaluates_to_the_placement(placement: OwnerShard | Tail) -> None:
    expression, names = placement.__fx_repr__()
    assert eval(expression, names) == placement


def test_it_is_immutable() -> None:
    with pytest.raises(AttributeError):
        OwnerShard(0).owner = 1  # type: ignore[misc]


def test_owner_dims() -> None:
    assert owner_dims([Replicate(), OwnerShard(1), Shard(0), Tail(0)]) == (1, 3)
    assert [is_owner(p) for p in (OwnerShard(), Tail(), Shard(0), Replicate())] == [True, True, False, False]


def test_reprs() -> None:
    assert_expected_inline(
        f"{OwnerShard(1)!r} {OwnerShard(1)!s} {Tail(2)!r} {Tail(2)!s}",
        """OwnerShard(owner=1) O(1) Tail(owner=2) T(2)""",
    )


def message(owner: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        OwnerShard(owner)  # type: ignore[arg-type]
    return f"{type(caught.value).__name__}: {caught.value}"


def test_bad_owners() -> None:
    assert_expected_inline(
        "\n".join(message(owner) for owner in (-1, True, 1.0)),
        """\
ValueError: OwnerShard(owner=-1): owner must be 0 or more; it is a coordinate on a mesh dimension and does not count from the end.
TypeError: OwnerShard(owner=True): owner must be an int, the coordinate of the owning rank on its mesh dimension, not bool.
TypeError: OwnerShard(owner=1.0): owner must be an int, the coordinate of the owning rank on its mesh dimension, not float.""",
    )
