"""The memory that tensors are read into."""

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from mfsdp.checkpoint.memory import memory_of, prefer_huge_pages

MIB = 1 << 20


def flags_at(address: int) -> list[str]:
    """The kernel's flags of the mapping that has ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise LookupError(f"no mapping has {address:x}")


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"), reason="only Linux has the advice")
def test_large_tensors_are_advised_to_use_huge_pages() -> None:
    tensor = torch.empty(64 * MIB, dtype=torch.uint8)
    prefer_huge_pages(tensor)
    assert "hg" in flags_at(tensor.data_ptr() + 32 * MIB)


@pytest.mark.parametrize("size", [0, 1, MIB, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_the_advice_changes_no_byte_inside_or_around(size: int) -> None:
    around = torch.arange(size + 4096, dtype=torch.int32).to(torch.uint8)
    before = around.clone()
    prefer_huge_pages(around[1024 : 1024 + size])
    assert torch.equal(around, before)


def test_memory_is_that_of_the_tensor() -> None:
    tensor = torch.tensor([1, 256], dtype=torch.int16)
    memory = memory_of(tensor)
    assert bytes(memory) == b"\x01\x00\x00\x01"
    memory[0] = 7
    assert tensor.tolist() == [7, 256]
    assert len(memory_of(tensor[:0])) == 0
