"""Methods other than ``forward`` that compute with a unit's full parameters."""

from functools import wraps
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from mfsdp.fsdp.graph import GraphFSDPModule

__all__ = ["register_forward_method"]


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a sharded module compute with full parameters, as its ``forward`` does.

    ::

        mfsdp.fully_shard(model, mesh=mesh, plan=plan, style="graph")
        mfsdp.register_forward_method(model, "encode")

    Without it the method finds sharded parameters, and torch raises that it "got mixed torch.Tensor and DTensor". A
    method that merely calls the module, and uses no parameters of its unit itself, does not need it.

    In hooks style it is :func:`torch.distributed.fsdp.register_fsdp_forward_method`, which knows no graph style. A
    module that was not sharded is left alone.

    Args:
        module: one on which ``fully_shard`` was called, or a unit in a model of graph style.
        method_name: the method.

    Raises:
        ValueError: the module has no such method.
    """
    if not isinstance(module, GraphFSDPModule):
        register_fsdp_forward_method(module, method_name)
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method {method_name!r} to register as a forward method.")

    @wraps(method)
    def run(self: GraphFSDPModule, *args: Any, **kwargs: Any) -> Any:
        return self._mfsdp_unit.run(method, args, kwargs)

    setattr(module, method_name, MethodType(run, module))
