"""Clipping by global norm where parameters live on more than one mesh.

``torch.nn.utils.clip_grad_norm_`` is right for owned parameters of one mesh, and refuses to mix tensors of two, as
a model has whose experts are sharded over other ranks than the rest.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients so that their norm, taken over all parameters of all meshes, is at most ``max_norm``.

    Called on every rank alike, with the parameters that this rank has a part in. Each mesh costs one small collective
    for each of its dimensions on which something is not replicated.

    Args:
        parameters: any mix of owned, tail, sharded and replicated DTensors on any meshes, and plain tensors, which
            count as the same on every rank. A mesh must span all ranks that hold different parts of its parameters:
            experts of other ranks that are no part of it are not counted.
        max_norm: what the norm may be at most.
        norm_type: the p of the p-norm; ``float("inf")`` for the largest absolute value.
        error_if_nonfinite: raise, on every rank, if the norm is not finite; nothing is scaled then.
        foreach: as in ``torch.nn.utils.clip_grad_norm_``.

    Returns:
        The norm before clipping, 0-d, a plain tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite``.
    """
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    gradients: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            groups.setdefault(mesh, []).append(parameter)
            gradients.setdefault(mesh, []).append(gradient)
    norms = [_whole(get_total_norm(group, norm_type, foreach=foreach)) for group in gradients.values()]
    if not norms:
        return torch.tensor(0.0)
    norm = torch.linalg.vector_norm(torch.stack([part.to(norms[0].device) for part in norms]), norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of all gradients is {norm.item()}, so they cannot be clipped. "
            "Skip this step, or pass error_if_nonfinite=False to scale by it all the same."
        )
    for group in groups.values():
        clip_grads_with_norm_(group, max_norm, norm, foreach)
    return norm


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
