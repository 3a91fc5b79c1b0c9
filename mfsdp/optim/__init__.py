"""Optimizers that update a matrix on its owner, alone and without communication."""

from mfsdp.optim.adamw import AdamW
from mfsdp.optim.clipping import clip_grad_norm_
from mfsdp.optim.muon import Muon
from mfsdp.optim.newton_schulz import newton_schulz
from mfsdp.optim.qk_clip import QKClip
from mfsdp.optim.routing import RoutedOptimizer, build_optimizer
from mfsdp.optim.shampoo import Shampoo
from mfsdp.optim.soap import SOAP

__all__ = [
    "SOAP",
    "AdamW",
    "Muon",
    "QKClip",
    "RoutedOptimizer",
    "Shampoo",
    "build_optimizer",
    "clip_grad_norm_",
    "newton_schulz",
]
