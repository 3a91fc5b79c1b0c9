"""How DTensor learns the owner placements; the only folder that touches DTensor's private names.

Importing it installs the seams (:mod:`mfsdp.dtensor.seams`): from then on torch's own functions accept
:class:`~mfsdp.placements.OwnerShard` and :class:`~mfsdp.placements.Tail`.
"""

from mfsdp.dtensor.distribute import distribute_tensor
from mfsdp.dtensor.local import is_local, local_tensor
from mfsdp.dtensor.seams import check_version, install

install()

__all__ = ["check_version", "distribute_tensor", "install", "is_local", "local_tensor"]
