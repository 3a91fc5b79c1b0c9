"""Checkpoints of ``torch.distributed.checkpoint``, written by owners, that load into any layout of the same model."""

from mfsdp.checkpoint.asynchronous import AsyncCheckpointerType, async_save
from mfsdp.checkpoint.directory import latest, prune
from mfsdp.checkpoint.errors import CheckpointError, DamagedCheckpointError
from mfsdp.checkpoint.loading import load
from mfsdp.checkpoint.manifest import Manifest
from mfsdp.checkpoint.safetensors_export import checkpoint_to_safetensors, save_safetensors
from mfsdp.checkpoint.safetensors_import import load_safetensors
from mfsdp.checkpoint.saving import save

__all__ = [
    "AsyncCheckpointerType",
    "CheckpointError",
    "DamagedCheckpointError",
    "Manifest",
    "async_save",
    "checkpoint_to_safetensors",
    "latest",
    "load",
    "load_safetensors",
    "prune",
    "save",
    "save_safetensors",
]
