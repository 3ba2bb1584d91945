"""Causal taps along the sequence: what every short convolution here is made of.

    y_t = Σ_lag  w_lag · x_{t-lag}        lag = 0 .. taps-1, zero before the first token of a document

The past is a `Ring` of the last taps-1 inputs, so any cut of a sequence into chunks gives the same numbers, and tokens
of another document or padding are masked by `reach`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.operator import Given, Grads, operator
from twoaxis.kernels.precision import routing_dtype, widen
from twoaxis.ring import Ring

L2_FLOATS = 96 * 1024
"""Numbers of one operand that a core's second-level cache holds beside the others: all lags of a stretch of tokens are
done while it is there, which halves the time of long sequences and wide layers."""


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


# A stretch of tokens at a time, with a backward that saves the input alone.


@depthwise_taps.form("eager")
def _taps(history: Tensor, weight: Tensor, reach: Tensor | None) -> tuple[Tensor, tuple[()]]:
    """The shifted products of one stretch of tokens at a time, added in place."""
    rows = _rows(history, weight)
    batch, length, channels = history.shape[0], history.shape[1] - len(rows) + 1, history.shape[2]
    total = torch.empty((batch, length, channels), dtype=rows.dtype, device=history.device)
    for at, size in _stretches(history, length):
        part = total.narrow(1, at, size)
        for s, x in enumerate(_stretch(history, len(rows), reach, at, size)):
            if s:
                part.addcmul_(x, rows[s])
            else:
                torch.mul(x, rows[s], out=part)
    return total, ()


@depthwise_taps.backward("eager")
def _taps_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """The same sum run back: d_x_{t-lag} += w_lag ⊙ g_t,  d_w_lag = Σ_t x_{t-lag} ⊙ g_t,  inside a document."""
    (history, weight, reach), grad = inputs, grads[0]
    rows, length, taps = _rows(history, weight), grad.shape[1], weight.shape[1]
    d_history = torch.zeros_like(history, dtype=grad.dtype) if needs[0] else None
    d_rows = torch.zeros_like(rows) if needs[1] else None
    for at, size in _stretches(history, length):
        g, here = grad.narrow(1, at, size), None if reach is None else reach.narrow(-1, at, size)
        for s, x in enumerate(_stretch(history, taps, reach, at, size)):
            g_in = inside(g, taps - 1 - s, here)
            if d_history is not None:
                d_history.narrow(1, at + s, size).addcmul_(g_in, rows[s])
            if d_rows is not None:
                d_rows[s] += (g_in * x).sum((0, 1))
    return d_history, None if d_rows is None else d_rows.t(), None


def _rows(history: Tensor, weight: Tensor) -> Tensor:
    """(taps, C): one lag's weights side by side, as strided ones cost more than the products."""
    return weight.to(routing_dtype(history.dtype)).t().contiguous()


def _stretches(history: Tensor, length: int) -> Iterator[tuple[int, int]]:
    """Where each stretch of tokens begins and how long it is; on a GPU, which fills only with more, all are one."""
    size = max(16, L2_FLOATS // max(1, history.shape[0] * history.shape[2])) if device_of(history) == "cpu" else length
    for at in range(0, length, max(1, size)):
        yield at, min(size, length - at)


def _stretch(history: Tensor, taps: int, reach: Tensor | None, at: int, size: int) -> Iterator[Tensor]:
    """`causal_taps` of the tokens from `at` on."""
    here = None if reach is None else reach.narrow(-1, at, size)
    return causal_taps(history.narrow(1, at, size + taps - 1), taps, here)
