"""The plan: every parameter's record, and what follows from all of them."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import nn

from mfsdp.planning import report, serialization
from mfsdp.planning.binding import Binding, differences
from mfsdp.planning.errors import PlanError
from mfsdp.planning.loads import Imbalance, RankLoad, imbalance_of, loads_of
from mfsdp.planning.parameters import list_parameters, of_model
from mfsdp.planning.records import MatrixShard

__all__ = ["ShardPlan"]


def _checked(entries: Mapping[str, MatrixShard], world_size: int) -> dict[str, str]:
    """Check ``entries`` against each other; returns every name -> canonical name."""
    canonical: dict[str, str] = {}
    for name, entry in entries.items():
        if entry.name != name:
            raise PlanError(f"the entry under {name!r} is named {entry.name!r}; key and name must be equal.")
        owner = max(part.owner for part in entry.parts) if entry.parts else entry.owner
        if owner is not None and owner >= world_size:
            raise PlanError(
                f"{name}: owner {owner} is outside a mesh dimension of {world_size} ranks (0 to "
                f"{world_size - 1}). Plan again for this number of ranks."
            )
        for alias in (name, *entry.aliases) if entry.aliases else (name,):
            if canonical.setdefault(alias, name) != name:
                raise PlanError(f"{alias}: both {canonical[alias]} and {name} claim this name.")
    return canonical


@dataclass(frozen=True, repr=False)
class ShardPlan:
    """Who owns which parameter, made once from the whole model and the same on every rank.

    ``print(plan)`` shows it as a table.

    Args:
        entries: name -> record, in the model's order.
        world_size: number of owners: the size of the last mesh dimension.
        replicas: how many groups of ``world_size`` ranks hold the same (HSDP); 1 without replication.
        cost_model: name of the cost model that counted bytes and operations.
        binding: where to look the model's modules up; not part of the plan's value, JSON or hash, and lost
            when the plan is pickled or copied.

    Raises:
        PlanError: an entry contradicts the world size or another entry.
    """

    entries: Mapping[str, MatrixShard]
    world_size: int
    replicas: int = 1
    cost_model: str = "muon"
    binding: Binding = field(default_factory=Binding, compare=False)
    _canonical: Mapping[str, str] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        for what, size in (("world_size", self.world_size), ("replicas", self.replicas)):
            if type(size) is not int or size < 1:
                raise PlanError(f"{what}={size!r} must be an int of 1 or more.")
        object.__setattr__(self, "entries", MappingProxyType(dict(self.entries)))
        object.__setattr__(self, "_canonical", _checked(self.entries, self.world_size))

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardPlan, (dict(self.entries), self.world_size, self.replicas, self.cost_model)

    def __hash__(self) -> int:
        return int(self.hash()[:15], 16)

    def __repr__(self) -> str:
        size = f"{len(self.entries)} parameters, world_size={self.world_size}"
        return f"ShardPlan({size}, hash={self.hash()[:12]})"

    def __str__(self) -> str:
        return report.page(self)

    @cached_property
    def _loads(self) -> tuple[RankLoad, ...]:
        return loads_of(self.entries.values(), self.world_size)

    def loads(self) -> tuple[RankLoad, ...]:
        """What each rank keeps and does, by its coordinate on the last mesh dimension.

        A ``ROWS`` parameter counts with the rows that ``Shard(0)`` gives to the rank.
        """
        return self._loads

    def imbalance(self) -> Imbalance:
        """Largest load over mean load, for each measure of :class:`RankLoad`."""
        return imbalance_of(self.loads())

    def to_json(self) -> str:
        """The plan as JSON text, for :meth:`from_json`; equal plans give equal text."""
        return serialization.dump(self)

    @classmethod
    def from_json(cls, text: str) -> "ShardPlan":
        """The plan that :meth:`to_json` wrote, not bound to a model (see :meth:`bind`).

        Raises:
            PlanError: ``text`` is not a plan, is damaged, or was written in a newer format.
        """
        entries, world_size, replicas, cost_model = serialization.load(text)
        return cls({entry.name: entry for entry in entries}, world_size, replicas, cost_model)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def hash(self) -> str:
        """A hexadecimal digest that is equal exactly for equal plans, in every process."""
        return self._digest

    def first_difference(self, other: "ShardPlan") -> str | None:
        """In words, the first thing in which ``other`` differs; None if the plans are equal."""
        whole = [
            ("world_size", self.world_size, other.world_size),
            ("replicas", self.replicas, other.replicas),
            ("cost_model", self.cost_model, other.cost_model),
        ]
        for what, this, that in whole:
            if this != that:
                return f"{what} is {this!r} in one plan and {that!r} in the other"
        for mine, theirs in zip(self.entries.values(), other.entries.values(), strict=False):
            if mine.name != theirs.name:
                return f"one plan has {mine.name} where the other has {theirs.name}"
            if mine != theirs:
                return f"{mine.name}: " + ", ".join(_field_differences(mine, theirs))
        shorter, longer = sorted((self, other), key=lambda plan: len(plan.entries))
        if len(shorter.entries) == len(longer.entries):
            return None
        extra = list(longer.entries)[len(shorter.entries)]
        return f"{extra} is in one plan and not in the other"

    def bind(self, model: nn.Module) -> "ShardPlan":
        """This plan, able to recognise the modules of ``model``, a root module.

        A plan that was made from ``model`` is bound to it already; one that was loaded is not.

        Raises:
            PlanError: some parameter differs from the plan in name, shape, dtype or tying; all are listed.
        """
        planned = {(entry.name, *entry.aliases): (entry.shape, entry.dtype) for entry in self.entries.values()}
        wrong = list(differences(planned, list_parameters(of_model(model))))
        if wrong:
            raise PlanError(
                "the plan is not for this model:\n  "
                + "\n  ".join(wrong)
                + "\nPlan again with mfsdp.plan(model, mesh), or bind to the root of the planned model."
            )
        return ShardPlan(self.entries, self.world_size, self.replicas, self.cost_model, Binding.to_model(model))

    def name_of(self, module: nn.Module, parameter_name: str) -> str | None:
        """The key in :attr:`entries` of the parameter that ``module`` itself registers as ``parameter_name``.

        Aliases of a tied parameter lead to its canonical name. None if the plan does not know the module
        or has no such parameter.
        """
        name = self.binding.name_of(module, parameter_name)
        return None if name is None else self._canonical.get(name)


def _field_differences(mine: MatrixShard, theirs: MatrixShard) -> list[str]:
    others = serialization.to_fields(theirs)
    return [
        f"{name} is {value!r} in one plan and {others[name]!r} in the other"
        for name, value in serialization.to_fields(mine).items()
        if value != others[name]
    ]
