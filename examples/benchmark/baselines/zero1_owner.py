"""Full parameters on every rank; owners step, and send the new parameters to all others (ZeRO-1 by whole matrices)."""

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer


def zero1_owner_muon(params: Iterable[nn.Parameter], lr: float = 1e-3) -> Optimizer:
    """``torch.optim.Muon`` under torch's ``ZeroRedundancyOptimizer``, which deals out whole parameters by size and
    broadcasts each from its owner after the step. For a model that DDP wraps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about TorchScript
        return ZeroRedundancyOptimizer(list(params), optimizer_class=torch.optim.Muon, lr=lr)
