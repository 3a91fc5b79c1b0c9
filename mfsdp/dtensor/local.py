"""What this rank holds of a DTensor, read without autograd and without communication."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from mfsdp.placements import is_owner


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor itself (not a view or an autograd result of it); a plain tensor is its own.

    Writing to it writes to ``tensor``. On ranks that own nothing of it the first dimension is 0.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def is_local(tensor: Tensor) -> bool:
    """Whether this rank takes part in what happens to ``tensor``.

    False on ranks of the mesh whose coordinate on some owner dimension is not the owner's, and on ranks
    outside the mesh; True everywhere for plain tensors and DTensors without an owner dimension.
    """
    if not isinstance(tensor, DTensor):
        return True
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    return all(
        here == placement.owner
        for here, placement in zip(coordinate, tensor.placements, strict=True)
        if is_owner(placement)
    )
