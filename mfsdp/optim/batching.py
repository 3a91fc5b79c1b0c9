"""Same-shape matrices orthogonalised together, a batch at a time, in memory that is used again within a step.

A matrix here is a tensor of shape ``(k, m, n)``: ``k`` matrices that lie together in one parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mfsdp.optim.newton_schulz import NewtonSchulz, Workspace, iterate

__all__ = ["batches", "orthogonalize"]

#: A batch is cut so that its matrices have at most this many elements together (but at least one matrix). The
#: iteration needs 4 to 8 bytes for each, which on a CPU are new pages in every step: larger batches are slower there.
MAX_BATCH_ELEMENTS = 1 << 23
MAX_BATCH_ELEMENTS_ON_CPU = 1 << 21


def batches(matrices: Sequence[Tensor], batched: bool) -> Iterator[list[int]]:
    """Positions in ``matrices`` in batches of one device and one shape, up to transposition.

    Args:
        matrices: ``(k, m, n)`` each; those without elements are left out.
        batched: otherwise each position is a batch.
    """
    buckets: dict[tuple[Any, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.numel():
            key = (matrix.device, *sorted(matrix.shape[1:])) if batched else (index,)
            buckets.setdefault(key, []).append(index)
    for members in buckets.values():
        most = MAX_BATCH_ELEMENTS_ON_CPU if matrices[members[0]].device.type == "cpu" else MAX_BATCH_ELEMENTS
        batch: list[int] = []
        elements = 0
        for index in members:
            size = matrices[index].numel()
            if batch and elements + size > most:
                yield batch
                batch, elements = [], 0
            batch.append(index)
            elements += size
        yield batch


def orthogonalize(
    write: Callable[[int, Tensor], None],
    shapes: Sequence[torch.Size],
    device: torch.device,
    iteration: NewtonSchulz,
    workspace: Workspace,
) -> list[Tensor]:
    """The orthogonal factors of one batch.

    Args:
        write: called for each matrix with its position and a contiguous tensor, where it puts the matrix.
        shapes: ``(k, m, n)`` or ``(k, n, m)`` each.
        device: where the matrices are.
        iteration: what is done.
        workspace: memory for it.

    Returns:
        For each matrix its factor, of its shape, in ``iteration.dtype``; valid until the workspace is used again.
    """
    if sum(shape[0] for shape in shapes) == 1:
        return [_orthogonalize_one(write, shapes[0], device, iteration, workspace)]
    counts = [shape[0] for shape in shapes]
    short, long = sorted(shapes[0][1:])
    x = workspace.take("x", (sum(counts), short, long), iteration.dtype, device)
    for index, (shape, place) in enumerate(zip(shapes, x.split(counts), strict=True)):
        # One by one: a matrix stays in the cache from its average to its place in the batch.
        tall = shape[1] > shape[2]
        matrix = workspace.take("tall", shape, x.dtype, device) if tall else place
        write(index, matrix)
        norm = matrix.norm(dim=(-2, -1), keepdim=True)
        if tall:
            _transpose_into(matrix, place)
        place.div_(norm.clamp_(min=iteration.eps))
    factors = iterate(x, iteration.schedule, workspace).split(counts)
    return [factor.mT if shape[1] > shape[2] else factor for factor, shape in zip(factors, shapes, strict=True)]


def _orthogonalize_one(
    write: Callable[[int, Tensor], None],
    shape: torch.Size,
    device: torch.device,
    iteration: NewtonSchulz,
    workspace: Workspace,
) -> Tensor:
    """A batch of one, as torch.optim.Muon does it: a tall matrix is the transpose of what lies in memory."""
    tall = shape[1] > shape[2]
    matrix = workspace.take("tall" if tall else "x", shape, iteration.dtype, device)
    write(0, matrix)
    matrix.div_(matrix.norm().clamp_(min=iteration.eps))
    x = matrix[0].mT if tall else matrix[0]
    spare = workspace.take("x", x.shape, x.dtype, device)
    factor = iterate(x, iteration.schedule, workspace, spare)
    return (factor.mT if tall else factor)[None]


def _transpose_into(matrix: Tensor, place: Tensor) -> None:
    if len(matrix) == 1:  # torch has a faster way for two dimensions
        matrix, place = matrix[0], place[0]
    place.copy_(matrix.mT)
