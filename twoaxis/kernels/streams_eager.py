"""Forms of the operations on parallel streams in calls of PyTorch, with their own backward.

What is saved besides references to the inputs is a few numbers per token: no widened or normalised copy of the state.
For a few tokens without gradients, as when decoding, there are forms with the fewest calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.history_eager import project, project_backward
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
    """Saves the mean and the inverse root mean square (..., 1) and the logits."""
    x, mean = widen(state), None
    if norm == "layer":
        mean = x.mean(-1, keepdim=True)
        # a mean square less a squared mean would cancel where the mean is large, and rows meet the rounding of the mean
        x, rows = _centred(x, rows, mean)
    logits, saved = project(x, rows.unsqueeze(1), eps=None if norm == "none" else max(eps, LEAST_EPS))
    return (logits.squeeze(-2), state), (mean, *saved)


@stream_logits.backward("eager")
def _logits_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, norm: str, eps: float) -> Grads:
    """That of `rms_logits`, and p, the gradient of the state that was handed on: d_x = p + ...

    Layer norm is the same on x less its mean, and takes the mean off d_x - p: x has none, so it comes off the rows.
    Rows that met x with its mean would cancel in d_R.
    """
    (x, rows), (mean, *root), (grad, passed) = inputs, saved, grads
    if grad is None:
        return passed, None
    if mean is not None:
        x, rows = _centred(widen(x), rows, mean)
    d_state, d_rows = project_backward((x, rows.unsqueeze(1)), root, (grad.unsqueeze(-2),), needs, eps=eps)
    if d_state is not None:
        d_state = d_state if passed is None else d_state.add_(passed)
    return d_state, None if d_rows is None else d_rows.squeeze(1)


def _centred(x: Tensor, rows: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The vectors less their means, and the rows less their own."""
    rows = cast(rows, x.dtype)
    return x - mean, rows - rows.mean(-1, keepdim=True)


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
