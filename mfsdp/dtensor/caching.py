"""The identity of owned DTensors in torch.compile's caches on disk, which ranks share.

A graph over an owned tensor differs between the owner and everybody else, and torch's key (mesh, placements, global
shape) does not. Without the addition here one rank would load what another compiled and skip its own arithmetic.
"""

from torch.distributed.tensor import DTensor

from mfsdp.dtensor.local import is_local
from mfsdp.dtensor.specs import has_owner

_torch_stable_hash = DTensor._stable_hash_for_caching


def stable_hash_for_caching(tensor: DTensor) -> str:
    """torch's hash; for owned tensors with whether this rank holds the data."""
    stable = _torch_stable_hash(tensor)
    return f"{stable}-{'held' if is_local(tensor) else 'elsewhere'}" if has_owner(tensor._spec) else stable
