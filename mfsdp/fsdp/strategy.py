"""Which gather and which reduction a unit uses.

==================  =============================================================================
gather              where
==================  =============================================================================
BroadcastGather     NCCL, whose broadcast is a pipelined ring; GPUs in general; and gloo where
                    its tree does no harm: two ranks, one host (loopback), or a unit of less
                    than :data:`SMALL_UNIT` bytes, whose time is latency
ChainGather         gloo on CPUs of several hosts, one owner with more than half of the unit
ResplitGather       gloo on CPUs of several hosts, all other units
==================  =============================================================================

Reductions are rooted reduces everywhere: with gloo and NCCL each link carries a segment about once.

Measured on 8 emulated nodes with 1 Gbit/s each, for a unit of 16.8 MB, in milliseconds: with one owner
broadcasts take 821, the chain 168, re-splitting 283; with owners of 1/2, 1/4, 1/4 they take 434, 246, 207;
with 8 even owners 435, 223, 166. On loopback broadcasts are the fastest (50-54, an all-gather takes 78).
"""

import os
import socket
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mfsdp.fsdp.collectives import BroadcastGather, Gather, Reduction, RootedReduction, ShardGroup
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather, ResplitGather
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.fsdp.segments import UnitLayout

__all__ = ["SMALL_UNIT", "choose_gather", "choose_reduction"]

SMALL_UNIT = 256 * 1024
"""Bytes below which a unit is gathered by broadcasts on every network."""


def choose_gather(
    ranks: ShardGroup, layout: UnitLayout, itemsize: int, device: torch.device, by_segment: bool = False
) -> Gather:
    """The gather for a unit, by the rule in the module's docstring. Called on every rank alike.

    Args:
        ranks: the shard dimension.
        layout: the unit's.
        itemsize: bytes of an element as it travels.
        device: where it is gathered to.
        by_segment: whether segments need buffers of their own, to be freed one by one.
    """
    if device.type != "cpu" or dist.get_backend(ranks.group) != "gloo":
        return BroadcastGather()
    if ranks.size <= 2 or layout.numel * itemsize < SMALL_UNIT or _on_one_host(ranks.group):
        return BroadcastGather()
    largest = max(segment.numel for segment in layout.segments)
    if by_segment or largest > layout.numel / 2:
        return ChainGather(Lane.of(ranks))
    return ResplitGather(Lane.of(ranks))


def choose_reduction() -> Reduction:
    """The reduction for a unit, by the rule in the module's docstring."""
    return RootedReduction()


_one_host: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()


def _on_one_host(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of ``group`` reach each other without a network; asked once for each group."""
    known = _one_host.get(group)
    if known is None:
        known = _one_host[group] = len(set(all_gather_object(_host(), group))) == 1
    return known


def _host() -> tuple[str, int]:
    """Name of this host, and which of its network namespaces this process is in (0 where there are none)."""
    namespace = "/proc/self/ns/net"
    return socket.gethostname(), os.stat(namespace).st_ino if os.path.exists(namespace) else 0
