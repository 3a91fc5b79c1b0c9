"""Checkpoints: what a folder of them looks like, and what a checkpoint consists of."""

from mfsdp.checkpoint.directory import latest, prune
from mfsdp.checkpoint.errors import CheckpointError, DamagedCheckpointError
from mfsdp.checkpoint.manifest import Manifest

__all__ = ["CheckpointError", "DamagedCheckpointError", "Manifest", "latest", "prune"]
