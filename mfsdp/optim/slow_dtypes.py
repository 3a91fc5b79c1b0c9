"""A warning of dtypes that a processor has no arithmetic for."""

import logging
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

__all__ = ["warn_of_slow_dtype"]

_logger = logging.getLogger(__name__)


def warn_of_slow_dtype(dtype: str, params: Iterable[Tensor]) -> None:
    """Log a warning, once in a process, if Newton-Schulz iterations in ``dtype`` are slow where ``params`` are.

    It is logged, not raised by ``-W error``: the numbers are right, and on every processor the default is bfloat16.

    Args:
        dtype: name of the dtype of the iterations.
        params: what is to be stepped; on devices other than the CPU nothing is slow.
    """
    if dtype in ("bfloat16", "float16") and any(param.device.type == "cpu" for param in params):
        _warn_if_slow()


@cache
def _warn_if_slow() -> None:
    """Without AVX-512 (or bf16 in AVX2) products of matrices of 16 bits are computed one number after another."""
    capabilities = torch.cpu.get_capabilities()  # other architectures than x86 do not have these at all
    if not (capabilities.get("avx512_f", True) or capabilities.get("avx_ne_convert", True)):
        _logger.warning(
            "Muon: this processor has no AVX-512, and multiplies matrices of 16 bits tens of times more slowly than "
            "those of 32: pass ns_dtype=torch.float32 for Newton-Schulz iterations in float32."
        )
