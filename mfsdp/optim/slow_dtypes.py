"""A warning of dtypes that a processor has no arithmetic for."""

import logging
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

__all__ = ["is_slow_at_16_bits", "warn_of_slow_dtype"]

_logger = logging.getLogger(__name__)


def is_slow_at_16_bits(device_type: str) -> bool:
    """Whether products of matrices in bfloat16 or float16 take tens of times as long there as those in float32.

    Without AVX-512 (or bf16 in AVX2) an x86 processor computes them one number after another.

    Args:
        device_type: such as ``"cpu"``, the only type of which any are.
    """
    if device_type != "cpu":
        return False
    capabilities = torch.cpu.get_capabilities()  # other architectures than x86 do not have these at all
    return not (capabilities.get("avx512_f", True) or capabilities.get("avx_ne_convert", True))


def warn_of_slow_dtype(dtype: str, params: Iterable[Tensor]) -> None:
    """Log a warning, once in a process, if Newton-Schulz iterations in ``dtype`` are slow where ``params`` are.

    It is logged, not raised by ``-W error``: the numbers are right, and on every processor the default is bfloat16.

    Args:
        dtype: name of the dtype of the iterations.
        params: what is to be stepped; on devices other than the CPU nothing is slow.
    """
    if dtype in ("bfloat16", "float16") and any(map(is_slow_at_16_bits, {param.device.type for param in params})):
        _warn()


@cache
def _warn() -> None:
    _logger.warning(
        "Muon: this processor has no AVX-512, and multiplies matrices of 16 bits tens of times more slowly than "
        "those of 32: pass ns_dtype=torch.float32 for Newton-Schulz iterations in float32."
    )
