"""Graph style: the gathers and reductions of a model as operators that torch.compile traces and schedules."""

from mfsdp.fsdp.graph.module import GraphModule
from mfsdp.fsdp.graph.step import backward, compile_step
from mfsdp.fsdp.graph.style import GraphOptions, shard_graph

__all__ = ["GraphModule", "GraphOptions", "backward", "compile_step", "shard_graph"]
