"""Optimizers that update a matrix on its owner, alone and without communication."""

from mfsdp.optim.adamw import AdamW
from mfsdp.optim.muon import Muon
from mfsdp.optim.newton_schulz import newton_schulz
from mfsdp.optim.routing import RoutedOptimizer, build_optimizer

__all__ = ["AdamW", "Muon", "RoutedOptimizer", "build_optimizer", "newton_schulz"]
