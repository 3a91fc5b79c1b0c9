"""How DTensor learns the owner placements; the only folder that touches DTensor's private names."""

from mfsdp.dtensor.local import is_local, local_tensor

__all__ = ["is_local", "local_tensor"]
