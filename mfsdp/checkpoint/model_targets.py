"""What the tensors of a model are read into, before any of them is changed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.misfits import Misfits
from mfsdp.checkpoint.names import ModelState

__all__ = ["ModelTargets"]


@dataclass(frozen=True)
class ModelTargets:
    """Copies of a model's tensors to read into.

    Attributes:
        values: key in the checkpoint -> what to read it into.
        keys: key in the model's state dict -> key in the checkpoint.
    """

    values: dict[str, Any]
    keys: dict[str, str]

    @classmethod
    def of(cls, state: ModelState, contents: Contents, misfits: Misfits) -> "ModelTargets":
        """Find a checkpoint's entry for each of the model's; what does not fit goes to ``misfits``.

        Of a tied tensor one name is enough, whichever it is.
        """
        prefix = contents.find_model(state.values)
        found = set(contents.below(prefix)) if prefix else set(contents.entries)
        canonical, ties = state.canonical, state.ties
        values: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for name, value in state.values.items():
            first = canonical.get(name, name)
            names = (first, *ties.get(first, ()))
            saved_as = next((each for each in names if each in found), None)
            if saved_as is None:
                misfits.missing.append(name)
                continue
            key = f"{prefix}.{saved_as}" if prefix else saved_as
            if key not in values:
                values[key] = _target(name, value, contents, key, misfits)
            keys[state.keys[name]] = key
        if prefix:
            misfits.unexpected.extend(name for name in contents.below(prefix) if name not in state.values)
        return cls(values, keys)

    def load_into(self, model: nn.Module, read: dict[str, Any]) -> None:
        """Give the model what was read."""
        model.load_state_dict({name: read[key] for name, key in self.keys.items()})


def _target(name: str, value: Any, contents: Contents, key: str, misfits: Misfits) -> Any:
    entry = contents.entries[key]
    if not isinstance(value, Tensor):
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return None
    if not isinstance(entry, TensorStorageMetadata):
        misfits.others.append(f"{name}: no tensor in the checkpoint, but one here")
        return None
    if value.is_meta:
        misfits.others.append(f"{name}: on the meta device here; call model.to_empty(device=...) before loading")
        return None
    if not misfits.check_shape(name, entry.size, value.shape):
        return None
    return torch.empty_like(value, requires_grad=False)
