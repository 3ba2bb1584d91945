"""Operations on a state of N parallel streams, (..., N, D): mixing, reading, routing logits, Sinkhorn.

    mix_streams      out_w = Σ_i weights[w,i] state_i + gain_w y        read, mix and write of hyper-connections
    stream_logits    norm(state_i) @ projection                         one row of logits per stream
    stream_mean      state_0 + mean(state - state_0)                    exact where the streams are equal
    sinkhorn         logits -> (nearly) doubly stochastic matrices      per token

Mixing is a sum of products, never a matrix product: where float32 matrix products are allowed to run in TF32 or
bfloat16, a product with the identity would round the residual stream at every site. Sums run in float32 at least and
are cast once at the end.

Each operation has its readable form (`*_reference`, plain differentiable torch) and a form that saves less for the
backward pass: references to the state and small weights, no widened or normalised copy of the state, no Sinkhorn
iterates. Under `torch.compile` the readable form is what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.precision import full_precision, routing_dtype, widen


def mix_streams_reference(
    state: Tensor, weights: Tensor, y: Tensor | None = None, gain: Tensor | None = None
) -> Tensor:
    """`mix_streams` as one reads it."""
    dtype = _result(state, y)
    wide = routing_dtype(dtype)
    x, weights = state.to(wide), weights.to(wide)
    total = weights[..., 0, None] * x[..., :1, :]  # (..., W, D)
    for i in range(1, state.shape[-2]):
        total = total + weights[..., i, None] * x[..., i : i + 1, :]
    if y is not None and gain is not None:
        total = total + gain.to(wide).unsqueeze(-1) * y.to(wide).unsqueeze(-2)
    return total.to(dtype)


@full_precision
def mix_streams(state: Tensor, weights: Tensor, y: Tensor | None = None, gain: Tensor | None = None) -> Tensor:
    """Mix N streams into W and, with `y`, add a sub-layer's output to each.

    Args:
        state: (..., N, D).
        weights: (..., W, N) per token, or (W, N) shared by all tokens; [to, from].
        y: (..., D).
        gain: (..., W) per token, or (W,) shared; how much of `y` each of the W gets.

    Returns:
        (..., W, D) in the dtype that adding `y` to the state would give.
    """
    if weights.shape[-1] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-1]} streams, the state has {state.shape[-2]}")
    if (y is None) != (gain is None):
        raise ValueError("give y and gain together")
    if torch.compiler.is_compiling():
        return mix_streams_reference(state, weights, y, gain)
    return _MixStreams.apply(state, weights, y, gain)  # type: ignore[no-any-return]


class _MixStreams(torch.autograd.Function):
    """One broadcast multiply-add per source stream; the state and y are saved by reference."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, weights: Tensor, y: Tensor | None, gain: Tensor | None) -> Tensor:
        ctx.save_for_backward(state, weights, y, gain)
        dtype = _result(state, y)
        total = _accumulate(state, weights, routing_dtype(dtype))
        if y is not None and gain is not None:
            total.addcmul_(y.unsqueeze(-2), gain.to(total.dtype).unsqueeze(-1))
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, weights, y, gain = ctx.saved_tensors
        needs, g = ctx.needs_input_grad, widen(grad)
        d_state = d_weights = d_y = d_gain = None
        if needs[0]:
            d_state = _accumulate(g, weights.mT, g.dtype).to(state.dtype)
        if needs[1]:
            d_weights = (g @ state.to(g.dtype).mT).sum_to_size(weights.shape).to(weights.dtype)
        if y is not None and needs[2]:
            d_y = _accumulate(g, gain.unsqueeze(-2), g.dtype).squeeze(-2).to(y.dtype)
        if y is not None and needs[3]:
            d_gain = (g @ y.to(g.dtype).unsqueeze(-1)).squeeze(-1).sum_to_size(gain.shape).to(gain.dtype)
        return d_state, d_weights, d_y, d_gain


def _accumulate(state: Tensor, weights: Tensor, wide: torch.dtype) -> Tensor:
    weights = weights.to(wide)
    shape = (*state.shape[:-2], weights.shape[-2], state.shape[-1])
    total = torch.zeros(shape, dtype=wide, device=state.device)
    for i in range(state.shape[-2]):
        total.addcmul_(state[..., i : i + 1, :], weights[..., i, None])
    return total


def _result(state: Tensor, y: Tensor | None) -> torch.dtype:
    return state.dtype if y is None else torch.promote_types(state.dtype, y.dtype)


def stream_mean(state: Tensor) -> Tensor:
    """The mean of the streams (..., D); equal streams give exactly that stream, whatever their number."""
    x = widen(state)
    base = x[..., 0, :]
    return (base + (x - base.unsqueeze(-2)).mean(-2)).to(state.dtype)


def stream_sum(state: Tensor) -> Tensor:
    """The sum of the streams (..., D)."""
    return state.sum(-2, dtype=routing_dtype(state.dtype)).to(state.dtype)


@full_precision
def stream_logits_reference(
    state: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float
) -> Tensor:
    """`stream_logits` as one reads it."""
    x = widen(state)
    weight, bias = (None if t is None else widen(t) for t in (weight, bias))
    if norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    elif norm == "rms":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        x = x if weight is None else x * weight
    return x @ widen(projection)


def stream_logits(
    state: Tensor, projection: Tensor, weight: Tensor | None, bias: Tensor | None, *, norm: str, eps: float
) -> Tensor:
    """Each stream normalised over its channels, then projected; the same projection for all streams.

    Args:
        state: (..., N, D).
        projection: (D, P).
        weight: (D,) the norm's scale, or None.
        bias: (D,) the layer norm's shift, or None.
        norm: layer, rms or none.
        eps: inside the norm's root.

    Returns:
        (..., N, P) in float32 at least.
    """
    return _recomputed(partial(stream_logits_reference, norm=norm, eps=eps), state, projection, weight, bias)


@full_precision
def sinkhorn_reference(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    """`sinkhorn` as one reads it; the first softmax is the exponential and the first division in one."""
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
    if first not in (-1, -2):
        raise ValueError(f"first must be the axis -1 or -2, got {first}")
    return _recomputed(partial(sinkhorn_reference, iterations=iterations, eps=eps, first=first), logits)


def _recomputed(fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """`fn(*tensors)`, saving only the tensors: what is inside is computed again in the backward pass."""
    if torch.compiler.is_compiling():
        return fn(*tensors)
    return _Recomputed.apply(fn, *tensors)  # type: ignore[no-any-return]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
        ctx.fn = fn
        ctx.save_for_backward(*tensors)
        return fn(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad[1:]
        leaves: list[Tensor | None] = [
            None if t is None else t.detach().requires_grad_(need)
            for t, need in zip(ctx.saved_tensors, needs, strict=True)
        ]
        with torch.enable_grad():
            out = ctx.fn(*leaves)
        wanted = [leaf for leaf, need in zip(leaves, needs, strict=True) if leaf is not None and need]
        found = iter(torch.autograd.grad(out, wanted, grad))
        return None, *(next(found) if need else None for need in needs)
