"""The state of torch's random number generators, of the CPU and of the current accelerator."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["rng_state", "set_rng_state"]


def rng_state() -> dict[str, Tensor]:
    """Type of the device -> state of its generator, a byte tensor on the CPU."""
    states = {"cpu": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return states


def set_rng_state(states: Mapping[str, Tensor]) -> None:
    """Undo what has happened since :func:`rng_state`; devices that are not there are passed over."""
    torch.set_rng_state(states["cpu"])
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in states:
        torch.get_device_module(accelerator).set_rng_state(states[accelerator.type])
