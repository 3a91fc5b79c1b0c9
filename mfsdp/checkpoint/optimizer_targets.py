"""What the state of optimizers is read into, before any of it is changed."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mfsdp import optim as mfsdp_optim
from mfsdp.checkpoint.contents import Contents
from mfsdp.checkpoint.misfits import Misfits
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.saved_groups import SavedGroup
from mfsdp.optim import RoutedOptimizer
from mfsdp.optim.group_options import OF_SCHEDULERS
from mfsdp.optim.owner_local import OwnerLocalOptimizer, state_like
from mfsdp.placements import owner_dims

__all__ = ["OptimizerTargets"]

_OF_CODE = frozenset({"params", "param_names", "split"})
"""What a group keeps when another's options are loaded."""


@dataclass(frozen=True)
class OptimizerTargets:
    """Tensors to read states into, and where these belong.

    Attributes:
        values: key in the checkpoint -> what to read it into.
        groups: for each optimizer its parameter groups, as its state dict is to have them.
        states: for each optimizer, number of a parameter -> entry of its state -> key in the checkpoint.
    """

    values: dict[str, Any]
    groups: list[list[dict[str, Any]]]
    states: list[dict[int, dict[str, str]]]

    @classmethod
    def of(
        cls,
        optimizers: Sequence[Optimizer],
        state: ModelState,
        contents: Contents,
        prefix: str,
        saved: Sequence[SavedGroup],
        misfits: Misfits,
    ) -> "OptimizerTargets":
        """Find the saved state of every parameter; what does not fit goes to ``misfits``."""
        targets = cls({}, [], [])
        source = _Source(contents, prefix, saved)
        for optimizer in optimizers:
            groups: list[dict[str, Any]] = []
            states: dict[int, dict[str, str]] = {}
            for index, group in enumerate(optimizer.param_groups):
                start = sum(len(each["params"]) for each in groups)
                merged = source.merged(optimizer, index, state, misfits)
                for number, param in enumerate(group["params"], start):
                    names = state.names_of.get(id(param), ())
                    entries = source.take(names)
                    if merged is not None:
                        targets._add(source.contents, _part(optimizer, index), merged, param, names, entries, misfits)
                    states[number] = entries
                groups.append({**(merged or group), "params": list(range(start, start + len(group["params"])))})
            targets.groups.append(groups)
            targets.states.append(states)
        misfits.unexpected.extend(source.unused())
        return targets

    def _add(
        self,
        contents: Contents,
        part: Optimizer,
        group: dict[str, Any],
        param: Tensor,
        names: Sequence[str],
        entries: Mapping[str, str],
        misfits: Misfits,
    ) -> None:
        """Add targets for the saved entries of one parameter."""
        expected: Mapping[str, Any] = part.state.get(param, {})
        ours, fresh = isinstance(part, OwnerLocalOptimizer), False
        if isinstance(part, OwnerLocalOptimizer) and entries and not _is_like(expected, entries, contents):
            expected, fresh = part.new_state(group, param), True
            misfits.missing.extend(f"{names[0]}.{entry}" for entry in expected if entry not in entries)
            misfits.unexpected.extend(f"{names[0]}.{entry}" for entry in entries if entry not in expected)
        for entry, key in entries.items():
            saved, like = contents.entries[key], expected.get(entry)
            if not isinstance(saved, TensorStorageMetadata):
                self.values[key] = None
            elif not ours:
                self.values[key] = _target(f"{names[0]}.{entry}", entry, saved, param, like, misfits)
            elif isinstance(like, Tensor) and misfits.check_shape(f"{names[0]}.{entry}", saved.size, like.shape):
                usable = fresh and like.dtype == saved.properties.dtype
                self.values[key] = like if usable else _empty_like(like, saved.properties.dtype)

    def load_into(self, optimizers: Sequence[Optimizer], read: Mapping[str, Any]) -> None:
        """Give the optimizers what was read."""
        for optimizer, groups, states in zip(optimizers, self.groups, self.states, strict=True):
            state = {
                number: _tree({entry: read[key] for entry, key in entries.items()})
                for number, entries in states.items()
                if entries
            }
            optimizer.load_state_dict({"state": state, "param_groups": groups})


class _Source:
    """The saved groups and states, and which of them have been asked for."""

    def __init__(self, contents: Contents, prefix: str, saved: Sequence[SavedGroup]) -> None:
        self.contents = contents
        self._start = f"{prefix}.state" if prefix else "state"
        self._group_of = {name: group for group in saved for name in group.keys}
        self._name_of = {key: name for group in saved for name, key in group.keys.items()}
        self._states: dict[str, dict[str, str]] = defaultdict(dict)
        self._taken: set[str] = set()
        for rest in contents.below(self._start):
            name, entry = self._split(rest)
            self._states[name][entry] = f"{self._start}.{rest}"

    def _split(self, rest: str) -> tuple[str, str]:
        """Name of a parameter, and entry of its state, which may have dots, too."""
        position = rest.find(".")
        while position >= 0:
            if rest[:position] in self._name_of:
                return self._name_of[rest[:position]], rest[position + 1 :]
            position = rest.find(".", position + 1)
        return rest, ""

    def take(self, names: Iterable[str]) -> dict[str, str]:
        """Entry -> key, of the parameter that has these names."""
        for name in names:
            if name in self._states:
                self._taken.add(name)
                return self._states[name]
        return {}

    def unused(self) -> list[str]:
        """Parameters with states that nobody has asked for."""
        return [f"{name} (in the optimizer)" for name in self._states if name not in self._taken]

    def merged(self, optimizer: Optimizer, index: int, state: ModelState, misfits: Misfits) -> dict[str, Any] | None:
        """The options of a group, with those that were saved for its parameters; None if they do not fit."""
        group = optimizer.param_groups[index]
        sources: dict[int, SavedGroup] = {}
        for param in group["params"]:
            names = state.names_of.get(id(param), ("a parameter that is not the model's",))
            found = next((self._group_of[name] for name in names if name in self._group_of), None)
            if found is not None:
                sources[id(found)] = found
            elif param.requires_grad:
                misfits.missing.append(f"{names[0]} (in the optimizer)")
        known = {option: value for option, value in group.items() if option not in _OF_CODE}
        options: dict[str, Any] = {}
        for each in sources.values():
            if difference := _other_class(each.options, known, _part(optimizer, index)):
                misfits.others.append(f"group {index} of {type(optimizer).__name__}: {difference}")
                return None
            for option, value in each.options.items():
                if option in known or option in OF_SCHEDULERS:
                    if option in options and not _same(options[option], value):
                        misfits.others.append(
                            f"group {index} of {type(optimizer).__name__}: its parameters were saved in groups that "
                            f"differ in {option}: {options[option]!r} and {value!r}"
                        )
                        return None
                    options[option] = value
        return {**group, **options}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def _other_class(saved: Mapping[str, Any], known: Mapping[str, Any], part: Optimizer) -> str | None:
    """Why the options of a saved group cannot be those of ``part``; None if they can.

    Variants of an algorithm, and versions of a class, add options; another algorithm has some and lacks others. What
    is no optimizer's option was put into the group by its user, or by a scheduler.
    """
    lacking = sorted((known.keys() - saved.keys()) & _options())
    surplus = sorted((saved.keys() - known.keys()) & _options())
    if lacking and surplus:
        return (
            f"saved by another optimizer than {type(part).__name__}: its options have "
            f"{', '.join(surplus)}, and lack {', '.join(lacking)}"
        )
    return None


@cache
def _options() -> frozenset[str]:
    """The options of all optimizers of torch and mfsdp."""
    found = (each for module in (torch.optim, mfsdp_optim) for each in vars(module).values() if isinstance(each, type))
    classes = {each for each in found if issubclass(each, Optimizer)} - {Optimizer, RoutedOptimizer}
    return frozenset(
        option
        for optimizer_class in classes
        for option in optimizer_class([nn.Parameter(torch.zeros(1, 1))]).defaults  # type: ignore[call-arg]
    )


def _part(optimizer: Optimizer, index: int) -> Optimizer:
    return optimizer.part_of(index) if isinstance(optimizer, RoutedOptimizer) else optimizer


def _target(
    label: str, entry: str, saved: TensorStorageMetadata, param: Tensor, like: Any, misfits: Misfits
) -> Tensor | None:
    """What to read an entry into, of an optimizer that does not say before its first step."""
    dtype = saved.properties.dtype
    if isinstance(like, Tensor) and like.shape == saved.size:
        return _empty_like(like, dtype)
    if entry == "step":  # so named by all of torch's optimizers, which keep it on the CPU
        return torch.empty(saved.size, dtype=dtype)
    if saved.size == param.shape:
        return _empty_like(param, dtype)
    if not isinstance(param, DTensor):
        return torch.empty(saved.size, dtype=dtype, device=param.device)
    if not saved.size:
        return torch.empty(saved.size, dtype=dtype)
    if len(owner_dims(param.placements)) > 0:
        return state_like(param, saved.size, dtype)
    misfits.others.append(
        f"{label}: its shape is {tuple(saved.size)} and the parameter's is {tuple(param.shape)}, so that nothing says "
        f"how it is to be sharded; take a step before loading"
    )
    return None


def _is_like(state: Mapping[str, Any], entries: Mapping[str, str], contents: Contents) -> bool:
    """Whether a state has the saved entries, in their shapes."""
    if state.keys() != entries.keys():
        return False
    for entry, key in entries.items():
        value, saved = state[entry], contents.entries[key]
        if not isinstance(value, Tensor) or not isinstance(saved, TensorStorageMetadata) or value.shape != saved.size:
            return False
    return True


def _empty_like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype, requires_grad=False)


def _tree(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries whose names have dots, as nested dictionaries."""
    tree: dict[str, Any] = {}
    for entry, value in entries.items():
        *outer, last = entry.split(".")
        place = tree
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return tree
