"""Causal taps along the sequence: what every short convolution here is made of.

    y_t = Σ_lag  w_lag · x_{t-lag}        lag = 0 .. taps-1, zero before the first token of a document

The past is a `Ring` of the last taps-1 inputs, so any cut of a sequence into chunks gives the same numbers, and tokens
of another document or padding are masked by `reach`.

`depthwise_taps` is the sum with one weight per channel and lag. Its readable form is `depthwise_taps_reference`, which
is also what runs under `torch.compile` and `torch.func`: the compiler fuses the shifted products into one pass. Without
them the form with its own backward goes through the sequence in stretches that fit the cache, and saves only the input.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.backward import readable
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.precision import routing_dtype, widen
from twoaxis.ring import Ring

CACHED = 96 * 1024
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


def causal_taps(history: Tensor, taps: int, reach: Tensor | None) -> Iterator[Tensor]:
    """The input shifted by taps-1, ..., 1, 0 tokens: (B, T, ...) each, oldest first, zero outside the document."""
    length = history.shape[1] - taps + 1
    for lag in range(taps - 1, -1, -1):
        yield _inside(history.narrow(1, taps - 1 - lag, length), lag, reach)


def _inside(x: Tensor, lag: int, reach: Tensor | None) -> Tensor:
    """`x` (B, T, ...) with zeros at tokens whose document does not reach back `lag` positions."""
    if reach is None or not lag:
        return x
    # a choice, not a product: what stands outside a document may be anything, not-a-number included
    return torch.where((reach >= lag).view(*reach.shape, *[1] * (x.dim() - 2)), x, 0.0)


def depthwise_taps_reference(history: Tensor, weight: Tensor, reach: Tensor | None = None) -> Tensor:
    """`depthwise_taps` as one reads it: one multiply and one add per lag."""
    weight = weight.to(routing_dtype(history.dtype))
    terms = [widen(x) * weight[:, s] for s, x in enumerate(causal_taps(history, weight.shape[1], reach))]
    return sum(terms[1:], terms[0])


def depthwise_taps(history: Tensor, weight: Tensor, reach: Tensor | None = None) -> Tensor:
    """The causal depthwise convolution of (B, taps-1+T, C) to (B, T, C), in float32 at least; the caller casts.

    Args:
        history: the input behind its taps-1 predecessors; see `with_history`.
        weight: (C, taps), the current token's last.
        reach: (B, T) how many earlier positions belong to the token's document.
    """
    if readable():
        return depthwise_taps_reference(history, weight, reach)
    return _DepthwiseTaps.apply(history, weight.to(routing_dtype(history.dtype)), reach)  # type: ignore[no-any-return]


class _DepthwiseTaps(torch.autograd.Function):
    """The shifted products of one stretch of tokens at a time, added in place; the backward runs the same sum back."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, weight: Tensor, reach: Tensor | None) -> Tensor:
        ctx.save_for_backward(history, weight, reach)
        rows = weight.t().contiguous()  # one lag's weights side by side: strided ones cost more than the products
        batch, length, channels = history.shape[0], history.shape[1] - len(rows) + 1, history.shape[2]
        total = torch.empty((batch, length, channels), dtype=weight.dtype, device=history.device)
        for at, size in _stretches(history, length):
            part = total.narrow(1, at, size)
            for s, x in enumerate(_stretch(history, len(rows), reach, at, size)):
                if s:
                    part.addcmul_(x, rows[s])
                else:
                    torch.mul(x, rows[s], out=part)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        history, weight, reach = ctx.saved_tensors
        rows, length, taps = weight.t().contiguous(), grad.shape[1], weight.shape[1]
        d_history = torch.zeros_like(history, dtype=grad.dtype) if ctx.needs_input_grad[0] else None
        d_rows = torch.zeros_like(rows) if ctx.needs_input_grad[1] else None
        for at, size in _stretches(history, length):
            g, here = grad.narrow(1, at, size), None if reach is None else reach.narrow(-1, at, size)
            for s, x in enumerate(_stretch(history, taps, reach, at, size)):
                inside = _inside(g, taps - 1 - s, here)
                if d_history is not None:
                    d_history.narrow(1, at + s, size).addcmul_(inside, rows[s])
                if d_rows is not None:
                    d_rows[s] += (inside * x).sum((0, 1))
        d_weight = None if d_rows is None else d_rows.t()
        return None if d_history is None else d_history.to(history.dtype), d_weight, None


def _stretches(history: Tensor, length: int) -> Iterator[tuple[int, int]]:
    """Where each stretch of tokens begins and how long it is; on a GPU, which fills only with more, all are one."""
    size = max(16, CACHED // max(1, history.shape[0] * history.shape[2])) if device_of(history) == "cpu" else length
    for at in range(0, length, max(1, size)):
        yield at, min(size, length - at)


def _stretch(history: Tensor, taps: int, reach: Tensor | None, at: int, size: int) -> Iterator[Tensor]:
    """`causal_taps` of the tokens from `at` on."""
    here = None if reach is None else reach.narrow(-1, at, size)
    return causal_taps(history.narrow(1, at, size + taps - 1), taps, here)
