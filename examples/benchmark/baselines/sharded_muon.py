"""What Muon over row-sharded parameters has in common, however the matrices are brought together."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer


class ShardedMuon(Optimizer):
    """Muon over FSDP2's parameters, with the arithmetic and the defaults of ``torch.optim.Muon``.

    Momentum, weight decay and the update are applied to the rows that a rank holds; only the orthogonalisation needs
    whole matrices.

    Args:
        params: 2-D DTensors placed ``[Shard(0)]`` on one mesh, in the same order on every rank.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: of the moving average of gradients.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._params: list[nn.Parameter] = [param for group in self.param_groups for param in group["params"]]
        for param in self._params:
            if not isinstance(param, DTensor) or param.placements != (Shard(0),) or param.ndim != 2:
                raise ValueError("sharded Muon takes 2-D DTensors that are placed [Shard(0)].")
        mesh = self._params[0].device_mesh  # type: ignore[attr-defined]
        self.group: dist.ProcessGroup = mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()

    def rows(self, height: int, rank: int) -> slice:
        """The rows of a matrix that ``rank`` holds."""
        chunk = -(-height // self.size)
        return slice(min(rank * chunk, height), min((rank + 1) * chunk, height))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._groups = [group for group in self.param_groups for _ in group["params"]]
        for index, update in self.orthogonalized([param.shape for param in self._params]):
            param, group = self._params[index], self._groups[index]
            local = param.to_local()  # type: ignore[attr-defined]
            height, width = param.shape
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update.view_as(local), alpha=-group["lr"] * math.sqrt(max(1, height / width)))
        return loss

    def update(self, index: int) -> Tensor:
        """This rank's rows of what is to be orthogonalised, of the parameter of this number; once in a step."""
        param, group = self._params[index], self._groups[index]
        gradient = param.grad.to_local()  # type: ignore[union-attr, operator]
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(state["momentum_buffer"], group["momentum"])

    @abstractmethod
    def orthogonalized(self, shapes: list[torch.Size]) -> Iterator[tuple[int, Tensor]]:
        """Each matrix's number and this rank's rows of its orthogonal factor; the matrices have these ``shapes``."""
