"""Objects gathered without NumPy; what more than one rank gathers is tested wherever ranks compare notes."""

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["numpy"] = None  # as where it is not installed
import torch.distributed as dist
from mfsdp.fsdp.objects import all_gather_object
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert all_gather_object({"any": ("object", 3)}) == [{"any": ("object", 3)}]
import torch
try:
    torch.ones(1).numpy()
except RuntimeError:
    print("gathered without numpy")
"""


def test_without_numpy() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert result.stdout == "gathered without numpy\n", result.stderr
