"""CommCounter's bookkeeping, without a process group."""

from collections.abc import Iterator

import pytest
import torch
from expecttest import assert_expected_inline

from mfsdp.comm_counter import CommCounter, CommTally


@pytest.fixture
def unheard_of() -> Iterator[torch._ops.OpOverload]:
    """An operator in a communication namespace that the counter has no name for."""
    library = torch.library.Library("c10d", "FRAGMENT")
    library.define("teleport_(Tensor[] tensors, Tensor out) -> ()")
    library.impl("teleport_", lambda tensors, out: None, "CPU")
    yield torch.ops.c10d.teleport_.default
    library._destroy()


def test_an_unknown_collective_is_counted_under_its_own_name(unheard_of: torch._ops.OpOverload) -> None:
    with CommCounter() as comm:
        unheard_of([torch.ones(3), torch.ones(2, dtype=torch.float64)], torch.ones(7))
    assert comm.by_kind == {"teleport": CommTally(calls=1, bytes=12 + 16, received=28)}


def test_counts_add_up_over_entries_until_reset(unheard_of: torch._ops.OpOverload) -> None:
    comm = CommCounter()
    for _ in range(2):
        with comm:
            unheard_of([torch.ones(300)], torch.ones(1))
        unheard_of([torch.ones(300)], torch.ones(1))  # outside: not counted
    assert (comm.collectives, comm.bytes) == (2, 2400)
    assert_expected_inline(str(comm), """teleport               2 calls            2,400 bytes""")
    comm.reset()
    assert (comm.collectives, comm.bytes) == (0, 0)
    assert_expected_inline(repr(comm), """no collectives""")


def test_compute_is_not_counted_and_not_changed() -> None:
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = torch.autograd.grad((x @ x).sum(), x)[0]
    with CommCounter() as comm:
        found = torch.autograd.grad((x @ x).sum(), x)[0]
    assert torch.equal(found, expected)
    assert comm.collectives == 0


def test_reading_data_is_no_matter_for_the_counter() -> None:
    with CommCounter() as comm:
        assert torch.equal(torch.ones(3).data, torch.ones(3))
        assert torch.equal(torch.nn.Parameter(torch.ones(3)).data, torch.ones(3))
    assert comm.collectives == 0
