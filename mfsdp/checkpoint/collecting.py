"""What a checkpoint is made of: the states of a model and its optimizers as one tree, by unsharded names."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mfsdp.checkpoint.errors import CheckpointError
from mfsdp.checkpoint.names import ModelState
from mfsdp.checkpoint.ranks import Ranks
from mfsdp.checkpoint.rng import rng_state

__all__ = ["Optimizers", "check_extra", "collect", "listed"]

Optimizers = Optimizer | Sequence[Optimizer] | None
"""One optimizer of a model, several that share its parameters out, or none."""


def listed(optimizer: Optimizers) -> list[Optimizer]:
    """The optimizers as a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def collect(state: ModelState, optimizers: Sequence[Optimizer], ranks: Ranks) -> dict[str, Any]:
    """The tree that a checkpoint holds, with references to what is there; nothing is copied.

    ::

        model         name -> tensor
        optimizer     what torch's get_optimizer_state_dict returns: state, by parameter name, and param_groups
        rng           rank -> device type -> state of its generator; here that of this rank
        mfsdp         what says that mfsdp has written it: the number of ranks, and their byte order

    A tied tensor is in it once, under its canonical name.
    """
    canonical = state.canonical
    model = {name: value for name, value in state.values.items() if canonical.get(name, name) == name}
    tree: dict[str, Any] = {"model": model}
    if optimizers:
        tree["optimizer"] = _optimizer_tree(state, optimizers)
    tree["rng"] = {str(ranks.rank): rng_state()}
    tree["mfsdp"] = {"ranks": ranks.size, f"{sys.byteorder}_endian": True}
    return tree


def _optimizer_tree(state: ModelState, optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    states: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for position, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        names: dict[int, str] = {}
        for group, its in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            for key, param in zip(its["params"], group["params"], strict=True):
                if id(param) not in state.names_of:
                    raise CheckpointError(
                        f"optimizer {position} has a parameter of shape {tuple(param.shape)} that the model has not: a "
                        f"checkpoint knows parameters by their names in the model. Build the optimizer after "
                        f"fully_shard, from the parameters of this model."
                    )
                names[key] = state.names_of[id(param)][0]
            groups.append({**its, "params": [names[key] for key in its["params"]]})
        states.update((names[key], each) for key, each in saved["state"].items())
    return {"state": states, "param_groups": groups}


def check_extra(extra: Any) -> None:
    """Refuse what would lose all but one rank's part, since ``extra`` is that of one rank.

    Raises:
        CheckpointError: there is a DTensor in it.
    """
    if isinstance(extra, DTensor):
        raise CheckpointError(
            f"extra holds a DTensor of shape {tuple(extra.shape)}, and extra is saved by one rank alone. Pass its "
            f"full_tensor(), or make it a buffer of the model."
        )
    if isinstance(extra, Mapping):
        extra = list(extra.values())
    if isinstance(extra, (list, tuple, set)) and not isinstance(extra, Tensor):
        for each in extra:
            check_extra(each)
