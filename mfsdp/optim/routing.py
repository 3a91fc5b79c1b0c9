"""One optimizer for a whole model: matrices to a matrix optimizer, everything else to AdamW."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from mfsdp.optim.adamw import AdamW
from mfsdp.optim.backward_steps import BackwardSteps
from mfsdp.optim.group_options import check_names, completed_groups, saved_groups
from mfsdp.optim.joined_state import JoinedState
from mfsdp.optim.muon import Muon
from mfsdp.optim.owner_local import OwnerLocalOptimizer, restore_dtypes
from mfsdp.optim.shampoo import Shampoo
from mfsdp.optim.soap import SOAP
from mfsdp.placements import OwnerShard
from mfsdp.planning import Role, ShardPlan
from mfsdp.planning import plan as make_plan
from mfsdp.planning.split import Split

__all__ = ["RoutedOptimizer", "build_optimizer"]

_BY_NAME: dict[str, type[Optimizer]] = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP}


@dataclass(frozen=True)
class _Recipe:
    """How one of the parts is made, once there is a parameter for it."""

    optimizer_class: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, group: dict[str, Any]) -> Optimizer:
        return self.optimizer_class([group], **self.options)


class RoutedOptimizer(Optimizer):
    """Two optimizers that act as one: what :func:`build_optimizer` returns.

    ``param_groups`` are *shared* with the two: a scheduler that changes a group's ``lr`` changes it for the part
    that steps the group. ``state`` is that of both, and there is one state dict, keyed as any optimizer's is.
    ``step`` evaluates a closure once, then steps the parts.

    Attributes:
        parts: ``"matrix"`` and ``"other"`` to the optimizer of each; one without parameters is absent. Each has a
            state dict of its own parameters; load into the whole, so that the groups stay shared.
        backward_steps: with ``overlap="backward"``, what steps parameters during backward; else None.
    """

    backward_steps: BackwardSteps | None = None

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        matrix: _Recipe,
        other: _Recipe,
        roles: Mapping[str, Role],
    ) -> None:
        self.parts: dict[str, Optimizer] = {}
        self._recipes = {"matrix": matrix, "other": other}
        self._part_of_group: list[str] = []
        self._roles = dict(roles)
        super().__init__(groups, {})
        self.state = JoinedState(self.parts)  # type: ignore[assignment]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, named if the others are; matrices and others become a group each.

        Options in ``param_group`` besides ``"params"`` hold for each of these groups. If it is refused, nothing
        of it is added.
        """
        params = param_group["params"]
        entries = [params] if isinstance(params, Tensor) else list(params)
        options = {key: value for key, value in param_group.items() if key != "params"}
        with ExitStack() as refused:
            refused.callback(self._keep_groups, len(self.param_groups))
            for part, recipe in self._recipes.items():
                routed = [entry for entry in entries if self._part_for(entry) == part]
                if routed:
                    self._add_to_part(part, recipe, {"params": routed, **options})
            refused.pop_all()

    def _keep_groups(self, count: int) -> None:
        """Drop all groups but the first ``count``, here and in the parts."""
        del self.param_groups[count:], self._part_of_group[count:]
        for name, part in list(self.parts.items()):
            del part.param_groups[self._part_of_group.count(name) :]
            if not part.param_groups:
                del self.parts[name]

    def part_of(self, group_index: int) -> Optimizer:
        """The one of :attr:`parts` that steps the group ``param_groups[group_index]``."""
        return self.parts[self._part_of_group[group_index]]

    def _part_for(self, entry: Tensor | tuple[str, Tensor]) -> str:
        name, param = entry if isinstance(entry, tuple) else ("", entry)
        return "matrix" if _is_matrix(param, self._roles.get(name)) else "other"

    def _add_to_part(self, part: str, recipe: _Recipe, group: dict[str, Any]) -> None:
        if part in self.parts:
            self.parts[part].add_param_group(group)
        else:
            self.parts[part] = recipe.make(group)
        check_names(self.parts[part], group)
        super().add_param_group(self.parts[part].param_groups[-1])
        self._part_of_group.append(part)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step; ``closure`` reevaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            if self.backward_steps is not None:
                raise ValueError('build_optimizer(overlap="backward") steps in backward: step takes no closure.')
            with torch.enable_grad():
                loss = closure()
        if self.backward_steps is not None:
            self.backward_steps.end_step()
        for part in self.parts.values():
            part.step()
        return loss

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """:func:`torch.nn.utils.clip_grad_norm_` over all parameters.

        Raises:
            ValueError: with ``overlap="backward"`` the gradients have been used before their norm is known.
        """
        if self.backward_steps is not None:
            raise ValueError(
                'build_optimizer(overlap="backward") steps each parameter before the norm of all gradients is '
                "known, so that they cannot be clipped by it. Build the optimizer without overlap."
            )
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type)

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's, of data alone: options that are a ``split`` or a function are left out."""
        return saved_groups(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer state; every tensor keeps the dtype that it was saved in.

        Options that the state dict does not have stay as they are, and ``split`` always does.

        Raises:
            ValueError: the state of a parameter lacks an entry: it is another optimizer's.
        """
        options = [self.parts[part].defaults for part in self._part_of_group]
        state_dict = completed_groups(state_dict, self.param_groups, options)
        to_load = state_dict["param_groups"]
        for name, group, saved in zip(self._part_of_group, self.param_groups, to_load, strict=False):
            part = self.parts[name]
            if isinstance(part, OwnerLocalOptimizer):
                part.check_state(group, saved, state_dict["state"])
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)

    def __getstate__(self) -> dict[str, Any]:
        mine = ("parts", "_recipes", "_part_of_group", "_roles")
        return super().__getstate__() | {name: self.__dict__[name] for name in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Loading replaces groups and state: the parts must see the new ones.
        joined = JoinedState(self.parts)
        joined.replace(state["state"])
        self.state = joined  # type: ignore[assignment]
        for name, part in self.parts.items():
            owner_of_group = zip(self.param_groups, self._part_of_group, strict=True)
            groups = [group for group, owner in owner_of_group if owner == name]
            part.__setstate__({"state": part.state, "param_groups": groups})


def build_optimizer(
    model: nn.Module | Iterable[tuple[str, Tensor]],
    matrix: str | type[Optimizer] = "muon",
    matrix_kwargs: Mapping[str, Any] | None = None,
    other_kwargs: Mapping[str, Any] | None = None,
    *,
    groups: Mapping[str, Mapping[str, Any]] | None = None,
    plan: ShardPlan | None = None,
    overlap: str | None = None,
) -> RoutedOptimizer:
    """The optimizer of a model: ``matrix`` steps its matrices, and AdamW everything else.

    Of the DTensors that are sharded in any way, those with an ``OwnerShard`` are matrices. For plain and for
    replicated tensors the role decides, from the plan or as the planner gives it, by which embeddings and
    output heads are none; where ``model`` is not a module there are no roles, and two dimensions make a matrix.

    Without ``groups`` and ``plan`` the first group holds the matrices and the second everything else, in the
    order of ``named_parameters``, on every rank alike; an empty group is left out.

    Args:
        model: a module, sharded or not, or named parameters.
        matrix: ``"muon"``, ``"shampoo"``, ``"soap"``, or any ``torch.optim.Optimizer`` class, which is given
            named parameters.
        matrix_kwargs: keyword arguments of the matrix optimizer.
        other_kwargs: keyword arguments of AdamW, of which ``foreach`` is true by default.
        groups: name pattern (``*``, ``?``, ``[...]``; ``*`` also matches dots) to the options of the parameters
            that match it, for instance ``{"*.norm.*": {"weight_decay": 0.0}}``. They become groups of their
            own, after the others; a parameter belongs to the first pattern that matches.
        plan: the model's, for the logical matrices in it (its ``splits``), which ``matrix`` must then take as the
            option ``split``. They are used only if the plan is passed here: a model sharded by a plan does not
            know it any more.
        overlap: ``"backward"`` to step each parameter during backward, as soon as its gradient has arrived, and
            to free the gradient; ``step`` then only ends the step. The numbers are the same. It excludes
            clipping by global norm, a ``GradScaler`` (using a freed gradient raises), closures, and accumulating
            gradients without saying which micro-batch is the last
            (``optimizer.backward_steps.is_last_microbatch``).

    Parameters of ``FSDPModule`` that a forward pass has left unsharded are resharded first.

    Raises:
        TypeError: ``model`` is parameters without names.
        ValueError: an argument is not known, a pattern matches nothing, there are no parameters, every matrix is
            sharded so that no rank holds it whole, or the optimizers refuse a parameter or an argument.
    """
    if overlap not in (None, "backward"):
        raise ValueError(f"build_optimizer: overlap must be None or 'backward', not {overlap!r}.")
    named = _named_parameters(model)
    if plan is not None:
        roles = {name: entry.role for name, entry in plan.entries.items()}
    else:
        roles = _roles_by_name(model) if isinstance(model, nn.Module) else {}
    _check_sharding(named, roles)
    optimizer = RoutedOptimizer(
        _grouped(named, groups or {}, plan),
        matrix=_Recipe(_matrix_class(matrix), dict(matrix_kwargs or {})),
        other=_Recipe(AdamW, _with_foreach(dict(other_kwargs or {}))),
        roles=roles,
    )
    if overlap == "backward":
        optimizer.backward_steps = BackwardSteps(optimizer.parts)
    return optimizer


def _named_parameters(model: nn.Module | Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    if isinstance(model, nn.Module):
        for module in model.modules():
            # A forward pass without backward leaves the root unsharded: its parameters are then plain for a time.
            if isinstance(module, FSDPModule):
                module.reshard()
        return list(model.named_parameters())
    named = list(model)
    for entry in named:
        if not isinstance(entry, tuple):
            raise TypeError(
                f"build_optimizer: parameters must come with their names, but there is a {type(entry).__name__} among "
                f"them. Pass the module or model.named_parameters()."
            )
    return named


def _grouped(
    named: Sequence[tuple[str, Tensor]], patterns: Mapping[str, Mapping[str, Any]], plan: ShardPlan | None
) -> list[dict[str, Any]]:
    """Groups by pattern and by logical matrices: first those of no pattern, then pattern by pattern."""
    unmatched = set(patterns)
    found: dict[tuple[str | None, Split | None], list[tuple[str, Tensor]]] = {(None, None): []}
    for name, param in named:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        unmatched.difference_update(matching)
        entry = plan.entries.get(name) if plan is not None else None
        key = (matching[0] if matching else None, entry.split if entry is not None else None)
        found.setdefault(key, []).append((name, param))
    if unmatched:
        missing = ", ".join(repr(pattern) for pattern in patterns if pattern in unmatched)
        raise ValueError(
            f"build_optimizer: groups: no parameter matches {missing}. Patterns are matched against full names, "
            f"such as {named[0][0]!r}."
        )
    order = [None, *patterns]
    groups = []
    for (pattern, split), members in sorted(found.items(), key=lambda item: order.index(item[0][0])):
        options = dict(patterns[pattern]) if pattern is not None else {}
        if split is not None:
            options["split"] = split
        if members:
            groups.append({"params": members, **options})
    return groups


def _matrix_class(matrix: str | type[Optimizer]) -> type[Optimizer]:
    if isinstance(matrix, type) and issubclass(matrix, Optimizer):
        return matrix
    if isinstance(matrix, str) and matrix in _BY_NAME:
        return _BY_NAME[matrix]
    known = ", ".join(map(repr, _BY_NAME))
    raise ValueError(f"build_optimizer: matrix must be {known} or a torch.optim.Optimizer class, not {matrix!r}.")


def _with_foreach(options: dict[str, Any]) -> dict[str, Any]:
    """AdamW's options with its multi-tensor form as the default, where it can do what is asked."""
    if options.get("fused") or isinstance(options.get("lr"), Tensor):
        return options
    return {"foreach": True, **options}


def _roles_by_name(model: nn.Module) -> dict[str, Role]:
    """Roles do not depend on the number of ranks, so that a plan for one tells them."""
    return {name: entry.role for name, entry in make_plan(model, 1).entries.items()}


def _check_sharding(named: Sequence[tuple[str, Tensor]], roles: Mapping[str, Role]) -> None:
    """Refuse a model none of whose matrices is whole anywhere: a matrix optimizer was asked for in vain."""
    if any(_is_matrix(param, roles.get(name)) for name, param in named):
        return
    for name, param in named:
        if roles.get(name) is Role.MATRIX and param.ndim == 2 and isinstance(param, DTensor):
            for mesh_dim, placement in enumerate(param.placements):
                if isinstance(placement, Shard):
                    raise ValueError(
                        f"build_optimizer: no parameter is a matrix that its owner holds whole: parameter {name!r} of "
                        f"shape {tuple(param.shape)} is {placement!r} on mesh dimension {mesh_dim}. Shard the model "
                        f"with mfsdp.fully_shard, which places matrices as OwnerShard, or use AdamW alone."
                    )


def _is_matrix(param: Tensor, role: Role | None) -> bool:
    if isinstance(param, DTensor) and not all(placement.is_replicate() for placement in param.placements):
        return any(isinstance(placement, OwnerShard) for placement in param.placements)
    return param.ndim == 2 if role is None else role is Role.MATRIX
