"""Checkpoints of ``torch.distributed.checkpoint``, written by owners, that load into any layout of the same model."""

from mfsdp.checkpoint.directory import latest, prune
from mfsdp.checkpoint.errors import CheckpointError, DamagedCheckpointError
from mfsdp.checkpoint.loading import load
from mfsdp.checkpoint.manifest import Manifest
from mfsdp.checkpoint.saving import save

__all__ = ["CheckpointError", "DamagedCheckpointError", "Manifest", "latest", "load", "prune", "save"]
