"""Names of floating-point dtypes, as plans write and read them."""

import torch

from mfsdp.planning.errors import PlanError

__all__ = ["dtype_name", "parse_dtype"]

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
    )
}
_SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def parse_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` or ``"bf16"`` -> ``torch.bfloat16``.

    Raises:
        PlanError: ``name`` is not a floating-point dtype.
    """
    try:
        return _DTYPES[_SHORT.get(name, name)]
    except KeyError:
        known = ", ".join([*_SHORT, *_DTYPES])
        raise PlanError(f"unknown dtype {name!r}; known are {known}.") from None
