"""The life cycle of a segment's memory."""

import pytest
import torch

from mfsdp.fsdp.buffers import BufferState, FullBuffer


def test_states_follow_each_other() -> None:
    buffer = FullBuffer(6, torch.bfloat16, torch.device("cpu"))
    assert (buffer.state, buffer.nbytes) == (BufferState.SHARDED, 0)
    with pytest.raises(RuntimeError, match="nothing was gathered"):
        _ = buffer.flat
    flat = buffer.open()
    assert (buffer.state, buffer.nbytes) == (BufferState.GATHERING, 12)
    buffer.close()
    assert (buffer.state, buffer.nbytes) == (BufferState.FULL, 12)
    buffer.free()
    assert (buffer.state, buffer.nbytes) == (BufferState.FREED, 0)
    buffer.free()
    buffer.close()
    assert buffer.state is BufferState.FREED
    assert buffer.open() is flat
    assert (buffer.state, buffer.nbytes) == (BufferState.GATHERING, 12)
    buffer.free()  # a gather that was not needed
    assert (buffer.state, buffer.nbytes) == (BufferState.FREED, 0)


def test_views_survive_being_freed() -> None:
    buffer = FullBuffer(6, torch.float32, torch.device("cpu"))
    view = buffer.open().view(2, 3).t()
    storage = view.untyped_storage()._cdata
    buffer.close()
    buffer.free()
    assert view.untyped_storage().nbytes() == 0
    buffer.open().copy_(torch.arange(6.0))
    assert view.untyped_storage()._cdata == storage
    assert torch.equal(view, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]))


def test_a_pinned_buffer_is_the_resident_segment() -> None:
    resident = torch.arange(4.0)
    buffer = FullBuffer.pinned_to(resident)
    for move in (buffer.open, buffer.close, buffer.free):
        move()
        assert (buffer.state, buffer.nbytes) == (BufferState.PINNED, 0)
        assert buffer.flat.data_ptr() == resident.data_ptr()
    assert resident.untyped_storage().nbytes() == 16


def test_a_step_on_the_resident_segment_is_no_change_of_what_autograd_saved() -> None:
    # as on the ranks that gathered a copy: a step between forward and backward is no error there either
    resident = torch.ones(4)
    full = torch.nn.Parameter(FullBuffer.pinned_to(resident).flat)
    product = (full * full).sum()
    resident.mul_(3)
    product.backward()
    assert full.grad is not None
    assert torch.equal(full.grad, torch.full((4,), 6.0))


def test_a_buffer_that_is_first_used_in_inference_can_train_later() -> None:
    buffer = FullBuffer(2, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        flat = buffer.open()
    assert not flat.is_inference()
