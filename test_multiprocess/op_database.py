"""torch's operator database, run on owned tensors and compared with plain ones: the walk behind test_op_database.

For every op of ``op_db`` and up to a dozen of its sample inputs, each tensor argument becomes an owned DTensor on a
2-rank mesh. Both the function and its in-place variant are called. What must hold: the outputs are owned by the same
rank, equal the plain result on every rank in value, dtype and shape, no collective happens inside the op (one, where
a shape or a Python value must be made known), arguments that the op mutates change alike, and both ranks agree on
whether it raises.

Left out by rule, not by name: ops that draw random numbers, ops whose results are uninitialised memory, sparse and
other non-strided tensors, samples that already fail or that are meant to fail on plain tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_utils import set_rng_seed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import mfsdp
from mfsdp import CommCounter, OwnerShard
from mfsdp.fsdp.objects import all_gather_object

SAMPLES_PER_OP = 12
OWNER = OwnerShard(1)

_UNINITIALISED = {"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted", "resize_"}


class OpRecorder(TorchDispatchMode):
    """Which aten ops a call consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[torch._ops.OpOverload] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))

    @property
    def is_random(self) -> bool:
        return any(torch.Tag.nondeterministic_seeded in op.tags for op in self.ops)

    @property
    def values_read(self) -> int:
        """How many of the ops give Python values, or shapes that depend on values: each may cost a collective."""
        known_by_value = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        return sum(any(tag in op.tags for tag in known_by_value) for op in self.ops)

    @property
    def is_uninitialised(self) -> bool:
        return bool(self.ops) and all(op._schema.name.split("::")[1] in _UNINITIALISED for op in self.ops)


@dataclass
class Walk:
    """Results of the walk, equal on every rank.

    Attributes:
        passed: variants (``"add"``, ``"add (in-place)"``) all of whose samples were right.
        failed: variant to the text of its first failure.
        left_out: variants without a sample that the rules admit.
    """

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


def walk(mesh: DeviceMesh, names: set[str] | None = None) -> Walk:
    """Run the database, or the ops of the given names, on a 2-rank mesh."""
    result = Walk()
    for op in op_db:
        if names is not None and op.name not in names:
            continue
        name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
        variants: dict[str, Callable[..., Any] | None] = {name: op.op, f"{name} (in-place)": op.inplace_variant}
        dtypes = sorted(op.supported_dtypes("cpu"), key=lambda dtype: (dtype is not torch.float32, str(dtype)))
        if not dtypes:
            continue  # for accelerators only
        for variant, function in variants.items():
            if function is None:
                continue
            calls = [_call(function, sample, mesh) for sample in _samples(op, dtypes[0])]
            admitted = [call for call in calls if call is not None]
            if problem := _problem(admitted):
                result.failed[variant] = problem
            elif admitted:
                result.passed.add(variant)
            else:
                result.left_out.add(variant)
    return result


def _samples(op: Any, dtype: torch.dtype) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    set_rng_seed(0)  # equal samples on every rank
    try:
        # rather than op.sample_inputs, which looks through the source of the whole call stack for each sample
        for sample in islice(op.sample_inputs_func(op, "cpu", dtype, False), SAMPLES_PER_OP):
            yield (sample.input, *sample.args), sample.kwargs
    except (RuntimeError, ValueError, NotImplementedError, ImportError):
        return  # samples that need a library or a device that is not here


@dataclass
class Call:
    """One sample, computed from owned tensors and from plain ones.

    Attributes:
        problem: what is wrong with it that this rank can tell alone; "" if nothing is.
        outputs: what must be equal on every rank: an owned tensor and a plain one, or two other values.
        arguments: what must be equal on the owner, whether the op has changed it or not.
    """

    problem: str
    outputs: list[tuple[Any, Any]] = field(default_factory=list)
    arguments: list[tuple[Any, Any]] = field(default_factory=list)

    def difference(self) -> str:
        """The first unequal pair; "" if there is none. All ranks call it together."""
        found = ""
        for mine, reference in self.outputs:
            if isinstance(reference, Tensor):
                found = found or _difference(mine.full_tensor(), reference)
            elif mine != reference and not (mine != mine and reference != reference):
                found = found or f"{mine!r} instead of {reference!r}"
        for mine, reference in self.arguments:
            if isinstance(reference, Tensor) and mine.device_mesh.get_local_rank() == OWNER.owner:
                found = found or _difference(mine.to_local(), reference)
        return found


def _call(
    function: Callable[..., Any], sample: tuple[tuple[Any, ...], dict[str, Any]], mesh: DeviceMesh
) -> Call | None:
    """The outcome of a sample; None if the rules leave it out."""
    plain = _copy(sample)
    if any(t.layout != torch.strided for t in _tensors(plain)) or not _tensors(plain):
        return None
    recorder = OpRecorder()
    try:
        with recorder:
            expected = function(*plain[0], **plain[1])
    except Exception:
        return None
    outputs = _tensors(expected)
    if recorder.is_random or recorder.is_uninitialised or any(t.layout != torch.strided for t in outputs):
        return None
    args, kwargs = tree_map(lambda v: _owned(v, mesh) if isinstance(v, Tensor) else v, _copy(sample))
    comm = CommCounter()
    try:
        with comm:
            result = function(*args, **kwargs)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}" if str(error) else repr(error)
        return Call(text)
    got, wanted = tree_flatten(result)[0], tree_flatten(expected)[0]
    problem = _difference_in_kind(got, wanted)
    if not problem and comm.collectives > recorder.values_read:
        problem = f"communicated: {comm}"
    if problem:
        return Call(problem)
    changed = zip(tree_flatten((args, kwargs))[0], tree_flatten(plain)[0], strict=True)
    return Call("", list(zip(got, wanted, strict=True)), list(changed))


def _problem(calls: list[Call]) -> str:
    """The first thing that is wrong with the samples of a variant, the same text on every rank.

    Ranks tell each other only once for all samples, which takes half as long as after each.
    """
    for problems in zip(*all_gather_object([call.problem for call in calls]), strict=True):
        if any(problems):
            return " | ".join(f"rank {rank}: {text or 'fine'}" for rank, text in enumerate(problems))
    for wrong in zip(*all_gather_object([call.difference() for call in calls]), strict=True):
        if any(wrong):
            return " | ".join(f"rank {rank}: {text}" for rank, text in enumerate(wrong) if text)
    return ""


def _difference_in_kind(got: list[Any], wanted: list[Any]) -> str:
    if len(got) != len(wanted):
        return f"{len(got)} results instead of {len(wanted)}"
    for mine, reference in zip(got, wanted, strict=True):
        if isinstance(reference, Tensor):
            if not isinstance(mine, DTensor):
                return f"a {type(mine).__name__} instead of an owned tensor"
            if mine.placements != (OWNER,):
                return f"placed {mine.placements}"
            if (mine.dtype, mine.shape) != (reference.dtype, reference.shape):
                return f"{mine.dtype} {tuple(mine.shape)} instead of {reference.dtype} {tuple(reference.shape)}"
    return ""


def _difference(mine: Tensor, reference: Tensor) -> str:
    try:
        torch.testing.assert_close(mine, reference, equal_nan=True)
    except AssertionError as error:
        return f"values: {str(error).splitlines()[0]}"
    return ""


def _copy(value: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


def _owned(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return mfsdp.distribute_tensor(tensor, mesh, [OWNER], src_data_rank=None)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
