"""The parameter groups of a saved optimizer, in each of the forms that checkpoints have them in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.errors import CheckpointError

__all__ = ["SavedGroup", "group_targets", "saved_groups"]


@dataclass(frozen=True)
class SavedGroup:
    """One group.

    Attributes:
        options: such as ``lr``.
        keys: name of a parameter -> what its state is saved under.
    """

    options: Mapping[str, Any]
    keys: Mapping[str, str]


def group_targets(contents: Contents, prefix: str) -> dict[str, Any]:
    """The entries that :func:`saved_groups` needs, and what to read them into."""
    start = _joined(prefix, "param_groups")
    targets: dict[str, Any] = {}
    for key in contents.below(start):
        entry = contents.entries[f"{start}.{key}"]
        targets[f"{start}.{key}"] = None
        if isinstance(entry, TensorStorageMetadata):
            targets[f"{start}.{key}"] = torch.empty(entry.size, dtype=entry.properties.dtype)
    return targets


def saved_groups(contents: Contents, prefix: str, read: Mapping[str, Any], names: Iterable[str]) -> list[SavedGroup]:
    """The groups.

    Args:
        contents: the checkpoint's.
        prefix: the key of the optimizer's state.
        read: what was read into :func:`group_targets`.
        names: of the model's parameters.

    Raises:
        CheckpointError: the state is saved by numbers, and nothing says whose they are.
    """
    start = _joined(prefix, "param_groups")
    options: dict[str, dict[str, Any]] = {}
    if f"{start}.0.params" in read:  # a list of groups
        for key in contents.below(start):
            position, _, option = key.partition(".")
            options.setdefault(position, {})[option] = read[f"{start}.{key}"]
        return [_group(contents, each) for each in options.values()]
    known = set(names)  # flattened: options of each parameter
    for key in contents.below(start):
        name, _, option = key.rpartition(".")
        if name in known:
            options.setdefault(name, {})[option] = read[f"{start}.{key}"]
    return [SavedGroup(each, {name: name}) for name, each in options.items()]


def _group(contents: Contents, saved: dict[str, Any]) -> SavedGroup:
    params = saved["params"]
    options = {option: value for option, value in saved.items() if option not in ("params", "param_names")}
    names = params
    if any(isinstance(each, int) for each in params):
        names = saved.get("param_names")
        if names is None:
            raise CheckpointError(
                f"the optimizer's state in {contents.folder} is saved by numbers, and nothing says which parameters "
                f"they stand for. Save torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, "
                f"optimizer), or give the optimizer model.named_parameters()."
            )
    return SavedGroup(_nested(options), {name: str(key) for name, key in zip(names, params, strict=True)})


def _nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that were taken apart because there are tensors in them, put together as tuples."""
    result: dict[str, Any] = {}
    for option, value in options.items():
        name, _, position = option.partition(".")
        result[name] = (*result.get(name, ()), value) if position.isdigit() else value
    return result


def _joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
