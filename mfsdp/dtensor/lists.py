"""List ops (``_foreach_*``, fused optimizers): element by element, each with an owner of its own.

A rank runs the op once, on the sub-list of elements that it owns; elements without an owner go together to
DTensor's own code. Nothing is communicated unless an element's operands are in different places (R2).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Replicate

from mfsdp.dtensor.alignment import Operand, align
from mfsdp.dtensor.metadata import OutputMeta, output_metadata
from mfsdp.dtensor.moving import moved
from mfsdp.dtensor.schema import traits
from mfsdp.dtensor.specs import Owners, has_owner, holds, is_whole, output_spec, owners_of


@dataclass(frozen=True)
class ListCall:
    """A call of a list op, seen as one call per element.

    Attributes:
        per_element: for each argument (positional ones first, then keywords), whether it is a list with one entry
            per element. Other arguments are shared by all elements.
        values: the arguments in the same order.
        names: None for positional arguments, else the keyword.
        written: for each argument, whether the op writes to its tensors.
        length: number of elements.
    """

    op: OpOverload
    values: tuple[Any, ...]
    names: tuple[str | None, ...]
    per_element: tuple[bool, ...]
    written: tuple[bool, ...]
    length: int

    @staticmethod
    def of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "ListCall":
        known = traits(op)
        length = len(args[0])
        types = {argument.name: str(argument.type) for argument in op._schema.arguments}
        kinds = [*list(types.values())[: len(args)], *(types[name] for name in kwargs)]
        values = (*(_replicated(value) for value in args), *(_replicated(value) for value in kwargs.values()))
        return ListCall(
            op,
            values,
            (*(None for _ in args), *kwargs),
            # an optional list that is not used is empty, for every element
            tuple(k.startswith("List[") and len(v) == length for k, v in zip(kinds, values, strict=True)),
            (
                *(position in known.written_positions for position in range(len(args))),
                *(name in known.written_names for name in kwargs),
            ),
            length,
        )

    def operands(self, index: int) -> list[tuple[DTensor, bool]]:
        """The DTensors of one element, and whether the op writes to them."""
        return [
            (value[index], written)
            for value, listed, written in zip(self.values, self.per_element, self.written, strict=True)
            if listed and isinstance(value[index], DTensor)
        ]

    def arguments(
        self, indices: Sequence[int], convert: Callable[[Any], Any] = lambda value: value
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call on a sub-list; ``convert`` maps every entry of a list."""
        chosen = [
            [convert(value[i]) for i in indices] if listed else convert(value)
            for value, listed in zip(self.values, self.per_element, strict=True)
        ]
        args = tuple(value for value, name in zip(chosen, self.names, strict=True) if name is None)
        return args, {name: value for value, name in zip(chosen, self.names, strict=True) if name is not None}

    def run(self, indices: Sequence[int], convert: Callable[[Any], Any] = lambda value: value) -> Any:
        """Call the op on a sub-list."""
        args, kwargs = self.arguments(indices, convert)
        return self.op(*args, **kwargs)

    def with_moved(self, index: int, placements: Sequence[Any]) -> None:
        """Redistribute the operands of one element, in place of what the lists hold."""
        targets = iter(placements)
        for value, listed in zip(self.values, self.per_element, strict=True):
            if listed and isinstance(value[index], DTensor):
                value[index] = moved(value[index], next(targets))


def _replicated(value: Any) -> Any:
    """A list as a list of our own; a tensor that all elements share, replicated."""
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, DTensor):
        return moved(value, (Replicate(),) * value.device_mesh.ndim)
    return value


@dataclass(frozen=True)
class _Partition:
    """Who runs which elements.

    Attributes:
        local: elements whose local tensors this rank hands to the op itself.
        dtensor: elements that DTensor's own code handles.
        sharded: owned elements that other mesh dimensions shard.
        owners: per element, the owners of its execution, or None where it has none.
    """

    local: list[int]
    dtensor: list[int]
    sharded: list[int]
    owners: list[Owners | None]


def execute(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a list op that has an owned DTensor in some list.

    Raises:
        NotImplementedError: the op returns something else than nothing or one list of tensors.
    """
    if op._schema.returns and not traits(op).returns_list:
        raise NotImplementedError(f"{op}: list ops with more than one list of results do not run on owned tensors.")
    call = ListCall.of(op, args, kwargs)
    parts = _partition(call)
    metas = output_metadata(op, *_without_numbers(args, kwargs))
    results: list[Any] = [None] * call.length
    _store(results, parts.local, call.run(parts.local, _to_local) if parts.local else None)
    _store(results, parts.dtensor, call.run(parts.dtensor) if parts.dtensor else None)
    for index in parts.sharded:
        owners = parts.owners[index]
        assert owners is not None
        _store(results, [index], _run_sharded(call, index, owners))
    if not op._schema.returns:
        return None
    assert isinstance(metas, list)
    wrapped = set(parts.dtensor) | set(parts.sharded)
    return [
        result if index in wrapped else _wrap(call, index, result, meta, owners)
        for index, (result, meta, owners) in enumerate(zip(results, metas, parts.owners, strict=True))
    ]


def _partition(call: ListCall) -> _Partition:
    parts = _Partition([], [], [], [None] * call.length)
    for index in range(call.length):
        operands = call.operands(index)
        if not operands:
            parts.local.append(index)
            continue
        if any(has_owner(tensor._spec) for tensor, _ in operands):
            alignment = align(call.op, [Operand(tensor._spec, written) for tensor, written in operands])
            if alignment.moves:
                call.with_moved(index, alignment.placements)
                operands = call.operands(index)
            parts.owners[index] = alignment.owners
        owners = parts.owners[index]
        if owners is None or not any(owners):
            parts.dtensor.append(index)
        elif not all(is_whole(tensor._spec, owners) for tensor, _ in operands):
            parts.sharded.append(index)
        elif holds(operands[0][0].device_mesh, owners):
            parts.local.append(index)
    return parts


def _to_local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _store(results: list[Any], indices: Sequence[int], values: Sequence[Any] | None) -> None:
    if values is not None:
        for index, value in zip(indices, values, strict=True):
            results[index] = value


def _run_sharded(call: ListCall, index: int, owners: Owners) -> Any:
    from mfsdp.dtensor.execution import execute_sharded  # which imports this module

    args, kwargs = call.arguments([index])
    return execute_sharded(call.op, args, kwargs, call.operands(index)[0][0].device_mesh, owners)


def _wrap(call: ListCall, index: int, result: Tensor | None, meta: OutputMeta | None, owners: Owners | None) -> Any:
    if owners is None or meta is None:
        return result
    mesh = call.operands(index)[0][0].device_mesh
    local = meta.empty_local() if result is None else result
    return DTensor(local, output_spec(meta.tensor_meta, mesh, owners), requires_grad=False)


def _without_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with every number replaced by 1 of its type: step sizes change every step, shapes do not."""

    def plain(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return type(value)(1) if isinstance(value, int | float) else value

    return tuple(plain(value) for value in args), {name: plain(value) for name, value in kwargs.items()}


def unscale_gradients(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``GradScaler``'s check and unscale: gradients owner-local, the verdict by a maximum over each mesh with owners.

    Every rank must skip the step if any gradient anywhere is not finite.
    """
    gradients, found_inf, inverse_scale = args
    owned = [gradient for gradient in gradients if isinstance(gradient, DTensor) and has_owner(gradient._spec)]
    others = [gradient for gradient in gradients if not (isinstance(gradient, DTensor) and has_owner(gradient._spec))]
    local = [g._local_tensor for g in owned if holds(g.device_mesh, owners_of(g.placements))]
    if local:
        op(local, found_inf, inverse_scale, **kwargs)
    if others:
        op(others, found_inf, inverse_scale, **kwargs)
    verdict = found_inf
    for mesh in dict.fromkeys(gradient.device_mesh for gradient in owned):
        for mesh_dim in range(mesh.ndim):
            verdict = funcol.all_reduce(verdict, "max", (mesh, mesh_dim))
    found_inf.copy_(verdict)
