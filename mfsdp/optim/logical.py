"""Which matrices a parameter consists of, and whether a matrix optimizer can take it."""

from torch import Size, Tensor
from torch.distributed.tensor import DTensor, Replicate

from mfsdp.placements import OwnerShard, Tail
from mfsdp.planning import PlanError
from mfsdp.planning.split import Split, SplitRule

__all__ = ["check_matrix", "split_of"]

_ELSEWHERE = "ive it to AdamW, or let mfsdp.optim.build_optimizer route it there."


def split_of(rule: Split | SplitRule | None, shape: Size) -> Split:
    """The logical matrices of a parameter of ``shape``, which has elements; without a rule it is one matrix."""
    if rule is None:
        rows, columns = shape
        return Split(1, rows, columns, (rows,))
    return rule if isinstance(rule, Split) else rule(tuple(shape))


def _checked_split(rule: Split | SplitRule, shape: Size) -> Split:
    if not callable(rule) and not isinstance(rule, Split):
        raise TypeError(f"split must be a Split or a rule such as EqualBlocks(3), but is {rule!r}")
    split = split_of(rule, shape)
    if not isinstance(split, Split):
        raise TypeError(f"the rule {rule!r} gives {split!r} rather than a Split")
    return split


def check_matrix(optimizer: str, label: str, param: Tensor, rule: Split | SplitRule | None = None) -> None:
    """Check that ``param`` is a matrix, or is split into matrices, which its owner holds whole.

    Args:
        optimizer: who asks, for the message.
        label: what to call the parameter.
        param: a plain tensor or a DTensor.
        rule: what its logical matrices are.

    Raises:
        ValueError: it is not; the message says what to do.
    """
    label = f"{optimizer}: {label} of shape {tuple(param.shape)}"
    placements = param.placements if isinstance(param, DTensor) else ()
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Tail):
            raise ValueError(f"{label} is a {placement!r} on mesh dimension {mesh_dim}: not a matrix. G{_ELSEWHERE}")
        if not isinstance(placement, (OwnerShard, Replicate)):
            raise ValueError(
                f"{label} is {placement!r} on mesh dimension {mesh_dim}, so no rank holds it whole. "
                f"Shard it with mfsdp.fully_shard, which places matrices as OwnerShard, or use an optimizer "
                f"that communicates, as torch.optim.Muon does. If it is an embedding or an output head: "
                f"g{_ELSEWHERE}"
            )
    if not param.is_floating_point():
        raise ValueError(f"{label} is {param.dtype}, but a matrix must be of a real floating-point dtype.")
    if rule is None:
        if param.ndim > 2:
            raise ValueError(
                f"{label} has {param.ndim} dimensions, and nothing says which matrices it consists of. Pass plan= to "
                f"mfsdp.optim.build_optimizer if the model's plan has a split for it, or the option split, such as "
                f"mfsdp.planning.Stack()."
            )
        if param.ndim != 2:
            raise ValueError(f"{label} has {param.ndim} dimensions: not a matrix. G{_ELSEWHERE}")
        return
    try:
        split = _checked_split(rule, param.shape)
    except (PlanError, TypeError) as error:
        raise ValueError(f"{label} cannot be split into its logical matrices: {error}") from None
    if split.numel != param.numel():
        raise ValueError(f"{label} cannot be split into its logical matrices: {split} has another size.")
