"""The runtime: ``fully_shard`` with owner-placed parameters, on FSDP2's states and hooks."""

from mfsdp.fsdp.api import fully_shard

__all__ = ["fully_shard"]
