"""The class of modules that are units in graph style."""

from typing import Any

from torch import nn

from mfsdp.fsdp.graph.unit import GraphUnit

__all__ = ["GraphModule", "make_graph_module"]


class GraphModule(nn.Module):
    """What ``fully_shard(..., style="graph")`` makes of the root and of each unit in it.

    Its parameters are sharded DTensors, which become full while its ``forward`` runs. It is otherwise the module
    that it was. It is no ``FSDPModule``: there is nothing to steer by hand, as everything happens in the graph.
    """

    _mfsdp_unit: GraphUnit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._mfsdp_unit.run(super().forward, args, kwargs)


def make_graph_module(module: nn.Module, unit: GraphUnit) -> None:
    """Turn ``module`` into a :class:`GraphModule`, in place."""
    cls = type(module)
    module.__class__ = type(f"Graph{cls.__name__}", (GraphModule, cls), {})
    module._mfsdp_unit = unit  # type: ignore[assignment]
