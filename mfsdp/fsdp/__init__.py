"""The runtime: ``fully_shard`` with owner-placed parameters, on FSDP2's states and hooks."""

from mfsdp.fsdp.api import fully_shard
from mfsdp.fsdp.forward_methods import register_forward_method
from mfsdp.fsdp.graph import backward, compile_step
from mfsdp.fsdp.managed import plan_of

__all__ = ["backward", "compile_step", "fully_shard", "plan_of", "register_forward_method"]
