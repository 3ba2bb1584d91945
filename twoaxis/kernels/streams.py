"""Operations on a state of N parallel streams, (..., N, D): routing logits, reading, mixing, means.

    stream_logits    rows @ norm(state)                                 one set of logits per vector of the state
    read_streams     out   = Σ_i weights[i] ⊙ state_i                   read of hyper-connections and of Deep Delta
    mix_streams      out_w = Σ_i weights[w,i] state_i + gain_w y        mix and write of hyper-connections
    stream_mean      state_0 + mean(state - state_0)                    exact where the streams are equal

The logits and the read hand the state on: they return it beside their result, and what follows uses that one. The
numbers are the same; the gradient then passes through the operations one after another, each adding its part to what
it is given, and the state's gradient is never collected from several full-size pieces.

Sums run in float32 at least and are cast once at the end. The eager forms save, besides references to the inputs, a few
numbers per token: no widened or normalised copy of the state. For a few tokens without gradients, as when decoding, the
references are the fewest calls.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.history import project, project_backward
from twoaxis.kernels.operator import Given, Grads, operator
from twoaxis.kernels.precision import cast, launch_bound, product, routing_dtype, widen

LEAST_EPS = 1e-24
"""Of a norm: the cube of one over its root, in the gradient of a vector of zeros, is finite in float32."""


def few_tokens(state: Tensor, *_: Any, **__: Any) -> bool:
    """Whether a state is that of a few tokens."""
    return launch_bound(state)


def per_token(weights: Tensor, rows: Tensor) -> Tensor:
    """(..., W, K), or (W, K) shared by all tokens, times (..., K, D)."""
    # weights with gaps between them, or rows that are copies of one, would make the product run token by token
    rows = rows.contiguous() if 0 in rows.stride()[-2:] else rows
    return product(weights.expand(*rows.shape[:-2], *weights.shape[-2:]).contiguous(), rows)


def dots(rows: Tensor, x: Tensor) -> Tensor:
    """(..., N) the dot products of (..., N, D) with one (..., D) per token."""
    # measured: a product per token takes twice as long as one pass below 128 columns, and two thirds of it above
    if rows.shape[-2] == 1 or rows.shape[-1] < 128:
        return (rows * x.unsqueeze(-2)).sum(-1)
    return per_token(x.unsqueeze(-2), rows.mT).squeeze(-2)


def combined(weights: Tensor, rows: Tensor) -> Tensor:
    """A new (..., D): the sum of (..., N, D) with weights (..., N, 1), (N, 1) or (N, D)."""
    # measured: never slower than a product per token with 1,000 of them, and five times as fast below 128 columns
    total = rows[..., 0, :] * weights[..., 0, :]
    for i in range(1, rows.shape[-2]):
        total.addcmul_(rows[..., i, :], weights[..., i, :])
    return total


# Routing logits.


@operator
def stream_logits(state: Tensor, rows: Tensor, *, norm: str, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the vectors of a state and project them, all with the same rows.

    A norm's scale belongs into the rows and its shift, projected, onto the logits.

    Args:
        state: (..., D), the streams among the leading dimensions or one behind another in D.
        rows: (P, D) one row per logit.
        norm: layer, rms or none; without parameters.
        eps: inside the norm's root.

    Returns:
        (..., P) in float32 at least, and the state to go on with.
    """
    x, eps = widen(state), max(eps, LEAST_EPS)
    if norm != "none":
        x = (F.layer_norm if norm == "layer" else F.rms_norm)(x, x.shape[-1:], eps=eps)
    return product(x, cast(rows, x.dtype).mT), state


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


@operator
def read_streams(state: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """One weighted sum of the streams.

    Args:
        state: (..., N, D).
        weights: (..., N, 1) per token, or (N, 1) shared by all tokens; (N, D) one per stream and column.

    Returns:
        (..., D) in the state's dtype, and the state to go on with.
    """
    x = widen(state)
    return cast((cast(weights, x.dtype) * x).sum(-2), state.dtype), state


@read_streams.check
def _(state: Tensor, weights: Tensor) -> None:
    if weights.shape[-2] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-2]} streams, the state has {state.shape[-2]}")


@read_streams.form("eager")
def _read(state: Tensor, weights: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    x = widen(state)
    return (cast(combined(cast(weights, x.dtype), x), state.dtype), state), ()


@read_streams.backward("eager")
def _read_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_state_i = (what the state that was handed on gets)_i + weights[i] ⊙ g,   d_weights[i] = <state_i, g>."""
    (state, weights), (grad, passed) = inputs, grads
    if grad is None:
        return passed, None
    g = widen(grad)
    w, along, d_state, d_weights = cast(weights, g.dtype), g.unsqueeze(-2), None, None
    if needs[0]:
        d_state = w * along if passed is None else torch.addcmul(widen(passed), w, along)
    if needs[1]:
        x = cast(state, g.dtype)
        d_weights = (dots(x, g).unsqueeze(-1) if w.shape[-1] == 1 else x * along).sum_to_size(w.shape)
    return d_state, d_weights


# Mixing.


@operator
def mix_streams(
    state: Tensor, weights: Tensor | None = None, y: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """Mix N streams into W and, with `y`, add a sub-layer's output to each.

    Args:
        state: (..., N, D).
        weights: (..., W, N) per token, or (W, N) shared by all tokens, [to, from]; (N,) scales each stream by itself;
            None keeps them.
        y: (..., D).
        gain: (..., W) per token, or (W,) shared; how much of `y` each of the W gets.

    Returns:
        (..., W, D) in the dtype that adding `y` to the state would give.
    """
    dtype = _mixed_dtype(state, y)
    x = cast(state, routing_dtype(dtype))
    if weights is not None:  # a sum of products, which a compiler fuses; a matrix product it leaves to itself
        w = cast(weights, x.dtype).unsqueeze(-1)
        x = w * x if weights.dim() == 1 else (w * x.unsqueeze(-3)).sum(-2)
    if y is not None and gain is not None:
        x = torch.addcmul(x, cast(gain, x.dtype).unsqueeze(-1), cast(y, x.dtype).unsqueeze(-2))
    return cast(x, dtype)


@mix_streams.check
def _(state: Tensor, weights: Tensor | None = None, y: Tensor | None = None, gain: Tensor | None = None) -> None:
    if weights is not None and weights.shape[-1] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-1]} streams, the state has {state.shape[-2]}")
    if (y is None) != (gain is None):
        raise ValueError("give y and gain together")


def _mixed_dtype(state: Tensor, y: Tensor | None) -> torch.dtype:
    """The dtype that adding `y` to the state would give."""
    return state.dtype if y is None or y.dtype == state.dtype else torch.promote_types(state.dtype, y.dtype)


@mix_streams.form("eager")
def _mix(state: Tensor, weights: Tensor | None, y: Tensor | None, gain: Tensor | None) -> tuple[Tensor, tuple[()]]:
    dtype = _mixed_dtype(state, y)
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
        d_y = combined(cast(gain, g.dtype).unsqueeze(-1), g)
    if needs[3]:
        d_gain = dots(g, cast(y, g.dtype)).sum_to_size(gain.shape)
    return d_state, d_weights, d_y, d_gain


# The mean.


@operator
def stream_mean(state: Tensor) -> Tensor:
    """The mean of the streams (..., D); equal streams give exactly that stream, whatever their number."""
    if state.shape[-2] == 1:
        return state.squeeze(-2)
    x = widen(state)
    base = x[..., 0, :]
    return (base + (x - base.unsqueeze(-2)).mean(-2)).to(state.dtype)


@stream_mean.backward("eager")
def _mean_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_state_i = g / N."""
    (state,), (grad,) = inputs, grads
    return ((widen(grad) / state.shape[-2]).unsqueeze(-2).expand(state.shape),)


for _op in (stream_logits, read_streams, mix_streams):
    _op.form("few_tokens", serves=few_tokens)(_op.unchanged)
