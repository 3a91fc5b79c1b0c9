"""Which role each parameter plays, decided by what modules and tensors really are.

By default, the first rule that holds decides:

1. A parameter whose logical matrices the user names (``splits=``) is ``MATRIX``.
2. A weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, and every parameter tied to one, is ``ROWS``.
3. The weight of an output head is ``ROWS``. A head is an ``nn.Linear`` outside every ``nn.ModuleList`` and
   ``nn.ModuleDict`` (where the repeated blocks are) that either has as many ``out_features`` as some
   embedding of the model has rows, or, when a whole model is planned, whose own name is one of
   :data:`HEAD_NAMES`.
4. Any other parameter with two dimensions is ``MATRIX``.
5. Everything else is ``TAIL``.

Only real dimensions count, so a model on the meta device gets the roles that it has once materialised.
"""

from collections.abc import Mapping, Sequence

from torch import nn

from mfsdp.planning.errors import PlanError
from mfsdp.planning.parameters import NamedParameter, sizes_of_embeddings
from mfsdp.planning.patterns import Chooser, chosen
from mfsdp.planning.records import Role
from mfsdp.planning.split import Split, SplitRule, split_by

__all__ = ["HEAD_NAMES", "Roles", "Splits", "roles_of", "splits_of"]

Roles = Chooser[Role] | Mapping[str, Role]
"""How a user overrides roles: a function, or name pattern -> role."""

Splits = Chooser[SplitRule] | Mapping[str, SplitRule]
"""How a user names logical matrices: a function, or name pattern -> rule."""

HEAD_NAMES = frozenset({"lm_head", "head", "output"})
"""Names under which models register their output head."""


def _is_embedding(parameter: NamedParameter) -> bool:
    return any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in parameter.modules)


def _in_block(name: str, model: nn.Module | None) -> bool:
    """Whether a module around the parameter is a child of a container of blocks."""
    if model is None:
        return False
    module = model
    for part in name.split(".")[:-1]:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            return True
        module = module.get_submodule(part)
    return False


def _is_head(name: str, module: nn.Module, vocabularies: frozenset[int], model: nn.Module | None) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    leaf = name.rpartition(".")[0].rpartition(".")[2]
    fits = module.out_features in vocabularies or (model is not None and leaf in HEAD_NAMES)
    return fits and not _in_block(name, model)


def _default_role(parameter: NamedParameter, vocabularies: frozenset[int], model: nn.Module | None) -> Role:
    if _is_embedding(parameter):
        return Role.ROWS
    if parameter.parameter.ndim != 2:
        return Role.TAIL
    places = zip(parameter.names, parameter.modules, strict=True)
    if any(_is_head(name, module, vocabularies, model) for name, module in places):
        return Role.ROWS
    return Role.MATRIX


def splits_of(parameters: Sequence[NamedParameter], splits: Splits | None) -> dict[str, Split]:
    """Canonical name -> logical matrices, for the parameters that ``splits`` makes a choice for.

    Raises:
        PlanError: a pattern matches nothing, patterns disagree, or a rule does not fit the shape.
    """
    rules = chosen("splits", splits, parameters)
    return {
        name: split_by(rules[name], name, tuple(parameter.parameter.shape))
        for parameter in parameters
        if (name := parameter.names[0]) in rules
    }


def roles_of(
    parameters: Sequence[NamedParameter],
    overrides: Roles | None = None,
    *,
    split: Mapping[str, Split],
    model: nn.Module | None,
) -> list[Role]:
    """The role of each of ``parameters``.

    Args:
        parameters: what is planned.
        overrides: the user's choices; they come before the default rules.
        split: name -> logical matrices.
        model: the model, if a whole one is planned; rule 3 needs it to know what is inside a block.

    Raises:
        PlanError: a pattern of ``overrides`` matches nothing, patterns disagree, or a choice is not a role.
    """
    choices = dict.fromkeys(split, Role.MATRIX) | chosen("roles", overrides, parameters)
    for name, role in choices.items():
        if not isinstance(role, Role):
            raise PlanError(f"roles: {name} was given {role!r}; choose one of {', '.join(map(str, Role))}.")
    vocabularies = sizes_of_embeddings(parameters)
    return [
        choices.get(parameter.names[0]) or _default_role(parameter, vocabularies, model) for parameter in parameters
    ]
