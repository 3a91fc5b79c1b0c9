"""Every layout's checkpoint loads in every other: each value and each optimizer state, to the bit."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import mfsdp.checkpoint
from test_multiprocess.checkpoint_cases import (
    MATRIX_OPTIONS,
    assert_holds,
    assert_written_once,
    in_layout,
    is_first,
    on_rank,
    train,
    whole_state,
)
from test_multiprocess.world import Worlds

LAYOUTS = [
    ("single", 1),
    ("single-torch", 1),
    ("mfsdp", 1),
    ("mfsdp", 2),
    ("mfsdp", 3),
    ("mfsdp", 4),
    ("rotated", 3),
    ("hsdp", 4),
    ("fsdp2", 2),
    ("fsdp2", 3),
]


def kinds_of(layout: str) -> list[str]:
    """torch has none of the others."""
    return ["muon"] if layout in ("fsdp2", "single-torch") else list(MATRIX_OPTIONS)


@on_rank
def save_all(mesh: DeviceMesh, folder: Path, layout: str) -> None:
    for kind in kinds_of(layout):
        model, optimizers = in_layout(layout, mesh, kind, seed=1)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
        train(model, optimizers, range(2))
        for scheduler in schedulers:
            scheduler.step()
        target = folder / f"{layout}-{mesh.size()}-{kind}"
        mfsdp.checkpoint.save(target / "own", model, optimizers, extra=schedulers[0].state_dict())
        if kind == "muon":  # and as someone saves who does not know mfsdp
            states = {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, optimizers),
            }
            dcp_save(states, checkpoint_id=target / "dcp")
        state = whole_state(model, optimizers)
        assert_written_once(target / "own")
        if is_first():
            torch.save(state, target / "state.pt")
    dist.barrier()


@on_rank
def load_all(mesh: DeviceMesh, folder: Path, layout: str) -> None:
    for kind in kinds_of(layout):
        model, optimizers = in_layout(layout, mesh, kind, seed=2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
        targets = sorted(folder.glob(f"*-{kind}"))
        assert len(targets) == (len(LAYOUTS) if kind == "muon" else len(LAYOUTS) - 3)
        for target in targets:
            saved = torch.load(target / "state.pt", weights_only=False)
            for path in [target / "own", *target.glob("dcp")]:
                with torch.no_grad():
                    for param in model.parameters():
                        param.fill_(-1)
                extra = mfsdp.checkpoint.load(path, model, optimizers)
                assert_holds(model, optimizers, saved, f"{path} in {layout}-{mesh.size()}")
                assert (extra is None) == (path.name == "dcp")
                if extra is not None:
                    scheduler.load_state_dict(extra)
                    ours = [group["lr"] for group in optimizers[0].param_groups]
                    assert scheduler.get_last_lr()[: len(ours)] == ours[: len(scheduler.get_last_lr())]
        train(model, optimizers, [2])  # what was loaded is of use


@pytest.fixture(scope="module")
def saved(worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    for layout, ranks in LAYOUTS:
        worlds.get(ranks).run(__name__, "save_all", {"folder": folder, "layout": layout}, timeout=60)
    return folder


@pytest.mark.parametrize(("layout", "ranks"), LAYOUTS)
def test_every_checkpoint_loads(worlds: Worlds, saved: Path, layout: str, ranks: int) -> None:
    worlds.get(ranks).run(__name__, "load_all", {"folder": saved, "layout": layout}, timeout=60)
