"""Sinkhorn: matrices of logits to (nearly) doubly stochastic matrices, one per token.

X_0 = exp(logits);  repeat: divide by the sums along one axis, then by the sums along the other
"""

from __future__ import annotations

from torch import Tensor

from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import widen


@operator
def sinkhorn(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> Tensor:
    """Alternately divide exp(logits) by its sums along two axes.

    Args:
        logits: (..., N, N).
        iterations: pairs of divisions.
        eps: added after the first softmax and to every later divisor; 0 is the plain iteration.
        first: the axis, -1 or -2, whose sums are divided by first; the sums along the other are one at the end.

    Returns:
        (..., N, N), non-negative, in float32 at least.
    """
    last = -3 - first  # the other of -1 and -2
    x = widen(logits)
    if eps == 0.0:
        # the first pair in the log domain: a sum over one axis cannot underflow to zero, and later ones stay above 1/N
        x = x.log_softmax(first).log_softmax(last).exp()
    else:
        x = x.softmax(first) + eps
        x = x / (x.sum(last, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(first, keepdim=True) + eps)
        x = x / (x.sum(last, keepdim=True) + eps)
    return x


@sinkhorn.check
def _(logits: Tensor, *, iterations: int, eps: float = 0.0, first: int = -1) -> None:
    if first not in (-1, -2):
        raise ValueError(f"first must be the axis -1 or -2, got {first}")
