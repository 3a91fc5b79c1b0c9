"""Orthogonalisation of a matrix by Newton-Schulz iterations."""

from torch import Tensor, addmm

__all__ = ["QUINTIC", "newton_schulz"]

#: Coefficients ``(a, b, c)`` of the quintic whose slope at zero is largest, by Keller Jordan,
#: "Muon: an optimizer for hidden layers in neural networks" (2024).
QUINTIC = (3.4445, -4.7750, 2.0315)


def newton_schulz(
    matrix: Tensor, coefficients: tuple[float, float, float] = QUINTIC, steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """An approximation of the orthogonal factor ``U V^T`` of ``matrix = U S V^T``, in bfloat16.

    With ``X_0 = M / max(||M||_F, eps)``, each step maps ``X`` to ``a X + (b A + c A^2) X`` where
    ``A = X X^T``. With the default coefficients the singular values end up in about [0.7, 1.2] rather than
    at 1, which serves an optimizer as well. A tall matrix is worked on transposed, so that ``A`` is the
    smaller of the two Gram matrices.

    Args:
        matrix: shape ``(m, n)``, of any floating dtype; it is only read.
        coefficients: ``(a, b, c)``.
        steps: number of iterations; with 0 the normalised matrix is returned.
        eps: smallest norm that is divided by; a zero matrix gives zeros.

    Returns:
        Shape ``(m, n)``, bfloat16. Bit-equal to what ``torch.optim.Muon`` computes.
    """
    a, b, c = coefficients
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.bfloat16()
    if tall:
        x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        polynomial = addmm(gram, gram, gram, beta=b, alpha=c)
        x = addmm(x, polynomial, x, beta=a)
    return x.T if tall else x
