"""The class of modules that are units in graph style."""

from typing import Any, NoReturn

from torch import nn

from mfsdp.fsdp.graph.unit import GraphUnit

__all__ = ["GraphFSDPModule", "make_graph_module"]


class GraphFSDPModule(nn.Module):
    """What ``fully_shard(..., style="graph")`` makes of the root and of each unit in it.

    Its parameters are sharded DTensors, which become full while its ``forward`` runs. It is otherwise the module
    that it was. It is no ``FSDPModule``: there is nothing to steer by hand, as everything happens in the graph. Other
    methods find sharded parameters, unless :func:`mfsdp.register_forward_method` makes them like ``forward``.
    """

    _mfsdp_unit: GraphUnit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._mfsdp_unit.run(super().forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__}: a module that fully_shard(style='graph') has sharded cannot be copied. Copy the "
            "model before it is sharded, or shard another instance and give it this one's state_dict()."
        )


_classes: dict[type[nn.Module], type[GraphFSDPModule]] = {}
"""Of each class of modules, the one that its units in graph style have."""


def make_graph_module(module: nn.Module, unit: GraphUnit) -> None:
    """Turn ``module`` into a :class:`GraphFSDPModule`, in place."""
    before = type(module)
    if before not in _classes:
        _classes[before] = type(f"GraphFSDP{before.__name__}", (GraphFSDPModule, before), {})
    module.__class__ = _classes[before]
    module._mfsdp_unit = unit  # type: ignore[assignment]
