"""The memory of a tensor: as bytes, without NumPy, and on which pages."""

import ctypes
import mmap

from torch import Tensor

__all__ = ["memory_of", "prefer_huge_pages"]

_HUGE_PAGE = 1 << 21
"""Bytes; where they are larger the advice covers no whole one and is not followed."""


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read or written; valid as long as the tensor is."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def prefer_huge_pages(tensor: Tensor) -> None:
    """Advise the system to back a tensor on the CPU, whose memory was not touched yet, by huge pages.

    Else new memory is found page by page of 4 KiB while it is first written to, which takes longer than reading a
    file that is cached. It is a hint, for whole pages inside the tensor: no memory is added, and where the system knows
    no huge pages nothing happens.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux has it
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - start
    if advice is not None and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
