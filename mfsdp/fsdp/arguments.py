"""The arguments of a ``fully_shard`` call, in words that ranks can compare.

Ranks that call it differently would hang in their first gather, or compute different things without a word.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from mfsdp.planning import ShardPlan

__all__ = ["Arguments", "first_difference"]

_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")


@dataclass(frozen=True)
class Arguments:
    """What this rank passes to ``fully_shard``, as it came, so of whatever types.

    Args:
        modules: what is sharded.
        mesh: over which ranks; checked already.
        plan, reshard_after_forward, mp_policy, offload_policy, ignored_params, style: as in ``fully_shard``.
    """

    modules: Sequence[nn.Module]
    mesh: DeviceMesh
    plan: Any
    reshard_after_forward: Any
    mp_policy: Any
    offload_policy: Any
    ignored_params: Any
    style: Any

    def problems(self) -> Iterator[Exception]:
        """What is no value that the argument can have."""
        if self.style not in ("hooks", "graph"):
            yield ValueError(f"style must be 'hooks' or 'graph', not {self.style!r}.")
        wanted: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
            ("plan", (ShardPlan, type(None)), "a ShardPlan, as mfsdp.plan(model, mesh) makes it, or None"),
            ("reshard_after_forward", (bool, int, type(None)), "True, False, a number of ranks, or None"),
            ("mp_policy", MixedPrecisionPolicy, "a MixedPrecisionPolicy"),
            ("offload_policy", OffloadPolicy, "an OffloadPolicy"),
            ("ignored_params", (AbstractSet, type(None)), "a set of parameters, or None"),
        )
        for name, kinds, words in wanted:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                yield TypeError(f"{name} must be {words}, but is of type {type(value).__name__}.")

    def described(self) -> dict[str, str]:
        """Argument, or part of one -> its value; where two ranks differ in nothing, they pass the same."""
        words = {
            "style": _word(self.style),
            "mesh": repr(self.mesh),
            "plan": "None" if self.plan is None else f"a {type(self.plan).__name__}",  # plans are compared elsewhere
            "reshard_after_forward": _word(self.reshard_after_forward),
        }
        for name in _PRECISION:
            words[f"mp_policy.{name}"] = _word(getattr(self.mp_policy, name, None))
        words["offload_policy"] = _word(self.offload_policy)
        ignored = self.ignored_params if isinstance(self.ignored_params, AbstractSet) else ()
        for module in self.modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if parameter in ignored:
                    words[f"ignored_params: {name}"] = "in it"
        return words


def _word(value: Any) -> str:
    """``value`` in words that are the same in every process."""
    return repr(value) if type(value).__repr__ is not object.__repr__ else f"a {type(value).__name__}"


def first_difference(described: Sequence[dict[str, str]]) -> tuple[int, str, str, str] | None:
    """Where ranks do not pass the same.

    Args:
        described: of every rank, :meth:`Arguments.described`.

    Returns:
        The position of the first rank that differs from the first, the argument, and the values that the first rank
        and that rank pass; None if all pass the same.
    """
    first = described[0]
    for position, other in enumerate(described):
        for name in dict.fromkeys((*first, *other)):
            here, there = (words.get(name, "not in it") for words in (first, other))
            if here != there:
                return position, name, here, there
    return None
