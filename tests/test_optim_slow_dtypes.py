"""The warning of bf16 on processors without arithmetic for it."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from mfsdp.optim import Muon, slow_dtypes

AVX2 = {"architecture": "x86_64", "avx2": True, "avx512_f": False, "avx_ne_convert": False}


def warnings_of(
    caplog: pytest.LogCaptureFixture, capabilities: dict[str, Any], device: str = "cpu", **options: Any
) -> list[str]:
    """What two optimizers log in a new process on a processor of such ``capabilities``."""
    slow_dtypes._warn.cache_clear()
    caplog.clear()
    with mock.patch.object(torch.cpu, "get_capabilities", return_value=capabilities), caplog.at_level(logging.WARNING):
        for _ in range(2):
            Muon([nn.Parameter(torch.ones(2, 2, device=device))], **options)
    return caplog.messages


def test_it_is_logged_once_and_only_where_iterations_are_slow(caplog: pytest.LogCaptureFixture) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        (message,) = warnings_of(caplog, AVX2, ns_dtype=dtype)
        assert "pass ns_dtype=torch.float32" in message
    for capabilities in (AVX2 | {"avx512_f": True}, AVX2 | {"avx_ne_convert": True}, {"architecture": "arm64"}):
        assert not warnings_of(caplog, capabilities)
    for options in ({"ns_dtype": torch.float32}, {"ns_dtype": torch.float64}, {"ns_steps": 0}, {"device": "meta"}):
        assert not warnings_of(caplog, AVX2, **options)


def test_torch_says_what_this_processor_has() -> None:
    capabilities = torch.cpu.get_capabilities()
    if capabilities["architecture"] == "x86_64":
        assert {"avx512_f", "avx_ne_convert"} <= capabilities.keys()
