"""A counter of collectives and their bytes that no path of PyTorch evades: :class:`CommCounter`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CommCounter", "CommTally", "see_through"]

# Every operator of these namespaces is taken for communication, so that one which torch adds later is
# counted under its own name rather than missed.
_NAMESPACES = frozenset(
    {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem"}
)
# `tensor.data` names the tensor's own class among the subclasses it is dispatched for.
_PLAIN = frozenset({Tensor, Parameter})
_NOT_COMMUNICATION = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})

_KINDS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "isend": "send",
    "irecv": "recv",
    "recv_any_source": "recv",
    "monitored_barrier": "barrier",
}


# Operators that are made of collectives -> what they call.
_MADE_OF_COLLECTIVES: dict[OpOverload, Callable[..., Any]] = {}


def see_through(op: OpOverload, implementation: Callable[..., Any]) -> None:
    """Let counters see the collectives inside ``op``, which does what ``implementation`` does."""
    _MADE_OF_COLLECTIVES[op] = implementation


@dataclass
class CommTally:
    """How often this rank entered collectives of one kind, the bytes that it handed to them, and those it got back."""

    calls: int = 0
    bytes: int = 0
    received: int = 0


class CommCounter(TorchDispatchMode):
    """Counts the collectives that this rank enters, and the bytes it hands to them, by kind.

    Sees eager ``torch.distributed`` calls (with point-to-point and coalesced ones), functional collectives
    (with those that DTensor makes) and what autograd calls in backward. A call is counted once, when it is
    issued; waiting is not counted. It may be entered several times: the counts add up until :meth:`reset`.

    Bytes are those of this rank's *input* buffers: ``numel * element_size`` of the tensors that the
    collective reads or, where it works in place (``all_reduce``, ``broadcast``, ``reduce``, ``send``,
    ``recv``), of the tensors it is called with. Bytes received are those of its *output* buffers, likewise; a
    ``send`` has none. A ``barrier`` has no bytes. What a backend makes of that on the wire is its own affair.

    Not seen is only what does not pass the process group: methods called on a backend object
    (``group._get_backend(device)``), and a store.

    Example::

        with CommCounter() as comm:
            optimizer.step()
        assert comm.collectives == 0 and comm.bytes == 0, comm

    Attributes:
        by_kind: kind (``"all_reduce"``, ``"broadcast"``, ``"reduce"``, ``"all_gather"``,
            ``"reduce_scatter"``, ``"all_to_all"``, ``"gather"``, ``"scatter"``, ``"send"``, ``"recv"``,
            ``"barrier"``, or the bare name of an operator unknown here) to its :class:`CommTally`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: dict[str, CommTally] = {}

    @property
    def collectives(self) -> int:
        """Calls of every kind."""
        return sum(tally.calls for tally in self.by_kind.values())

    @property
    def bytes(self) -> int:
        """Bytes of every kind."""
        return sum(tally.bytes for tally in self.by_kind.values())

    @property
    def received(self) -> int:
        """Bytes received of every kind."""
        return sum(tally.received for tally in self.by_kind.values())

    def reset(self) -> None:
        """Start again from zero."""
        self.by_kind.clear()

    def __str__(self) -> str:
        if not self.by_kind:
            return "no collectives"
        return "\n".join(
            f"{kind:<16}{tally.calls:>8} calls {tally.bytes:>16,} bytes" for kind, tally in sorted(self.by_kind.items())
        )

    __repr__ = __str__

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # propagation of shapes: nothing moves
        if not _PLAIN.issuperset(types):
            # Other subclasses (DTensor) go first: what they call on their local tensors comes back here.
            return NotImplemented
        if func in _MADE_OF_COLLECTIVES:
            with self:
                return _MADE_OF_COLLECTIVES[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if isinstance(func, OpOverload) and func.namespace in _NAMESPACES:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = op._schema.name.split("::")[1].removesuffix("_")
        if name in _NOT_COMMUNICATION:
            return
        if name == "batch_p2p_ops":
            directions, tensors = args[0], args[3]
            for direction, tensor in zip(directions, tensors, strict=True):
                self._add(direction, _nbytes(tensor), 0 if direction == "isend" else _nbytes(tensor))
            return
        passed = {arg.name: value for arg, value in zip(op._schema.arguments, args, strict=False)} | kwargs
        written = [value for arg, value in passed.items() if arg.startswith("out")]
        read = _nbytes([value for arg, value in passed.items() if not arg.startswith("out")])
        if "barrier" in name:
            read = 0
        if "send" in name:
            received = 0
        elif written:
            received = _nbytes(written)
        else:  # eager ones write in place what they have no output for
            received = read if op.namespace == "c10d" else _nbytes(result)
        self._add(name, read, received)

    def _add(self, name: str, nbytes: int, received: int) -> None:
        tally = self.by_kind.setdefault(_KINDS.get(name, name), CommTally())
        tally.calls += 1
        tally.bytes += nbytes
        tally.received += received


def _nbytes(value: Any) -> int:
    """Bytes of the tensors in ``value``, a tensor or nested lists of them; 0 for anything else."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_nbytes(item) for item in value)
    return 0
