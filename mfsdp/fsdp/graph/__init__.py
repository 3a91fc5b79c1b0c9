"""Graph style: the gathers and reductions of a model as operators that torch.compile traces and schedules."""

from mfsdp.fsdp.graph.module import GraphFSDPModule
from mfsdp.fsdp.graph.step import backward, compile_step
from mfsdp.fsdp.graph.style import GraphOptions, shard_graph

__all__ = ["GraphFSDPModule", "GraphOptions", "backward", "compile_step", "shard_graph"]
