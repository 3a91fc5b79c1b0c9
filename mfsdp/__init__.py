"""Fully sharded data parallelism for matrix optimizers: every weight matrix whole on one rank."""

from mfsdp.placements import OwnerShard, Tail

__all__ = ["OwnerShard", "Tail"]
