"""The states of several optimizers, seen as the state of one."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any

from torch.optim import Optimizer

__all__ = ["JoinedState"]


class JoinedState(MutableMapping[Any, dict[Any, Any]]):
    """What ``Optimizer.state`` is for an optimizer of parts: nothing is held here, each part holds its own.

    As in torch's, a parameter that has no state gets an empty one when it is looked up. A key that is no
    parameter of any part belongs to the first.

    Args:
        parts: the optimizers; their names do not matter, their order does.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self._parts = parts

    def replace(self, state: Mapping[Any, dict[Any, Any]]) -> None:
        """Hold exactly ``state``, each part what is its own."""
        entries = dict(state)
        holder = {param: part for part in self._parts.values() for g in part.param_groups for param in g["params"]}
        first = next(iter(self._parts.values()))
        for part in self._parts.values():
            part.state = defaultdict(dict)
        for key, value in entries.items():
            holder.get(key, first).state[key] = value

    def _part_of(self, key: Any) -> Optimizer:
        for part in self._parts.values():
            if key in part.state or any(key is param for group in part.param_groups for param in group["params"]):
                return part
        return next(iter(self._parts.values()))

    def __contains__(self, key: object) -> bool:
        return any(key in part.state for part in self._parts.values())

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, or ``default``; none is made."""
        if key in self:
            return self[key]
        return default

    def __getitem__(self, key: Any) -> dict[Any, Any]:
        return self._part_of(key).state[key]

    def __setitem__(self, key: Any, value: dict[Any, Any]) -> None:
        self._part_of(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._part_of(key).state[key]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(part.state for part in self._parts.values())

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts.values())
