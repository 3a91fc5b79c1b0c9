"""A counter of collectives and their bytes: :class:`CommCounter`.

It sees what passes torch's dispatcher, which is private to torch, so its code lives with the other private names in
:mod:`mfsdp.dtensor.comm_counter`.
"""

from mfsdp.dtensor.comm_counter import CommCounter, CommTally

__all__ = ["CommCounter", "CommTally"]
