"""Orthogonalisation of matrices by Newton-Schulz iterations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from mfsdp.optim.group_options import is_number

__all__ = ["COEFFICIENTS", "QUINTIC", "Coefficients", "NewtonSchulz", "Workspace", "newton_schulz"]

Coefficients = tuple[float, float, float]
"""``(a, b, c)`` of one step ``X <- a X + b (X X^T) X + c (X X^T)^2 X``."""

#: The quintic whose slope at zero is largest, by Keller Jordan, "Muon: an optimizer for hidden layers in neural
#: networks" (2024). Singular values end up in about [0.7, 1.2] rather than at 1, which serves as well.
QUINTIC: Coefficients = (3.4445, -4.7750, 2.0315)

#: The classical iteration (Kovarik 1970; Bjorck and Bowie 1971): slow at first, exact in the end.
CUBIC: Coefficients = (1.5, -0.5, 0.0)

#: The best quintic for each step in turn, from Amsel, Persson, Musco and Gower, "The Polar Express",
#: arXiv 2505.16932, algorithm 1, before its safety factor; the last one is for all further steps.
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01  # the paper's, against rounding in bfloat16

#: Sets by name: the coefficients of step 1, 2, ...; the last ones are repeated.
COEFFICIENTS: dict[str, tuple[Coefficients, ...]] = {
    "quintic": (QUINTIC,),
    "cubic": (CUBIC,),
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS[:-1]),
        _POLAR_EXPRESS[-1],
    ),
}


@dataclass(frozen=True)
class NewtonSchulz:
    """The iteration: which polynomial in which step, and in which precision.

    Args:
        coefficients: the name of a set in :data:`COEFFICIENTS`, one ``(a, b, c)`` for every step, or a sequence
            of them, of which the last is repeated.
        steps: number of iterations, less than 100.
        eps: smallest norm that a matrix is divided by; a zero matrix gives zeros.
        dtype: bfloat16, float16, float32 or float64.

    Raises:
        TypeError: ``steps`` or ``eps`` is no number.
        ValueError: a value is out of range.
    """

    coefficients: str | Coefficients | Sequence[Coefficients] = QUINTIC
    steps: int = 5
    eps: float = 1e-7
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not isinstance(self.steps, Integral) or not is_number(self.steps):
            raise TypeError(f"ns_steps must be a whole number, but is {self.steps!r}.")
        if not is_number(self.eps, or_tensor=True):
            raise TypeError(f"eps must be a number, but is {self.eps!r}.")
        if not 0 <= self.steps < 100:
            raise ValueError(f"ns_steps must be in [0, 100), but is {self.steps}.")
        if not self.eps >= 0:
            raise ValueError(f"eps must be 0 or more, but is {self.eps}.")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise ValueError(f"ns_dtype must be bfloat16, float16, float32 or float64, but is {self.dtype}.")
        _ = self.schedule  # so that wrong coefficients are told now

    @property
    def schedule(self) -> tuple[Coefficients, ...]:
        """The coefficients of each step."""
        sets = _coefficient_sets(self.coefficients)
        return tuple(sets[min(step, len(sets) - 1)] for step in range(self.steps))


def _coefficient_sets(given: str | Coefficients | Sequence[Coefficients]) -> Sequence[Coefficients]:
    if isinstance(given, str):
        if given not in COEFFICIENTS:
            known = ", ".join(map(repr, COEFFICIENTS))
            raise ValueError(f"ns_coefficients must be {known} or numbers, but is {given!r}.")
        return COEFFICIENTS[given]
    told = f"ns_coefficients must be three numbers (a, b, c), or a sequence of such, but is {given!r}."
    if not isinstance(given, Sequence):
        raise ValueError(told)
    listed: list[Any] = [given] if any(isinstance(entry, Real) for entry in given) else list(given)
    if not listed or not all(_is_triple(entry) for entry in listed):
        raise ValueError(told)
    return [tuple(entry) for entry in listed]


def _is_triple(entry: Any) -> bool:
    if not isinstance(entry, Sequence) or len(entry) != 3:
        return False
    return all(is_number(number) and math.isfinite(number) for number in entry)


class Workspace:
    """Memory that all batches of a step use in turn, so that it is not allocated over and over.

    Between steps it is released: forward and backward need the room, and to allocate it once a step costs nothing
    against the iterations. A step captured in a CUDA graph has it in the graph's own pool.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of undefined contents, valid until ``name`` is taken again; in a compiled step, a new one."""
        if torch.compiler.is_compiling():
            return torch.empty(*shape, dtype=dtype, device=device)
        key, numel = (name, dtype, device), torch.Size(shape).numel()
        flat = self._flat.get(key)
        if flat is None or flat.numel() < numel:
            self._flat.pop(key, None)
            flat = self._flat[key] = torch.empty(numel, dtype=dtype, device=device)
        return flat[:numel].view(*shape)

    def release(self) -> None:
        """Free the memory; what was taken must no longer be used."""
        self._flat.clear()


def iterate(
    x: Tensor, schedule: Sequence[Coefficients], workspace: Workspace | None = None, spare: Tensor | None = None
) -> Tensor:
    """The steps alone, on normalised matrices that are not tall.

    Args:
        x: shape ``(m, n)`` or ``(B, m, n)`` with ``m <= n``.
        schedule: coefficients of each step.
        workspace: where intermediate results go; without one they are allocated.
        spare: of the shape of ``x``, for results, if there is a workspace; by default ``x`` is overwritten.
    """
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    gram = polynomial = out = next_out = None
    if workspace is not None:
        square = (*x.shape[:-1], x.shape[-2])
        gram = workspace.take("gram", square, x.dtype, x.device)
        polynomial = workspace.take("polynomial", square, x.dtype, x.device)
        out, next_out = workspace.take("other", x.shape, x.dtype, x.device), x if spare is None else spare
    for a, b, c in schedule:
        gram = torch.matmul(x, x.mT, out=gram)
        if c:
            polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        else:
            polynomial = torch.mul(gram, b, out=polynomial)
        x = multiply_add(x, polynomial, x, beta=a, out=out)
        if workspace is None:
            gram = polynomial = None
        else:
            out, next_out = next_out, out
    return x


def newton_schulz(
    matrix: Tensor,
    coefficients: str | Coefficients | Sequence[Coefficients] = QUINTIC,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """An approximation of the orthogonal factor ``U V^T`` of ``matrix = U S V^T``.

    With ``X_0 = M / max(||M||_F, eps)``, each step maps ``X`` to ``a X + (b A + c A^2) X`` where
    ``A = X X^T``. A tall matrix is worked on transposed, so that ``A`` is the smaller of the two Gram matrices.

    Args:
        matrix: shape ``(m, n)``, or ``(B, m, n)`` for a batch, of any floating dtype; it is only read.
        coefficients: see :class:`NewtonSchulz`.
        steps: number of iterations; with 0 the normalised matrix is returned.
        eps: smallest norm that is divided by; a zero matrix gives zeros.
        dtype: of the computation and the result.

    Returns:
        The shape of ``matrix``. With the defaults, of one matrix, bit-equal to ``torch.optim.Muon``'s.
    """
    schedule = NewtonSchulz(coefficients, steps, eps, dtype).schedule
    x = matrix.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = iterate(x / norm.clamp(min=eps), schedule)
    return x.mT if tall else x
