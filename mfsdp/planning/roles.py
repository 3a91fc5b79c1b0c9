"""Which role each parameter plays, decided by what modules and tensors really are.

By default, the first rule that holds decides:

1. A weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, and every parameter tied to one, is ``ROWS``.
2. The weight of an output head is ``ROWS``. A head is an ``nn.Linear`` of the root unit (not inside an
   ``nn.ModuleList`` or ``nn.ModuleDict``, where the repeated blocks are) that either has as many
   ``out_features`` as some embedding of the model has rows, or, when a whole model is planned, whose own
   name is one of :data:`HEAD_NAMES`.
3. Any other parameter with two dimensions is ``MATRIX``.
4. Everything else is ``TAIL``.

Only real dimensions count, so a model on the meta device gets the roles that it has once materialised.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from mfsdp.planning.errors import PlanError
from mfsdp.planning.parameters import NamedParameter, sizes_of_embeddings
from mfsdp.planning.patterns import choices_by_pattern
from mfsdp.planning.records import Role

__all__ = ["HEAD_NAMES", "RoleChoice", "Roles", "roles_of"]

RoleChoice = Callable[[str, nn.Parameter, nn.Module], Role | None]
"""Called with (name, parameter, module); None leaves the decision to the default rules."""

Roles = RoleChoice | Mapping[str, Role]
"""How a user overrides roles: a function, or name pattern -> role."""

HEAD_NAMES = frozenset({"lm_head", "head", "output"})
"""Names under which models register their output head."""


def _is_embedding(parameter: NamedParameter) -> bool:
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in parameter.modules)


def _is_head(
    name: str, module: nn.Module, unit: str, vocabularies: frozenset[int], whole_model: bool
) -> bool:
    if unit or not isinstance(module, nn.Linear):
        return False
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    return module.out_features in vocabularies or (whole_model and leaf in HEAD_NAMES)


def _default_role(
    parameter: NamedParameter, unit: str, vocabularies: frozenset[int], whole_model: bool
) -> Role:
    if _is_embedding(parameter):
        return Role.ROWS
    if parameter.parameter.ndim != 2:
        return Role.TAIL
    places = zip(parameter.names, parameter.modules, strict=False)
    if any(_is_head(name, module, unit, vocabularies, whole_model) for name, module in places):
        return Role.ROWS
    return Role.MATRIX


def _called(choose: RoleChoice, parameters: Iterable[NamedParameter]) -> dict[str, Role]:
    chosen = {}
    for parameter in parameters:
        name = parameter.names[0]
        role = choose(name, parameter.parameter, parameter.modules[0])
        if role is not None:
            chosen[name] = role
    return chosen


def roles_of(
    parameters: Sequence[NamedParameter],
    units: Sequence[str],
    overrides: Roles | None = None,
    *,
    whole_model: bool,
) -> list[Role]:
    """The role of each of ``parameters``.

    Args:
        parameters: what is planned.
        units: the unit of each parameter.
        overrides: the user's choices; they come before the default rules.
        whole_model: whether names are those of a whole model, which rule 2 needs to go by a name.

    Raises:
        PlanError: a pattern of ``overrides`` matches nothing, patterns disagree, or a choice is not a role.
    """
    if overrides is None:
        chosen: Mapping[str, Role] = {}
    elif isinstance(overrides, Mapping):
        chosen = choices_by_pattern("roles", overrides, (parameter.names for parameter in parameters))
    else:
        chosen = _called(overrides, parameters)
    for name, role in chosen.items():
        if not isinstance(role, Role):
            raise PlanError(f"roles: {name} was given {role!r}; choose one of {', '.join(map(str, Role))}.")
    vocabularies = sizes_of_embeddings(parameters)
    return [
        chosen.get(parameter.names[0]) or _default_role(parameter, unit, vocabularies, whole_model)
        for parameter, unit in zip(parameters, units, strict=True)
    ]
