"""Fully sharded data parallelism for matrix optimizers: every weight matrix whole on one rank."""

from mfsdp import checkpoint, optim
from mfsdp.comm_counter import CommCounter
from mfsdp.dtensor import distribute_tensor
from mfsdp.fsdp import backward, compile_step, fully_shard, register_forward_method
from mfsdp.placements import OwnerShard, Tail
from mfsdp.planning import MatrixShard, Role, ShardPlan, plan

__all__ = [
    "CommCounter",
    "MatrixShard",
    "OwnerShard",
    "Role",
    "ShardPlan",
    "Tail",
    "backward",
    "checkpoint",
    "compile_step",
    "distribute_tensor",
    "fully_shard",
    "optim",
    "plan",
    "register_forward_method",
]
