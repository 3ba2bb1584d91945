"""Operations on a state of N parallel streams, (..., N, D): routing logits, reading, mixing, means.

    stream_logits    rows @ norm(state_i)                               one set of logits per stream
    read_streams     out   = Σ_i weights[i] state_i                     read of hyper-connections
    mix_streams      out_w = Σ_i weights[w,i] state_i + gain_w y        mix and write of hyper-connections
    stream_mean      state_0 + mean(state - state_0)                    exact where the streams are equal

The logits and the read hand the state on: they return it beside their result, and what follows uses that one. The
numbers are the same; the gradient then passes through the operations one after another, each adding its part to what
it is given, and the state's gradient is never collected from several full-size pieces.

Mixing is a sum of products. Where float32 matrix products are allowed to run in TF32 or bfloat16, a product with the
identity would round the residual stream at every site: a matrix product serves only where it is exact
(`exact_products`). Sums run in float32 at least and are cast once at the end.

Each operation has its readable form (`*_reference`, plain differentiable torch) and a form with its own backward, which
saves references to the state and small weights: no widened or normalised copy of the state. Under `torch.compile`
and `torch.func` the readable form is what runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.backward import differentiated, readable, reference_gradients
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.precision import full_precision, routing_dtype, widen

_FEW = 1 << 14
"""Most numbers in a state of a few tokens."""


def few(state: Tensor) -> bool:
    """Whether a state is so small, a few tokens, that the time goes into calls and not into numbers."""
    return state.numel() <= _FEW


def exact_products(x: Tensor) -> bool:
    """Whether a matrix product of wide tensors where `x` lives multiplies its numbers as they are."""
    if x.dtype == torch.float64:
        return True
    setting = torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]
    return device_of(x) == "cpu" and setting not in ("tf32", "bf16")


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """(..., W, K) or shared (W, K), times (..., K, D); one call whatever the leading dimensions."""
    if few(b):
        return a @ b
    lead = b.shape[:-2]
    a = a.expand(*lead, *a.shape[-2:]).reshape(-1, *a.shape[-2:])
    # a small factor that is not laid out by rows, or a large one of copies, makes the product run token by token
    a, b = a if a.stride(-1) == 1 else a.contiguous(), spread(b)
    return torch.bmm(a, b.reshape(-1, *b.shape[-2:])).view(*lead, a.shape[-2], b.shape[-1])


def spread(x: Tensor) -> Tensor:
    """`x` with numbers of its own where its last dimensions are copies of fewer, as equal streams are at the start."""
    return x.contiguous() if 0 in x.stride()[-2:] and not few(x) else x


def row_products(rows: Tensor, x: Tensor) -> Tensor:
    """(..., N) the dot products of (..., N, D) with one (..., D) per token."""
    return batched_product(x.unsqueeze(-2), rows.mT).squeeze(-2)


# Mixing.


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
    if readable():
        return mix_streams_reference(state, weights, y, gain)
    if not differentiated(state, weights, y, gain):
        return _mixed(state, weights, y, gain)
    return _MixStreams.apply(state, weights, y, gain)  # type: ignore[no-any-return]


class _MixStreams(torch.autograd.Function):
    """The state and y are saved by reference."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, weights: Tensor, y: Tensor | None, gain: Tensor | None) -> Tensor:
        ctx.save_for_backward(state, weights, y, gain)
        return _mixed(state, weights, y, gain)

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, weights, y, gain = ctx.saved_tensors
        needs, g = ctx.needs_input_grad, spread(widen(grad))  # the sum of the streams gives all one gradient
        if torch.is_grad_enabled():
            return reference_gradients(mix_streams_reference, (state, weights, y, gain), needs, (grad,))
        d_state = d_weights = d_y = d_gain = None
        if needs[0]:
            d_state = _sum_of_products(g, weights.mT).to(state.dtype)
        if needs[1]:
            d_weights = batched_product(g, state.to(g.dtype).mT).sum_to_size(weights.shape).to(weights.dtype)
        if y is not None and needs[2]:
            d_y = _sum_of_products(g, gain.unsqueeze(-2)).squeeze(-2).to(y.dtype)
        if y is not None and needs[3]:
            d_gain = row_products(g, y.to(g.dtype)).sum_to_size(gain.shape).to(gain.dtype)
        return d_state, d_weights, d_y, d_gain


def _mixed(state: Tensor, weights: Tensor, y: Tensor | None, gain: Tensor | None) -> Tensor:
    dtype = _result(state, y)
    total = _sum_of_products(_as(state, routing_dtype(dtype)), weights)
    if y is not None and gain is not None:
        total.addcmul_(y.unsqueeze(-2), _as(gain, total.dtype).unsqueeze(-1))
    return _as(total, dtype)


def _sum_of_products(x: Tensor, weights: Tensor) -> Tensor:
    """A new (..., W, D) from wide (..., N, D) and weights (..., W, N) or (W, N)."""
    weights = _as(weights, x.dtype)
    if few(x):
        return (weights.unsqueeze(-1) * x.unsqueeze(-3)).sum(-2)
    if exact_products(x):
        return batched_product(weights, x)
    total = x[..., :1, :] * weights[..., 0, None]
    for i in range(1, x.shape[-2]):
        total.addcmul_(x[..., i : i + 1, :], weights[..., i, None])
    return total


def _result(state: Tensor, y: Tensor | None) -> torch.dtype:
    if y is None or y.dtype == state.dtype:
        return state.dtype
    return torch.promote_types(state.dtype, y.dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, without a call where it has it."""
    return x if x.dtype == dtype else x.to(dtype)


# Reading.


def read_streams_reference(state: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`read_streams` as one reads it."""
    return mix_streams_reference(state, weights.unsqueeze(-2)).squeeze(-2), state


@full_precision
def read_streams(state: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """One weighted sum of the streams.

    Args:
        state: (..., N, D).
        weights: (..., N) per token, or (N,) shared by all tokens.

    Returns:
        (..., D) in the state's dtype, and the state to go on with.
    """
    if weights.shape[-1] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-1]} streams, the state has {state.shape[-2]}")
    if readable():
        return read_streams_reference(state, weights)
    if not differentiated(state, weights):
        return _read(state, weights), state
    return _ReadStreams.apply(state, weights)  # type: ignore[no-any-return]


class _ReadStreams(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state, weights)
        return _read(state, weights), state

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, weights = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return reference_gradients(read_streams_reference, (state, weights), needs, (grad, passed))
        if grad is None:
            return passed, None
        g, w, d_state, d_weights = widen(grad), weights.to(routing_dtype(grad.dtype)), None, None
        if needs[0]:
            parts = w.unsqueeze(-1), g.unsqueeze(-2)
            d_state = parts[0] * parts[1] if passed is None else torch.addcmul(widen(passed), *parts)
            d_state = d_state.to(state.dtype)
        if needs[1]:
            d_weights = row_products(state.to(g.dtype), g).sum_to_size(weights.shape).to(weights.dtype)
        return d_state, d_weights


def _read(state: Tensor, weights: Tensor) -> Tensor:
    x = widen(state)
    weights = _as(weights, x.dtype)
    if few(x):
        return _as((weights.unsqueeze(-1) * x).sum(-2), state.dtype)
    return _as(_sum_of_products(x, weights.unsqueeze(-2)).squeeze(-2), state.dtype)


def stream_mean(state: Tensor) -> Tensor:
    """The mean of the streams (..., D); equal streams give exactly that stream, whatever their number."""
    x = widen(state)
    base = x[..., 0, :]
    return (base + (x - base.unsqueeze(-2)).mean(-2)).to(state.dtype)


def stream_sum(state: Tensor) -> Tensor:
    """The sum of the streams (..., D)."""
    return state.sum(-2, dtype=routing_dtype(state.dtype)).to(state.dtype)


# Routing logits.


@full_precision
def stream_logits_reference(
    state: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float
) -> tuple[Tensor, Tensor]:
    """`stream_logits` as one reads it."""
    return F.linear(normalised(state, weight, bias, norm, eps), widen(rows)), state


def normalised(state: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float) -> Tensor:
    """Each stream normalised over its channels; arguments as in `stream_logits`."""
    x = widen(state)
    weight, bias = (None if t is None else widen(t) for t in (weight, bias))
    if norm == "layer":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if norm == "rms":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return x if weight is None else x * weight
    return x


@full_precision
def stream_logits(
    state: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None, *, norm: str, eps: float
) -> tuple[Tensor, Tensor]:
    """Each stream normalised over its channels, then projected; the same projection for all streams.

    The norm's scale is folded into the rows, so that the state is met by one small product and its own statistics.

    Args:
        state: (..., D), the streams among the leading dimensions.
        rows: (P, D) one row per logit.
        weight: (D,) the norm's scale, or None.
        bias: (D,) the layer norm's shift, or None.
        norm: layer, rms or none.
        eps: inside the norm's root.

    Returns:
        (..., P) in float32 at least, and the state to go on with.
    """
    if readable():
        return stream_logits_reference(state, rows, weight, bias, norm, eps)
    if not differentiated(state, rows, weight, bias):
        if norm != "rms":
            return stream_logits_reference(state, rows, weight, bias, norm, eps)
        # without gradients folding the scale into the rows would cost a few tokens more than it saves
        x = widen(state)
        t = F.linear(x if weight is None else x * widen(weight), widen(rows))
        return t.mul_(_inverse_rms(x, eps)), state
    return _StreamLogits.apply(state, rows, weight, bias, norm, eps)  # type: ignore[no-any-return]


class _StreamLogits(torch.autograd.Function):
    """Saves the state by reference and one or two numbers per row of it.

    With x̂ = (x - mean) r, folded rows R and t = R x̂:

        dx = r (Rᵀ dt) - r² (dt·t) / D (x - mean) - r (dt·Σ_d R) / D        mean and the last term: layer norm only
    """

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, rows: Tensor, weight: Tensor | None, bias: Tensor | None, norm: str, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x, folded = widen(state), _fold(rows, weight)
        mean = inverse = None
        if norm == "layer":
            mean = x.mean(-1, keepdim=True)
            x = x - mean  # a mean square less a squared mean would cancel where the mean is large
        t = F.linear(x, folded)
        if norm != "none":
            inverse = _inverse_rms(x, eps)
            t *= inverse
        ctx.save_for_backward(state, rows, weight, bias, mean, inverse, t)
        ctx.norm, ctx.eps = norm, eps
        return (t.clone() if bias is None else t + widen(rows) @ widen(bias)), state

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad  # once: checkpointing gives them out a single time
        state, rows, weight, bias, mean, inverse, _ = saved
        if torch.is_grad_enabled():
            reference = partial(stream_logits_reference, norm=ctx.norm, eps=ctx.eps)
            found = reference_gradients(reference, (state, rows, weight, bias), needs[:4], (grad, passed))
            return *found, None, None
        if grad is None:
            return passed, *[None] * 5
        scaled = grad if inverse is None else grad * inverse  # (..., P)
        d_state = _logits_to_state(saved, grad, scaled, passed) if needs[0] else None
        d_rows = d_weight = d_bias = None
        if needs[1] or needs[2] or needs[3]:
            flat = scaled.reshape(-1, len(rows))
            d_folded = flat.mT @ widen(state).reshape(-1, state.shape[-1])  # (P, D)
            if mean is not None:
                d_folded -= flat.mT @ mean.reshape(-1, 1)
            d_rows = d_folded if weight is None else d_folded * widen(weight)
            if weight is not None:
                d_weight = (d_folded * widen(rows)).sum(0).to(weight.dtype)
            if bias is not None:
                total = grad.reshape(-1, len(rows)).sum(0)
                d_rows = torch.addcmul(d_rows, total.unsqueeze(-1), widen(bias))
                d_bias = (total @ widen(rows)).to(bias.dtype)
            d_rows = d_rows.to(rows.dtype)
        return d_state, d_rows, d_weight, d_bias, None, None


def _logits_to_state(saved: tuple[Any, ...], grad: Tensor, scaled: Tensor, passed: Tensor | None) -> Tensor:
    """The gradient of the state: what is passed on, plus what the logits pull."""
    state, rows, weight, _, mean, inverse, t = saved
    folded, width = _fold(rows, weight), state.shape[-1]
    if inverse is None:
        found = F.linear(grad, folded.mT)
        return (found if passed is None else found.add_(passed)).to(state.dtype)
    pull = inverse.square() * (grad * t).sum(-1, keepdim=True) / -width
    if mean is not None:
        # one more column for what is the same in every channel
        same = torch.addcmul(scaled @ folded.sum(-1, keepdim=True) / -width, mean, pull, value=-1)
        scaled, folded = torch.cat([scaled, same], -1), torch.cat([folded, folded.new_ones(1, width)])
    x = widen(state)
    found = x * pull if passed is None else torch.addcmul(widen(passed), x, pull)
    if not found.is_contiguous():  # a state of copies at the start
        found = found.contiguous()
    found.view(-1, width).addmm_(scaled.reshape(-1, len(folded)), folded)
    return found.to(state.dtype)


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(..., 1) one over the root mean square."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _fold(rows: Tensor, weight: Tensor | None) -> Tensor:
    """The rows with the norm's scale, laid out by rows; (P, D)."""
    folded = widen(rows) if weight is None else widen(rows) * widen(weight)
    return folded.contiguous()
