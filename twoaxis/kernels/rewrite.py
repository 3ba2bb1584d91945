"""The gated rank-one rewrite of a state of V value channels, (..., V, D), and the read of such a state.

    delta_rewrite    k = h / sqrt(|h|² + k_eps²)       β = 2 σ(gate)       v = bound σ(value)  or  value
                     X⁺ = X + β (v - X k) ⊗ k                              erase=False: without X k
    read_channels    out = Σ_m weight[m] ⊙ X[m]                            and the state to go on with

Channels lie side by side along D, so that every operation runs over rows of D numbers. The rewrite is, with
r = (|h|² + k_eps²)^(-1/2), p = X h and e = v - r p,

    X⁺ = X + a ⊗ h,      a = β r e (..., V)

two dot products and one pass over the state. Its backward needs g h, with g the gradient of X⁺, and one pass each for
the gradients of X and h; what is saved besides references to X and h is a handful of numbers per token.

Each operation has its readable form (`*_reference`), which is what runs under `torch.compile` and `torch.func`. As in
`twoaxis.kernels.streams` a read hands the state on, so that its gradient joins that of what follows in one pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.backward import differentiated, readable, reference_gradients
from twoaxis.kernels.precision import full_precision, routing_dtype, widen
from twoaxis.kernels.streams import batched_product, row_products


def delta_rewrite_reference(
    state: Tensor,
    h: Tensor,
    gate: Tensor,
    value: Tensor,
    k_eps: float,
    bound: float | None = None,
    erase: bool = True,
) -> Tensor:
    """`delta_rewrite` as one reads it."""
    wide = routing_dtype(state.dtype)
    x, h, beta, v = state.to(wide), h.to(wide), 2.0 * torch.sigmoid(gate.to(wide)), value.to(wide)
    v = v if bound is None else bound * torch.sigmoid(v)
    k = h * torch.rsqrt(h.square().sum(-1, keepdim=True) + k_eps**2)
    if erase:
        v = v - (x * k.unsqueeze(-2)).sum(-1)
    return (x + v.unsqueeze(-1) * (beta.unsqueeze(-1) * k).unsqueeze(-2)).to(state.dtype)


@full_precision
def delta_rewrite(
    state: Tensor,
    h: Tensor,
    gate: Tensor,
    value: Tensor,
    *,
    k_eps: float,
    bound: float | None = None,
    erase: bool = True,
) -> Tensor:
    """Overwrite what the state holds along a direction.

    Args:
        state: X (..., V, D).
        h: (..., D) the direction before its normalisation.
        gate: (...) logits of the gate β, which lies between 0 and 2.
        value: (..., V) what to write, or its logits.
        k_eps: in the direction's length.
        bound: of the values where `value` is their logits: v = bound σ(value).
        erase: whether what is there along k is taken away; False writes on top of it.

    Returns:
        X⁺ (..., V, D) in the state's dtype.
    """
    if readable():
        return delta_rewrite_reference(state, h, gate, value, k_eps, bound, erase)
    if not differentiated(state, h, gate, value):
        return _rewritten(state, h, gate, value, k_eps, bound, erase)[0]
    return _DeltaRewrite.apply(state, h, gate, value, k_eps, bound, erase)  # type: ignore[no-any-return]


@full_precision
def rewritten_vector(
    x: Tensor, h: Tensor, gate: Tensor, value: Tensor, *, k_eps: float, bound: float | None, erase: bool
) -> Tensor:
    """`delta_rewrite` of a state of one channel, (..., D), without gradients; gate and value are (..., 1).

    The same numbers in the fewest calls: for a token at a time they are what counts.
    """
    dtype = x.dtype
    wide = routing_dtype(dtype)
    if not (wide == dtype == h.dtype == gate.dtype == value.dtype):
        x, h, gate, value = x.to(wide), h.to(wide), gate.to(wide), value.to(wide)
    u = value if bound is None else torch.sigmoid(value)
    r = (h * h).sum(-1, keepdim=True).add_(k_eps**2).rsqrt_()
    e = _error(u, r, (x * h).sum(-1, keepdim=True) if erase else None, bound)
    after = torch.addcmul(x, torch.sigmoid(gate).mul_(r).mul_(e), h, value=2.0)
    return after if after.dtype == dtype else after.to(dtype)


def _rewritten(
    state: Tensor, h: Tensor, gate: Tensor, value: Tensor, k_eps: float, bound: float | None, erase: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """X⁺ and what the backward saves: σ(gate) and r (..., 1), u = σ(value) or the value and, erasing, p (..., V)."""
    x = widen(state)
    y, gate, u = (t if t.dtype == x.dtype else t.to(x.dtype) for t in (h, gate, value))
    half = torch.sigmoid(gate).unsqueeze(-1)
    u = u if bound is None else torch.sigmoid(u)
    r = (y * y).sum(-1, keepdim=True).add_(k_eps**2).rsqrt_()
    p = _dots(x, y) if erase else None
    a = half * r * _error(u, r, p, bound)
    after = torch.addcmul(x, a.unsqueeze(-1), y.unsqueeze(-2), value=2.0)  # the gate's two
    return after if after.dtype == state.dtype else after.to(state.dtype), half, r, u, p


def _error(u: Tensor, r: Tensor, p: Tensor | None, bound: float | None) -> Tensor:
    """e (..., V): v - r p, or v where nothing is erased."""
    v = u if bound is None else u * bound
    return v if p is None else torch.addcmul(v, r, p, value=-1.0)


class _DeltaRewrite(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        h: Tensor,
        gate: Tensor,
        value: Tensor,
        k_eps: float,
        bound: float | None,
        erase: bool,
    ) -> Tensor:
        after, *small = _rewritten(state, h, gate, value, k_eps, bound, erase)
        ctx.save_for_backward(state, h, gate, value, *small)
        ctx.options = k_eps, bound, erase
        return after

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, h, gate, value, half, r, u, p = ctx.saved_tensors
        (k_eps, bound, erase), needs = ctx.options, ctx.needs_input_grad
        if torch.is_grad_enabled():
            reference = partial(delta_rewrite_reference, k_eps=k_eps, bound=bound, erase=erase)
            found = reference_gradients(reference, (state, h, gate, value), needs[:4], (grad,))
            return *found, None, None, None
        g = widen(grad)
        x, y, e = state.to(g.dtype), h.to(g.dtype), _error(u, r, p, bound)
        d_a = _dots(g, y)  # (..., V)
        beta_r = half * r * 2.0
        d_e = d_a * beta_r
        along = (d_a * e).sum(-1, keepdim=True) * 2.0  # of β/2, but for r
        d_p = d_e * r  # with its sign turned
        d_state = d_h = d_gate = d_value = None
        if needs[0]:
            d_state = torch.addcmul(g, d_p.unsqueeze(-1), y.unsqueeze(-2), value=-1.0) if erase else g
            d_state = d_state.to(state.dtype)
        if needs[1]:
            d_r = along * half
            if erase:
                d_r -= (d_e * p).sum(-1, keepdim=True)
            d_h = _combined(e * beta_r, g).addcmul_(y, r.pow(3) * d_r, value=-1.0)
            if erase:
                d_h -= _combined(d_p, x)
            d_h = d_h.to(h.dtype)
        if needs[2]:
            d_gate = (along * r * half * (1.0 - half)).squeeze(-1).to(gate.dtype)
        if needs[3]:
            d_value = (d_e if bound is None else d_e * u * (1.0 - u) * bound).to(value.dtype)
        return d_state, d_h, d_gate, d_value, None, None, None


def _dots(rows: Tensor, y: Tensor) -> Tensor:
    """(..., V) the dot products of (..., V, D) with (..., D)."""
    return (rows.squeeze(-2) * y).sum(-1, keepdim=True) if rows.shape[-2] == 1 else row_products(rows, y)


def _combined(weights: Tensor, rows: Tensor) -> Tensor:
    """A new (..., D): the sum over (..., V, D) with (..., V)."""
    if rows.shape[-2] == 1:
        return rows.squeeze(-2) * weights
    return batched_product(weights.unsqueeze(-2), rows).squeeze(-2)


# Reading.


def read_channels_reference(state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`read_channels` as one reads it."""
    return (widen(state) * weight.to(routing_dtype(state.dtype))).sum(-2).to(state.dtype), state


@full_precision
def read_channels(state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over V channels with one weight per channel and column.

    Args:
        state: (..., V, D).
        weight: (V, D).

    Returns:
        (..., D) in the state's dtype, and the state to go on with.
    """
    if readable():
        return read_channels_reference(state, weight)
    if not differentiated(state, weight):
        return _read_channels(state, weight), state
    return _ReadChannels.apply(state, weight)  # type: ignore[no-any-return]


class _ReadChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(state, weight)
        return _read_channels(state, weight), state

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        state, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return reference_gradients(read_channels_reference, (state, weight), ctx.needs_input_grad, (grad, passed))
        if grad is None:
            return passed, None
        g, wide = widen(grad).unsqueeze(-2), routing_dtype(grad.dtype)
        d_state = d_weight = None
        if ctx.needs_input_grad[0]:
            w = weight.to(wide)
            d_state = (g * w if passed is None else torch.addcmul(widen(passed), g, w)).to(state.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = (state.to(wide) * g).sum_to_size(weight.shape).to(weight.dtype)
        return d_state, d_weight


def _read_channels(state: Tensor, weight: Tensor) -> Tensor:
    x, weight = widen(state), weight.to(routing_dtype(state.dtype))
    total = x[..., 0, :] * weight[0]
    for m in range(1, len(weight)):
        total.addcmul_(x[..., m, :], weight[m])
    return total.to(state.dtype)
