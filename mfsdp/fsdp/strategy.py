"""Which gather and which reduction a unit uses.

==================  =============================================================================
gather              where
==================  =============================================================================
BroadcastGather     NCCL, whose broadcast is a pipelined ring; GPUs in general; and gloo where
                    its tree does no harm: two ranks, one host (loopback), or a unit of less
                    than :data:`SMALL_UNIT` bytes, whose time is latency
ChainGather         gloo on CPUs of several hosts, all other units
==================  =============================================================================

Reductions are rooted reduces everywhere: with gloo and NCCL each link carries a segment about once.

Measured by ``examples/benchmark/gathers.py`` on 8 emulated nodes of 1 Gbit/s for a unit of 16 MiB, in milliseconds
(an all-gather of even slices, which is what FSDP2 does, takes 140 to 170):

==================  =========  =============  ===========
owners              broadcast  ResplitGather  ChainGather
==================  =========  =============  ===========
one                 810        291            156
1/2, 1/4, 1/4       401        194            162
8, evenly           414        150            137
==================  =========  =============  ===========

So it is at 200 Mbit/s, on 4 and 16 nodes and from 256 KiB on: where the owner is one, re-splitting sends everything
twice, and where owners are many the chain is a ring. :class:`~mfsdp.fsdp.network_gathers.ResplitGather` is therefore
chosen nowhere; it is there to be compared with. On loopback broadcasts are the fastest.
"""

import os
import socket
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from mfsdp.fsdp.collectives import BroadcastGather, Gather, Reduction, RootedReduction, ShardGroup
from mfsdp.fsdp.lane import Lane
from mfsdp.fsdp.network_gathers import ChainGather
from mfsdp.fsdp.objects import all_gather_object
from mfsdp.fsdp.segments import UnitLayout

__all__ = ["SMALL_UNIT", "choose_gather", "choose_reduction"]

SMALL_UNIT = 256 * 1024
"""Bytes below which a unit is gathered by broadcasts on every network."""


def choose_gather(ranks: ShardGroup, layout: UnitLayout, itemsize: int, device: torch.device) -> Gather:
    """The gather for a unit, by the rule in the module's docstring. Called on every rank alike.

    Args:
        ranks: the shard dimension.
        layout: the unit's.
        itemsize: bytes of an element as it travels.
        device: where it is gathered to.
    """
    if device.type != "cpu" or dist.get_backend(ranks.group) != "gloo":
        return BroadcastGather()
    if ranks.size <= 2 or layout.numel * itemsize < SMALL_UNIT or _on_one_host(ranks.group):
        return BroadcastGather()
    return ChainGather(Lane.of(ranks))


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
