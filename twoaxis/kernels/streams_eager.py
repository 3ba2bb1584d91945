"""Forms of the operations on parallel streams in calls of PyTorch, with their own backward.

What is saved besides references to the inputs is a few numbers per token: no widened or normalised copy of the state.
For a few tokens without gradients, as when decoding, there are forms with the fewest calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.history_eager import inverse_rms
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import launch_bound, product, routing_dtype, widen
from twoaxis.kernels.streams import LEAST_EPS, mix_streams, mixed_dtype, read_streams, stream_logits, stream_mean


def per_token(weights: Tensor, rows: Tensor) -> Tensor:
    """(..., W, K), or (W, K) shared by all tokens, times (..., K, D)."""
    # weights with gaps between them, or rows that are copies of one, would make the product run token by token
    rows = rows.contiguous() if 0 in rows.stride()[-2:] else rows
    return product(weights.expand(*rows.shape[:-2], *weights.shape[-2:]).contiguous(), rows)


def dots(rows: Tensor, x: Tensor) -> Tensor:
    """(..., N) the dot products of (..., N, D) with one (..., D) per token."""
    return per_token(x.unsqueeze(-2), rows.mT).squeeze(-2)


def combined(weights: Tensor, rows: Tensor) -> Tensor:
    """A new (..., D): the sum of (..., N, D) with weights (..., N), or (N,) shared."""
    return per_token(weights.unsqueeze(-2), rows).squeeze(-2)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, without a call where it has it."""
    return x if x.dtype == dtype else x.to(dtype)


def _few(state: Tensor, *_: Any, **__: Any) -> bool:
    return launch_bound(state)


# Routing logits.


@stream_logits.form("few_tokens", serves=_few)
def _logits_few(state: Tensor, rows: Tensor, *, norm: str, eps: float) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    x, eps = widen(state), max(eps, LEAST_EPS)
    if norm != "none":
        x = (F.layer_norm if norm == "layer" else F.rms_norm)(x, x.shape[-1:], eps=eps)
    return (product(x, cast(rows, x.dtype).mT), state), ()


@stream_logits.form("eager")
def _logits(
    state: Tensor, rows: Tensor, *, norm: str, eps: float
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, ...]]:
    """Saves the mean and the inverse root mean square (..., 1) and the logits; few rows beat few columns."""
    x, mean = widen(state), None
    rows = cast(rows, x.dtype)
    if norm == "layer":
        mean = x.mean(-1, keepdim=True)
        # a mean square less a squared mean would cancel where the mean is large, and rows meet the rounding of the mean
        x, rows = x - mean, rows - rows.mean(-1, keepdim=True)
    logits = product(rows, x.reshape(-1, x.shape[-1]).mT).mT.reshape(*x.shape[:-1], len(rows))
    if norm == "none":
        return (logits, state), (None, None, None)
    inverse = inverse_rms(x, max(eps, LEAST_EPS))
    logits = logits * inverse
    return (logits, state), (mean, inverse, logits)


@stream_logits.backward("eager")
def _logits_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, norm: str, eps: float) -> Grads:
    """With t = r R x, r = (mean x² + eps)^(-1/2), g the gradient of t and p that of the state that was handed on:

        d_R = Σ_tokens r g ⊗ x        d_x = p + r Rᵀ g - (r² / D) <g, t> x

    Layer norm is the same on x less its mean, and takes the mean off d_x - p: x has none, so it comes off the rows.
    Rows that met x with its mean would cancel in d_R.
    """
    (state, rows), (mean, inverse, logits), (grad, passed) = inputs, saved, grads
    if grad is None:
        return passed, None
    rows, width = cast(rows, grad.dtype), state.shape[-1]
    x = widen(state) if mean is None else widen(state) - mean
    scaled = (grad if inverse is None else grad * inverse).reshape(-1, len(rows))
    d_state = d_rows = None
    if needs[1]:
        d_rows = product(scaled.mT, x.reshape(-1, width))
    if needs[0]:
        d_state = product(scaled, rows if mean is None else rows - rows.mean(-1, keepdim=True)).view(x.shape)
        if inverse is not None:
            d_state.addcmul_(x, (grad * logits).sum(-1, keepdim=True).mul_(inverse.square().div_(-width)))
        d_state = d_state if passed is None else d_state.add_(passed)
    return d_state, d_rows


# Reading.


@read_streams.form("few_tokens", serves=_few)
def _read_few(state: Tensor, weights: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    x = widen(state)
    return (cast((cast(weights, x.dtype).unsqueeze(-1) * x).sum(-2), state.dtype), state), ()


@read_streams.form("eager")
def _read(state: Tensor, weights: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    x = widen(state)
    return (cast(combined(cast(weights, x.dtype), x), state.dtype), state), ()


@read_streams.backward("eager")
def _read_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_state_i = (what the state that was handed on gets)_i + weights[i] g,   d_weights[i] = <state_i, g>."""
    (state, weights), (grad, passed) = inputs, grads
    if grad is None:
        return passed, None
    g = widen(grad)
    w, d_state, d_weights = cast(weights, g.dtype).unsqueeze(-1), None, None
    if needs[0]:
        along = g.unsqueeze(-2)
        d_state = w * along if passed is None else torch.addcmul(widen(passed), w, along)
    if needs[1]:
        d_weights = dots(cast(state, g.dtype), g).sum_to_size(weights.shape)
    return d_state, d_weights


@stream_mean.form("eager")
def _mean(state: Tensor) -> tuple[Tensor, tuple[()]]:
    return stream_mean.reference(state), ()


@stream_mean.backward("eager")
def _mean_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_state_i = g / N."""
    (state,), (grad,) = inputs, grads
    return ((widen(grad) / state.shape[-2]).unsqueeze(-2).expand(state.shape),)


# Mixing.


@mix_streams.form("few_tokens", serves=_few)
def _mix_few(state: Tensor, weights: Tensor | None, y: Tensor | None, gain: Tensor | None) -> tuple[Tensor, tuple[()]]:
    dtype = mixed_dtype(state, y)
    x = cast(state, routing_dtype(dtype))
    if weights is not None:
        w = cast(weights, x.dtype).unsqueeze(-1)
        x = w * x if weights.dim() == 1 else (w * x.unsqueeze(-3)).sum(-2)
    if y is not None and gain is not None:
        x = torch.addcmul(x, cast(gain, x.dtype).unsqueeze(-1), cast(y, x.dtype).unsqueeze(-2))
    return cast(x, dtype), ()


@mix_streams.form("eager")
def _mix(state: Tensor, weights: Tensor | None, y: Tensor | None, gain: Tensor | None) -> tuple[Tensor, tuple[()]]:
    dtype = mixed_dtype(state, y)
    x = cast(state, routing_dtype(dtype))
    if weights is None:
        x = x.clone()
    else:
        w = cast(weights, x.dtype)
        x = w.unsqueeze(-1) * x if w.dim() == 1 else per_token(w, x)
    if y is not None and gain is not None:
        x.addcmul_(cast(y, x.dtype).unsqueeze(-2), cast(gain, x.dtype).unsqueeze(-1))
    return cast(x, dtype), ()


@mix_streams.backward("eager")
def _mix_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """With g_w the gradient of stream w:

    d_state_i = Σ_w weights[w,i] g_w    d_weights[w,i] = <g_w, state_i>    d_y = Σ_w gain_w g_w    d_gain_w = <g_w, y>
    """
    state, weights, y, gain = inputs
    g = widen(grads[0]).contiguous()  # the sum of the streams gives all of them one gradient
    d_state = d_weights = d_y = d_gain = None
    w = None if weights is None else cast(weights, g.dtype)
    if needs[0]:
        d_state = g if w is None else g * w.unsqueeze(-1) if w.dim() == 1 else per_token(w.mT, g)
    if w is not None and needs[1]:
        x = cast(state, g.dtype)
        d_weights = ((g * x).sum(-1) if w.dim() == 1 else per_token(g, x.mT)).sum_to_size(w.shape)
    if needs[2]:
        d_y = combined(cast(gain, g.dtype), g)
    if needs[3]:
        d_gain = dots(g, cast(y, g.dtype)).sum_to_size(gain.shape)
    return d_state, d_weights, d_y, d_gain
