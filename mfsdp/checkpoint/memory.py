"""The memory of a tensor as bytes, without NumPy."""

import ctypes

from torch import Tensor

__all__ = ["memory_of"]


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read or written; valid as long as the tensor is."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
