"""Saving in the background: what is saved is the state at the call, whatever happens to it afterwards."""

import logging
import os
import resource
import signal
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mfsdp.checkpoint import AsyncCheckpointerType, CheckpointError, async_save, asynchronous, latest, load, save
from test_multiprocess.checkpoint_cases import assert_holds, in_layout, train, whole_state
from test_multiprocess.world import on_ranks

KINDS = [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 3)
def test_the_state_at_the_call_is_saved(mesh: DeviceMesh, tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    """Two saves one after the other, while training changes everything in place; then one in the foreground."""
    model, optimizers = in_layout("mfsdp", mesh, "soap", seed=1)
    extra = {"step": 0}
    states, futures = {}, []
    for step in range(2):
        train(model, optimizers, [step])
        states[step], extra["step"] = whole_state(model, optimizers), step
        path = tmp_path / f"step-{step}"
        futures.append(async_save(path, model, optimizers, extra=extra, async_checkpointer_type=kind))
        extra["step"] = -1
        train(model, optimizers, [7])  # its collectives run beside those of the save
    states[2] = whole_state(model, optimizers)
    futures[0].result()
    save(tmp_path / "step-2", model, optimizers, extra={"step": 2}, keep=3)
    assert futures[1].done()
    assert futures[1].result() == tmp_path / "step-1"
    for step, expected in states.items():
        other, theirs = in_layout("mfsdp", mesh, "soap", seed=2)
        assert load(tmp_path / f"step-{step}", other, theirs) == {"step": step}
        assert_holds(other, theirs, expected, f"step {step}")
    assert latest(tmp_path) == tmp_path / "step-2"
    assert {each.name for each in tmp_path.iterdir()} == {"step-0", "step-1", "step-2"}


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_failures_are_told(mesh: DeviceMesh, tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    model, optimizers = in_layout("mfsdp", mesh, "muon", seed=1)
    first = save(tmp_path / "step-1", model, optimizers)
    with pytest.raises(CheckpointError, match="extra holds a DTensor"):
        async_save(tmp_path / "step-2", model, extra=model.head.weight, async_checkpointer_type=kind)
    if dist.get_rank() == 0:
        (tmp_path / "file").write_text("mine")
    dist.barrier()
    with pytest.raises(CheckpointError, match="Not a directory"):
        async_save(tmp_path / "file" / "step-2", model, async_checkpointer_type=kind)
    logger, told = logging.getLogger("mfsdp.checkpoint.asynchronous"), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.propagate = False
    # rank 1 reaches a limit in the middle of its file
    writing = asynchronous._writer_process()._process.pid if kind is AsyncCheckpointerType.PROCESS else 0
    unlimited = resource.prlimit(writing, resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.prlimit(writing, resource.RLIMIT_FSIZE, (2000, unlimited[1]))
    try:
        future = async_save(tmp_path / "step-2", model, async_checkpointer_type=kind)
        with pytest.raises(CheckpointError, match=r"saving to .*step-2 failed on rank 1: \[Errno 27\] File too large"):
            future.result()
    finally:
        resource.prlimit(writing, resource.RLIMIT_FSIZE, unlimited)
    assert "could not be saved in the background: saving to" in told[0]
    logger.removeHandler(handler)
    logger.propagate = True
    assert latest(tmp_path) == first
    assert async_save(tmp_path / "step-2", model, async_checkpointer_type=kind).result() == tmp_path / "step-2"


@on_ranks(2)
def test_a_writer_process_that_is_killed(mesh: DeviceMesh, tmp_path: Path) -> None:
    kind = AsyncCheckpointerType.PROCESS
    model = in_layout("mfsdp", mesh, "muon", seed=1)[0]
    async_save(tmp_path / "step-1", model, async_checkpointer_type=kind).result()
    process = asynchronous._writer_process()._process
    if dist.get_rank() == 1:
        os.kill(process.pid, signal.SIGSTOP)
    future = async_save(tmp_path / "step-2", model, async_checkpointer_type=kind)
    assert dist.get_rank() == 1 or not future.done()
    if dist.get_rank() == 1:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match=r"on rank 1: the process that writes ended with exit code -9"):
        future.result()
    assert latest(tmp_path) == tmp_path / "step-1"
    async_save(tmp_path / "step-2", model, async_checkpointer_type=kind).result()
    assert latest(tmp_path) == tmp_path / "step-2"
