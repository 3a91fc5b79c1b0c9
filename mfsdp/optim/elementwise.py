"""Muon's elementwise work around the iteration: the average of gradients before it, the step along it after it.

Each is written three times: one operation after another, which gives torch's numbers bit for bit; each operation for
many matrices at once ("foreach"), with the same numbers in fewer calls and more memory; and as a function that is
compiled into one pass over memory.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mfsdp.optim.newton_schulz import Workspace

__all__ = ["Average", "Step"]


@dataclass(frozen=True, slots=True)
class Average:
    """How gradients are averaged, and how far the update looks ahead.

    Args:
        momentum: factor of the average.
        nesterov: whether the update looks ahead by one average.
        heavy_ball: whether gradients are summed rather than averaged.
        compiled: whether all of it is one pass.
    """

    momentum: float
    nesterov: bool
    heavy_ball: bool
    compiled: bool

    def into(self, out: Tensor, grad: Tensor, buffer: Tensor, workspace: Workspace) -> None:
        """Average ``grad`` into ``buffer``, and write the direction to go to ``out``, in the dtype that it has."""
        if self.compiled:
            _run(_average, (out, grad, buffer), (_on_device(self.momentum, grad),), (self.nesterov, self.heavy_ball))
            return
        if self.heavy_ball:
            buffer.mul_(self.momentum).add_(grad)
        else:
            buffer.lerp_(grad, 1 - self.momentum)
        if not self.nesterov:
            out.copy_(buffer)
            return
        ahead = workspace.take("ahead", grad.shape, grad.dtype, grad.device)
        if self.heavy_ball:
            torch.add(grad, buffer, alpha=self.momentum, out=ahead)
        else:
            torch.lerp(grad, buffer, self.momentum, out=ahead)
        out.copy_(ahead)

    def of_all(self, grads: list[Tensor], buffers: list[Tensor]) -> Sequence[Tensor]:
        """Average each of ``grads`` into its buffer; the directions to go, which may be the buffers themselves."""
        if self.heavy_ball:
            _scale(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
        else:
            torch._foreach_lerp_(buffers, grads, 1 - self.momentum)
        if not self.nesterov:
            return buffers
        if self.heavy_ball:
            return torch._foreach_add(grads, buffers, alpha=self.momentum)
        return torch._foreach_lerp(grads, buffers, self.momentum)


@dataclass(frozen=True, slots=True)
class Step:
    """Weight decay, then the step along an update.

    Args:
        lr: learning rate, a number or a 0-d tensor.
        weight_decay: decoupled weight decay.
        cautious: whether it is left out where it opposes the update.
        capturable: whether a tensor ``lr`` must not be read.
        compiled: whether all of it is one pass.
    """

    lr: Any
    weight_decay: float
    cautious: bool
    capturable: bool
    compiled: bool

    def along(self, update: Tensor, param: Tensor, adjustment: float, workspace: Workspace) -> None:
        """Step ``param`` by ``lr * adjustment`` against ``update``."""
        decay, scaled_lr = self.lr * self.weight_decay, self.lr * adjustment
        if self.compiled:
            rates = _on_device(decay, param), _on_device(scaled_lr, param)
            _run(_step, (param, update), rates, (self.cautious,))
            return
        widens = update.dtype != param.dtype == torch.promote_types(update.dtype, param.dtype)
        if widens and update.device.type == "cpu":
            # there an operation on two dtypes makes such a copy in new memory; a GPU converts as it reads
            update = workspace.take("ahead", update.shape, param.dtype, param.device).copy_(update)
        if self.cautious:
            param.sub_(param * (param * update >= 0) * decay)
        else:
            param.mul_(1 - decay)
        if self.capturable:  # a tensor is no alpha without being read
            param.addcmul_(update.to(param.dtype), _on_device(scaled_lr, param), value=-1)
        else:
            param.add_(update, alpha=-scaled_lr)

    def along_all(
        self,
        updates: Sequence[Tensor],
        params: list[Tensor],
        adjustments: Sequence[float],
        workspace: Workspace,
    ) -> None:
        """Step each of ``params`` against its update, as :meth:`along` does."""
        if self.cautious or self.capturable or isinstance(self.lr, Tensor):  # there is no such operation for many
            for update, param, adjustment in zip(updates, params, adjustments, strict=True):
                self.along(update, param, adjustment, workspace)
            return
        _scale(params, 1 - self.lr * self.weight_decay)
        alike: dict[float, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for update, param, adjustment in zip(updates, params, adjustments, strict=True):
            stepped, along = alike[adjustment]
            stepped.append(param)
            along.append(update)
        for adjustment, (stepped, along) in alike.items():
            torch._foreach_add_(stepped, along, alpha=-self.lr * adjustment)


def _scale(tensors: list[Tensor], by: float) -> None:
    # torch rounds a number (on a GPU, a tensor there) to the dtype of ``tensors``: in bfloat16 many a decay to none
    torch._foreach_mul_(tensors, torch.tensor(by, dtype=torch.float64, device="cpu"))


def _average(out: Tensor, grad: Tensor, buffer: Tensor, momentum: Tensor, nesterov: bool, heavy_ball: bool) -> None:
    weight = 1 if heavy_ball else 1 - momentum
    average = buffer * momentum + grad * weight
    buffer.copy_(average)
    out.copy_(average * momentum + grad * weight if nesterov else average)


def _step(param: Tensor, update: Tensor, decay: Tensor, scaled_lr: Tensor, cautious: bool) -> None:
    kept = param - param * (param * update >= 0) * decay if cautious else param * (1 - decay)
    param.copy_(kept - update * scaled_lr)


def _run(
    function: Callable[..., None], tensors: tuple[Tensor, ...], numbers: tuple[Tensor, ...], choices: tuple[bool, ...]
) -> None:
    """Call ``function(*tensors, *numbers, *choices)`` compiled."""
    tensors = _flat(*tensors)
    layout = tuple((t.dtype, tuple(stride == 1 for stride in t.stride())) for t in (*tensors, *numbers))
    _compiled(function, (tensors[0].device.type, *layout, *choices))(*tensors, *numbers, *choices)


@cache
def _compiled(function: Callable[..., None], variant: tuple[Any, ...]) -> Callable[..., None]:
    """One compiled function for each variant, whatever the shapes; what changes from step to step is a tensor.

    Each is compiled and counted by itself, for otherwise all would share the number of compilations that
    ``torch._dynamo.config.recompile_limit`` allows for a function in a process, which there are more variants than.

    Args:
        function: one of those above.
        variant: what its compiled code depends on.
    """
    # torch's overloads have not got the argument
    return torch.compile(function, dynamic=True, isolate_recompiles=True)  # type: ignore[call-overload]


def _on_device(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.full((), value, dtype=dtype, device=like.device)


def _flat(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of one shape ``(k, m, n)`` with as few dimensions as will do, so that there is less to compile for."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.view(-1) for tensor in tensors)
    return tuple(tensor.squeeze() for tensor in tensors)
