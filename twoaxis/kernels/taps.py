"""Causal taps along the sequence: what every short convolution here is made of.

    y_t = Σ_lag  w_lag · x_{t-lag}        lag = 0 .. taps-1, zero before the first token of a document

The past is a `Ring` of the last taps-1 inputs, so any cut of a sequence into chunks gives the same numbers, and tokens of
another document or padding are masked by `reach`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twoaxis.window import Ring


def with_history(x: Tensor, past: Ring | None, taps: int) -> tuple[Tensor, Ring]:
    """`x` (B, T, ...) behind its last taps-1 predecessors, zeros where there are none, and the ring for later tokens."""
    ring = (Ring(taps, 1) if past is None else past).append(x)
    (stored,) = ring.tensors()
    need = x.shape[1] + taps - 1
    stored = stored[:, max(0, stored.shape[1] - need) :]
    if stored.shape[1] < need:
        blank = stored.new_zeros((stored.shape[0], need - stored.shape[1], *stored.shape[2:]))
        stored = torch.cat([blank, stored], dim=1)
    return stored, ring.evict()


def causal_taps(history: Tensor, taps: int, reach: Tensor | None) -> Iterator[Tensor]:
    """The input shifted by taps-1, ..., 1, 0 tokens: (B, T, ...) each, oldest first, zero outside the document."""
    length = history.shape[1] - taps + 1
    for lag in range(taps - 1, -1, -1):
        shifted = history.narrow(1, taps - 1 - lag, length)
        if reach is not None and lag:
            inside = (reach >= lag).view(*reach.shape, *[1] * (shifted.dim() - 2))
            shifted = torch.where(inside, shifted, 0.0)
        yield shifted
