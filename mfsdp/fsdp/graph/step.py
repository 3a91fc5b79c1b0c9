"""A whole training step as one graph: forward, backward, and the optimizer's step."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.fx.traceback import annotate

__all__ = ["backward", "compile_step"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def backward(loss: Tensor) -> None:
    """``loss.backward()``, marked as the backward part of a graph that has forward and backward.

    The mark tells the compiler for what to gather full parameters again, instead of keeping them from forward.
    Outside of compiled code it is ``loss.backward()`` and nothing else.
    """
    with annotate({"phase": "backward"}):
        loss.backward()


def compile_step(step: Callable[_P, _R], **options: Any) -> Callable[_P, _R]:
    """Compile a function that runs forward, :func:`backward` and ``optimizer.step()`` into one graph.

    ::

        def step(tokens, targets):
            loss = model(tokens, targets)          # model: fully_shard(model, mesh=mesh, plan=plan, style="graph")
            mfsdp.backward(loss)
            optimizer.step()                       # of mfsdp.optim
            return loss.detach()

        step = mfsdp.compile_step(step)
        for tokens, targets in batches:
            loss = step(tokens, targets)
            optimizer.zero_grad()                  # outside: torch.compile does not trace it

    It is compiled twice: the first step makes the optimizer's state. ``torch.optim.Muon`` and ``torch.optim.AdamW``
    cannot be in the same graph as the backward that makes their gradients, because torch breaks the graph there;
    compile their ``step`` by itself.

    Args:
        step: the function. Learning rates that change should be tensors, which are inputs of the graph.
        options: of ``torch.compile``; ``fullgraph`` is True.

    Raises:
        torch._dynamo.exc.Unsupported: at the first call, for something that cannot be in the graph.
    """
    compiled = torch.compile(step, fullgraph=True, **options)

    @wraps(step)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(*args, **kwargs)

    return run
