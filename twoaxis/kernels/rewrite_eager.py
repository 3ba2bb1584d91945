"""Forms of the rewrite and of the read of value channels in calls of PyTorch, with their own backward.

With s = σ(gate), r = (|h|² + k_eps²)^(-1/2), p = X h and e = v - r p the rewrite is

    X⁺ = X + a ⊗ h,      a = 2 s r e (..., V)

two dot products and one pass over the state. Its backward needs one more product with the gradient of X⁺ and one pass
each for the gradients of X and h; what is saved besides the inputs is a handful of numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import routing_dtype, widen
from twoaxis.kernels.rewrite import delta_rewrite, read_channels
from twoaxis.kernels.streams_eager import combined, dots


def _one_channel(state: Tensor, *_: Tensor, **__: Any) -> bool:
    return state.shape[-2] == 1


@delta_rewrite.form("vector", serves=_one_channel)
def _rewrite_vector(
    state: Tensor,
    h: Tensor,
    gate: Tensor,
    value: Tensor,
    *,
    k_eps: float,
    bound: float | None = None,
    erase: bool = True,
) -> tuple[Tensor, tuple[()]]:
    """A state of one channel without gradients in the fewest calls, which are what a token at a time costs."""
    dtype = state.dtype
    wide = routing_dtype(dtype)
    x, gate = state.squeeze(-2), gate.unsqueeze(-1)
    if not (wide == dtype == h.dtype == gate.dtype == value.dtype):
        x, h, gate, value = x.to(wide), h.to(wide), gate.to(wide), value.to(wide)
    u = value if bound is None else torch.sigmoid(value)
    r = (h * h).sum(-1, keepdim=True).add_(k_eps**2).rsqrt_()
    e = _error(u, r, (x * h).sum(-1, keepdim=True) if erase else None, bound)
    after = torch.addcmul(x, torch.sigmoid(gate).mul_(r).mul_(e), h, value=2.0).unsqueeze(-2)
    return after if after.dtype == dtype else after.to(dtype), ()


@delta_rewrite.form("eager")
def _rewrite(
    state: Tensor,
    h: Tensor,
    gate: Tensor,
    value: Tensor,
    *,
    k_eps: float,
    bound: float | None = None,
    erase: bool = True,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Saves s and r (..., 1), u = σ(value) or the value (..., V) and, erasing, p (..., V)."""
    x = widen(state)
    y, gate, u = (t if t.dtype == x.dtype else t.to(x.dtype) for t in (h, gate, value))
    s = torch.sigmoid(gate).unsqueeze(-1)
    u = u if bound is None else torch.sigmoid(u)
    r = (y * y).sum(-1, keepdim=True).add_(k_eps**2).rsqrt_()
    p = _dots(x, y) if erase else None
    a = s * r * _error(u, r, p, bound)
    after = torch.addcmul(x, a.unsqueeze(-1), y.unsqueeze(-2), value=2.0)  # β = 2 s
    return after if after.dtype == state.dtype else after.to(state.dtype), (s, r, u, p)


@delta_rewrite.backward("eager")
def _rewrite_backward(
    inputs: Given,
    saved: Given,
    grads: Given,
    needs: Given,
    *,
    k_eps: float,
    bound: float | None = None,
    erase: bool = True,
) -> Grads:
    """With G the gradient of X⁺:

    d_a = G h       d_e = 2 s r d_a       d_p = -r d_e       d_s = 2 r <d_a, e>       d_r = 2 s <d_a, e> - <d_e, p>
    d_X = G + d_p ⊗ h                     d_h = Gᵀ a + Xᵀ d_p - r³ d_r h
    d_gate = s (1 - s) d_s                d_value = d_e,  or  bound u (1 - u) d_e
    """
    (state, h, _, _), (s, r, u, p), g = inputs, saved, widen(grads[0])
    x, y, e = state.to(g.dtype), h.to(g.dtype), _error(u, r, p, bound)
    d_a = _dots(g, y)  # (..., V)
    d_e = d_a * (2.0 * s * r)
    d_p = -r * d_e if erase else None
    along = 2.0 * (d_a * e).sum(-1, keepdim=True)
    d_state = d_h = d_gate = d_value = None
    if needs[0]:
        d_state = g if d_p is None else torch.addcmul(g, d_p.unsqueeze(-1), y.unsqueeze(-2))
    if needs[1]:
        d_r = along * s if p is None else along * s - (d_e * p).sum(-1, keepdim=True)
        d_h = _combined(2.0 * s * r * e, g).addcmul_(y, r.pow(3) * d_r, value=-1.0)
        d_h = d_h if d_p is None else d_h.add_(_combined(d_p, x))
    if needs[2]:
        d_gate = (along * r * s * (1.0 - s)).squeeze(-1)
    if needs[3]:
        d_value = d_e if bound is None else d_e * u * (1.0 - u) * bound
    return d_state, d_h, d_gate, d_value


def _error(u: Tensor, r: Tensor, p: Tensor | None, bound: float | None) -> Tensor:
    """e (..., V): v - r p, or v where nothing is erased."""
    v = u if bound is None else u * bound
    return v if p is None else torch.addcmul(v, r, p, value=-1.0)


def _dots(rows: Tensor, y: Tensor) -> Tensor:
    """(..., V) the dot products of (..., V, D) with (..., D)."""
    return (rows.squeeze(-2) * y).sum(-1, keepdim=True) if rows.shape[-2] == 1 else dots(rows, y)


def _combined(weights: Tensor, rows: Tensor) -> Tensor:
    """A new (..., D): the sum over (..., V, D) with (..., V)."""
    if rows.shape[-2] == 1:
        return rows.squeeze(-2) * weights
    return combined(weights, rows)


@read_channels.form("eager")
def _read(state: Tensor, weight: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    x, weight = widen(state), weight.to(routing_dtype(state.dtype))
    total = x[..., 0, :] * weight[0]
    for m in range(1, len(weight)):
        total.addcmul_(x[..., m, :], weight[m])
    return (total.to(state.dtype), state), ()


@read_channels.backward("eager")
def _read_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_X[m] = (what the state that was handed on gets)[m] + weight[m] ⊙ g,   d_weight[m] = Σ_tokens X[m] ⊙ g."""
    (state, weight), (grad, passed) = inputs, grads
    if grad is None:
        return passed, None
    g, w = widen(grad).unsqueeze(-2), weight.to(routing_dtype(grad.dtype))
    d_state = d_weight = None
    if needs[0]:
        d_state = g * w if passed is None else torch.addcmul(widen(passed), g, w)
    if needs[1]:
        d_weight = (state.to(g.dtype) * g).sum_to_size(weight.shape)
    return d_state, d_weight
