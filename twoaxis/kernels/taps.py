"""Causal taps along the sequence: what every short convolution here is made of.

    y_t = Σ_lag  w_lag · x_{t-lag}        lag = 0 .. taps-1, zero before the first token of a document

The past is a `Ring` of the last taps-1 inputs, so any cut of a sequence into chunks gives the same numbers, and tokens
of another document or padding are masked by `reach`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import routing_dtype, widen
from twoaxis.ring import Ring


def with_history(x: Tensor, past: Ring | None, taps: int) -> tuple[Tensor, Ring]:
    """`x` (B, T, ...) behind its last taps-1 predecessors, zeros where there are none, and the ring after it."""
    ring = (Ring(taps, 1) if past is None else past).append(x)
    (stored,) = ring.tensors()
    need = x.shape[1] + taps - 1
    stored = stored[:, max(0, stored.shape[1] - need) :]
    if stored.shape[1] < need:
        blank = stored.new_zeros((stored.shape[0], need - stored.shape[1], *stored.shape[2:]))
        stored = torch.cat([blank, stored], dim=1)
    return stored, ring.evict()


@operator
def depthwise_taps(history: Tensor, weight: Tensor, reach: Tensor | None = None) -> Tensor:
    """The causal depthwise convolution of (B, taps-1+T, C) to (B, T, C), in float32 at least; the caller casts.

    Args:
        history: the input behind its taps-1 predecessors; see `with_history`.
        weight: (C, taps), the current token's last.
        reach: (B, T) how many earlier positions belong to the token's document.
    """
    weight = weight.to(routing_dtype(history.dtype))
    terms = [widen(x) * weight[:, s] for s, x in enumerate(causal_taps(history, weight.shape[1], reach))]
    return sum(terms[1:], terms[0])


def causal_taps(history: Tensor, taps: int, reach: Tensor | None) -> Iterator[Tensor]:
    """The input shifted by taps-1, ..., 1, 0 tokens: (B, T, ...) each, oldest first, zero outside the document."""
    length = history.shape[1] - taps + 1
    for lag in range(taps - 1, -1, -1):
        yield inside(history.narrow(1, taps - 1 - lag, length), lag, reach)


def inside(x: Tensor, lag: int, reach: Tensor | None) -> Tensor:
    """`x` (B, T, ...) with zeros at tokens whose document does not reach back `lag` positions."""
    if reach is None or not lag:
        return x
    # a choice, not a product: what stands outside a document may be anything, not-a-number included
    return torch.where((reach >= lag).view(*reach.shape, *[1] * (x.dim() - 2)), x, 0.0)
