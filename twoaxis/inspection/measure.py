"""The quantities of an inspection that are the same for every method, each as a function of tensors.

effective sources   exp( - Σ_s p_s log p_s ),  p = |w| / Σ|w|      S equal weights give S, one alone gives 1
cosine              x·y / (|x| |y|)                               between what a site read and what it added
shares              which part of a quantity lies in which regime
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twoaxis.base.method import NamedRange
from twoaxis.kernels.precision import widen


def effective_sources(weights: Tensor) -> Tensor:
    """How many sources a read is spread over: the exponential of the entropy of |weights|, normalised to sum one.

    Args:
        weights: (..., S).

    Returns:
        (...) from 1 to S; 0 where every weight is zero.
    """
    size = widen(weights).abs()
    total = size.sum(-1, keepdim=True)
    p = size / total.where(total > 0, 1.0)
    count = torch.special.entr(p).sum(-1).exp()
    return torch.where(total.squeeze(-1) == 0, 0.0, count)


def norm(x: Tensor) -> Tensor:
    """The length (...) of (..., D), in float32 at least."""
    return torch.linalg.vector_norm(widen(x), dim=-1)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """The cosine (...) of the angle between (..., D) and (..., D); 0 where one of them is zero."""
    x, y = widen(x), widen(y)
    lengths = norm(x) * norm(y)
    return (x * y).sum(-1) / lengths.where(lengths != 0, 1.0)


def shares(value: Tensor, regimes: Sequence[NamedRange]) -> list[float]:
    """For each regime, the share of the numbers of `value` that lie in it; see `NamedRange`."""
    flat = value.flatten()
    found = []
    for number, regime in enumerate(regimes):
        below = flat <= regime.high if number == len(regimes) - 1 else flat < regime.high
        found.append(((flat >= regime.low) & below).double().mean().item())
    return found
