"""What checkpoints call the tensors of a model: their names in the model as it was before any wrapper."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["ModelState", "unwrapped_name"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""What ``torch.compile`` and activation checkpointing put into names."""


@dataclass(frozen=True)
class ModelState:
    """A model's state dict by the names of the unwrapped model.

    Attributes:
        values: every persistent entry, tied ones under each of their names.
        keys: name -> key in the model's own state dict.
        names_of: id of a parameter or buffer -> its names, the first of which is the canonical one.
    """

    values: dict[str, Any]
    keys: dict[str, str]
    names_of: dict[int, tuple[str, ...]] = field(repr=False)

    @classmethod
    def of(cls, model: nn.Module) -> "ModelState":
        """The state of ``model``, sharded or not; parameters that are unsharded are resharded by this."""
        state = model.state_dict()
        keys = {unwrapped_name(model, key): key for key in state}
        names: dict[int, list[str]] = {}
        for raw, tensor in _named_tensors(model):
            name = unwrapped_name(model, raw)
            if name in keys:
                names.setdefault(id(tensor), []).append(name)
        return cls(
            values={name: state[key] for name, key in keys.items()},
            keys=keys,
            names_of={key: tuple(each) for key, each in names.items()},
        )

    @property
    def ties(self) -> dict[str, tuple[str, ...]]:
        """Canonical name -> the other names of the same tensor; of tied tensors only."""
        return {names[0]: names[1:] for names in self.names_of.values() if len(names) > 1}

    @property
    def canonical(self) -> dict[str, str]:
        """Every name of a tied tensor -> its canonical name."""
        return {name: first for first, others in self.ties.items() for name in (first, *others)}


def unwrapped_name(model: nn.Module, name: str) -> str:
    """``name`` of something in ``model``, without what wrappers have put into it."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if isinstance(model, DistributedDataParallel) and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _named_tensors(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
