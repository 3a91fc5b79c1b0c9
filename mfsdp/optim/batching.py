"""Same-shape matrices orthogonalised together, a batch at a time, in memory that is used again.

A matrix here is a tensor of shape ``(k, m, n)``: ``k`` matrices that lie together in one parameter.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from mfsdp.optim.newton_schulz import NewtonSchulz, Workspace, iterate

__all__ = ["batches", "orthogonalize"]

#: A batch is cut so that its matrices have at most this many elements together (but at least one matrix):
#: larger batches gain nothing more, and the iteration needs 4 to 8 bytes for each element.
MAX_BATCH_ELEMENTS = 1 << 23


def batches(shapes: Sequence[torch.Size], batched: bool) -> Iterator[list[int]]:
    """Positions in ``shapes`` in batches of one shape, up to transposition.

    Args:
        shapes: ``(k, m, n)`` each; those without elements are left out.
        batched: otherwise each position is a batch.
    """
    buckets: dict[tuple[int, ...], list[int]] = {}
    for index, shape in enumerate(shapes):
        if shape.numel():
            key = tuple(sorted(shape[1:])) if batched else (index,)
            buckets.setdefault(key, []).append(index)
    for members in buckets.values():
        batch: list[int] = []
        elements = 0
        for index in members:
            size = shapes[index].numel()
            if batch and elements + size > MAX_BATCH_ELEMENTS:
                yield batch
                batch, elements = [], 0
            batch.append(index)
            elements += size
        yield batch


def orthogonalize(
    matrices: Iterable[Tensor],
    shapes: Sequence[torch.Size],
    device: torch.device,
    iteration: NewtonSchulz,
    workspace: Workspace,
    compile: bool = False,
) -> list[Tensor]:
    """The orthogonal factors of one batch.

    Args:
        matrices: ``(k, m, n)`` or ``(k, n, m)`` each; each is read before the next one is asked for.
        shapes: theirs.
        device: theirs.
        iteration: what is done.
        workspace: memory for it.
        compile: whether the iteration runs compiled.

    Returns:
        For each matrix its factor, of its shape, in ``iteration.dtype``; valid until the workspace is used again.
    """
    counts = [shape[0] for shape in shapes]
    short, long = sorted(shapes[0][1:])
    x = workspace.take("x", (sum(counts), short, long), iteration.dtype, device)
    for matrix, place in zip(matrices, x.split(counts), strict=True):
        _normalise_into(matrix, place, iteration.eps)
    single = x[0] if len(x) == 1 else x
    schedule = iteration.schedule()
    result = _compiled_iterate()(single, schedule) if compile else iterate(single, schedule, workspace)
    factors = result.view_as(x).split(counts)
    return [factor.mT if shape[1] > shape[2] else factor for factor, shape in zip(factors, shapes, strict=True)]


def _normalise_into(matrix: Tensor, place: Tensor, eps: float) -> None:
    """Write ``matrix`` to ``place``, transposed if it is tall, each of its matrices divided by its norm."""
    cast = matrix.to(place.dtype)
    norm = cast.norm() if len(cast) == 1 else cast.norm(dim=(-2, -1), keepdim=True)
    torch.div(cast, norm.clamp(min=eps), out=place.mT if matrix.size(1) > matrix.size(2) else place)


@cache
def _compiled_iterate() -> Callable[..., Tensor]:
    """One compiled function for all batches, dynamic in their number and their shape."""
    return torch.compile(iterate, dynamic=True)
