"""What an op's schema says of it: which arguments it writes to, and what its results are."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class OpTraits:
    """Facts of an op overload that do not depend on its arguments.

    Attributes:
        written_positions: positions of arguments that the op writes to, among its schema's arguments.
        written_names: names of the same.
        aliased_returns: per return, the position of the argument that it *is* (in-place and out variants), or None.
        is_value: the op returns Python values (``item``, ``equal``).
        is_view: the result shares memory with an argument.
        is_inplace_view: the op changes shape or strides of its first argument (``t_``, ``squeeze_``).
        is_random: the op draws random numbers.
        is_list: the op works on lists element by element (``_foreach_*``, ``_fused_*``).
        returns_list: the op returns one list of tensors.
    """

    written_positions: frozenset[int]
    written_names: frozenset[str]
    aliased_returns: tuple[int | None, ...]
    is_value: bool
    is_view: bool
    is_inplace_view: bool
    is_random: bool
    is_list: bool
    returns_list: bool


@lru_cache(maxsize=8192)
def traits(op: OpOverload) -> OpTraits:
    """The traits of ``op``."""
    schema = op._schema
    written = {
        index: argument.alias_info.before_set
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    aliases = []
    for result in schema.returns:
        info = result.alias_info
        names = info.before_set if info is not None and info.is_write else set()
        aliases.append(next((index for index, own_names in written.items() if own_names & names), None))
    kinds = [str(result.type) for result in schema.returns]
    name = schema.name.split("::")[1]
    return OpTraits(
        written_positions=frozenset(written),
        written_names=frozenset(schema.arguments[index].name for index in written),
        aliased_returns=tuple(aliases),
        is_value=any("Tensor" not in kind for kind in kinds),
        is_view=schema._is_view_op(),
        is_inplace_view=torch.Tag.inplace_view in op.tags,
        is_random=torch.Tag.nondeterministic_seeded in op.tags,
        is_list=name.startswith(("_foreach_", "_fused_ad", "_fused_sgd")),
        returns_list=kinds == ["List[Tensor]"],
    )


def argument(op: OpOverload, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The value given for the schema's argument at ``position``; None if it was left out."""
    if position < len(args):
        return args[position]
    return kwargs.get(op._schema.arguments[position].name)


def operands(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[DTensor, bool]]:
    """Every DTensor among the arguments, in order, with whether the op writes to it."""
    known = traits(op)
    for position, value in enumerate(args):
        yield from _dtensors(value, position in known.written_positions)
    for name, value in kwargs.items():
        yield from _dtensors(value, name in known.written_names)


def _dtensors(value: Any, written: bool) -> Iterator[tuple[DTensor, bool]]:
    if isinstance(value, DTensor):
        yield value, written
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, DTensor):
                yield item, written
