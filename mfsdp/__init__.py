"""Fully sharded data parallelism for matrix optimizers: every weight matrix whole on one rank."""

from mfsdp.dtensor import distribute_tensor, install
from mfsdp.placements import OwnerShard, Tail

install()

__all__ = ["OwnerShard", "Tail", "distribute_tensor"]
