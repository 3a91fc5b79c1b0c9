"""R1 in the dispatcher: an owner dimension behaves like ``Replicate`` and is executed by the owner alone.

DTensor's C++ dispatcher asks Python once per combination of op and specs, caches the answer and from then on runs
the op without Python. The answer here may depend on the rank: the owner is told to run the op as it is, any other
rank to make empty outputs (:class:`SkippedOutputSharding`). So a step over owned parameters costs the owner what an
ordinary DTensor costs, and every other rank no arithmetic.

What the cache cannot express is executed completely by :mod:`mfsdp.dtensor.execution` and not cached: operands that
must move first, list ops, results that are Python values or whose shapes depend on values, random numbers, ops that
reshape their argument in place, dimensions that are sharded besides, and calls whose cache key does not decide the
outputs (:mod:`mfsdp.dtensor.keys`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpInfo, OpSchema, OutputSharding
from torch.utils._python_dispatch import _disable_current_modes

from mfsdp.dtensor.alignment import Operand, align
from mfsdp.dtensor.execution import execute
from mfsdp.dtensor.keys import key_decides_outputs
from mfsdp.dtensor.metadata import OutputMeta, ValueDependentError, output_metadata
from mfsdp.dtensor.schema import operands, traits
from mfsdp.dtensor.specs import empty_shape, has_owner, holds, is_whole, output_spec

aten = torch.ops.aten

# Ops that keep the shape of their first argument and work on empty tensors as on any, besides the pointwise ones.
_SHAPE_PRESERVING = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.copy_.default,
}


class SkippedOutputSharding(OutputSharding):
    """The answer for a rank that owns nothing of an op: do not run it, make these empty outputs.

    Args:
        output_spec: spec of the output, or of each of several.
        schema: of the op that was asked about.
        metas: metadata of the outputs.
        kind: tuple or list if the op returns one, else None.
        operand_device: of the first operand. Outputs on the same device follow it: the cache does not know devices,
            and the same specs come from the CPU when parameters are offloaded.
    """

    def __init__(
        self,
        output_spec: Any,
        schema: OpSchema,
        metas: Sequence[OutputMeta],
        kind: type | None,
        operand_device: torch.device,
    ) -> None:
        # needs_redistribute sends the dispatcher to its Python path, where make_outputs takes over
        super().__init__(output_spec, schema, needs_redistribute=True)
        self._makers = [_EmptyMaker(meta, follows=meta.device == operand_device) for meta in metas]
        self._kind = kind

    def make_outputs(self, args: tuple[Any, ...]) -> Any:
        """The local outputs of a call with these arguments."""
        first = args[0] if isinstance(args[0], DTensor) else next(_first_dtensors(args))
        if self._kind is None:
            return self._makers[0](first._local_tensor)
        return self._kind([make(first._local_tensor) for make in self._makers])


class _EmptyMaker:
    """Makes the empty local tensor of one output, on the device of an operand if it ``follows``."""

    def __init__(self, meta: OutputMeta, follows: bool) -> None:
        self._meta = meta
        self._follows = follows
        self._made: dict[torch.device, Tensor] = {}

    def __call__(self, operand: Tensor) -> Tensor:
        device = operand.device if self._follows else self._meta.device
        if type(operand) is not Tensor:  # a fake one, say: no real tensor may get in among these
            return self._meta.empty_local(device)
        made = self._made.get(device)
        if made is None:
            with _disable_current_modes():  # it is kept for calls outside of these
                made = self._made[device] = self._meta.empty_local(device)
        return made.clone()  # of nothing: a tensor of its own at a third of what `torch.empty` costs


def _first_dtensors(args: tuple[Any, ...]) -> Iterator[DTensor]:
    for value in args:
        if isinstance(value, DTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, DTensor))


def has_owned_operand(info: OpInfo) -> bool:
    """Whether an op that reached the dispatcher's Python path has an owned DTensor among its arguments."""
    leaves = [*info.flat_args_schema, *(info.schema.kwargs_schema.values() if info.schema else ())]
    return any(_is_owned_spec(leaf) for leaf in leaves)


def _is_owned_spec(value: object) -> bool:
    if isinstance(value, DTensorSpec):
        return has_owner(value)
    return isinstance(value, list | tuple) and any(_is_owned_spec(item) for item in value)


def propagate(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], info: OpInfo, try_cache: bool) -> Any:
    """The answer to the dispatcher for an op with owned operands: an ``OutputSharding``, which it caches, or the
    op's result.

    Args:
        try_cache: the dispatcher could not make a key (a plain 0-d tensor is among the arguments) and will ask again
            next time, so the answer is kept here.
    """
    keep = try_cache and not _are_we_tracing()
    answer = _answers.get(info.schema) if keep else None
    if answer is None:
        answer = _cacheable_answer(op, args, kwargs, info)
        if answer is None:
            return execute(op, args, kwargs)
        if keep:
            if len(_answers) >= _MOST_ANSWERS:
                _answers.clear()
            _answers[info.schema] = answer
    return answer


_MOST_ANSWERS = 8192
_answers: dict[OpSchema | None, OutputSharding] = {}


def _cacheable_answer(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], info: OpInfo
) -> OutputSharding | None:
    known = traits(op)
    if known.is_list or known.is_value or known.is_random or known.is_inplace_view:
        return None
    if known.written_positions and known.aliased_returns != (0,):
        return None  # it writes to something else than its first argument, or returns more than that
    schema = info.schema
    assert schema is not None
    found = list(operands(op, args, kwargs))
    alignment = align(op, [Operand(tensor._spec, written) for tensor, written in found])
    if alignment.moves or not all(is_whole(tensor._spec, alignment.owners) for tensor, _ in found):
        return None
    try:
        metas = output_metadata(op, args, kwargs)
    except ValueDependentError:
        return None
    if not key_decides_outputs(op, args, kwargs):
        return None
    outputs = [metas] if isinstance(metas, OutputMeta) else list(metas or ())
    if not outputs or not all(isinstance(meta, OutputMeta) for meta in outputs):
        return None
    mesh = found[0][0].device_mesh
    specs = [output_spec(meta.tensor_meta, mesh, alignment.owners) for meta in outputs]  # type: ignore[union-attr]
    answer: Any = specs[0] if isinstance(metas, OutputMeta) else tuple(specs)
    if known.aliased_returns == (0,):
        answer = args[0]._spec  # in-place: the argument is returned as it is
    if holds(mesh, alignment.owners) or _runs_on_empties(op, args, found, outputs):  # type: ignore[arg-type]
        return OutputSharding(answer)
    kind = None if isinstance(metas, OutputMeta) else type(metas)
    device = found[0][0]._local_tensor.device
    return SkippedOutputSharding(answer, schema, outputs, kind, device)  # type: ignore[arg-type]


def _runs_on_empties(
    op: OpOverload, args: tuple[Any, ...], found: Sequence[tuple[DTensor, bool]], outputs: Sequence[OutputMeta]
) -> bool:
    """Whether a rank without data may run the op itself on its empty tensors and get the right empty outputs.

    That is the cheapest way to skip: the dispatcher never enters Python.
    """
    if torch.Tag.pointwise not in op.tags and op not in _SHAPE_PRESERVING:
        return False
    if len(outputs) != 1:
        return False
    shape = outputs[0].shape
    if not shape and any(isinstance(value, Tensor) and not isinstance(value, DTensor) for value in args):
        return False  # an empty stands for a 0-d tensor, and does not promote like one beside another 0-d tensor
    return all(
        tensor.shape == shape and tensor._local_tensor.shape == empty_shape(shape)
        if has_owner(tensor._spec)
        else tensor.ndim == 0 and len(shape) > 0
        for tensor, _ in found
    )


class DeferredInfo:
    """Stands for the unwrapped arguments of a call whose answer is cached, until someone looks at them.

    Nobody does where the answer is to skip the op, and unwrapping is most of what skipping would cost.
    """

    __slots__ = ("_call", "output_sharding")

    def __init__(self, *call: Any) -> None:
        self._call = call
        self.output_sharding: OutputSharding | None = None

    def unwrapped(self) -> OpInfo:
        unwrap, op, args, kwargs = self._call
        info: OpInfo = unwrap(op, args, kwargs, False)
        info.output_sharding = self.output_sharding
        return info


def owners_present(args: tuple[Any, ...]) -> bool:
    """Whether an argument, or an entry of a list argument, is an owned DTensor."""
    for value in args:
        if isinstance(value, DTensor):
            if has_owner(value._spec):
                return True
        elif isinstance(value, list | tuple) and owners_present(tuple(value)):
            return True
    return False
