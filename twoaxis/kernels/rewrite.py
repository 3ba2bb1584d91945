"""The gated rank-one rewrite of a state of V value channels, (..., V, D).

    k = h / sqrt(|h|² + k_eps²)      β = 2 σ(gate)      v = bound σ(value)  or  value
    X⁺ = X + β (v - X k) ⊗ k                            erase=False: without X k

Channels lie side by side along D, so that every operation runs over rows of D numbers. The eager form has, with
s = σ(gate), r = (|h|² + k_eps²)^(-1/2), p = X h and e = v - r p,

    X⁺ = X + a ⊗ h,      a = 2 s r e (..., V)

two dot products and one pass over the state. Its backward needs one more product with the gradient of X⁺ and one pass
each for the gradients of X and h; what is saved besides the inputs is a handful of numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.operator import Given, Grads, operator
from twoaxis.kernels.precision import cast, routing_dtype, widen
from twoaxis.kernels.streams import combined, dots

LEAST_EPS = 1e-12
"""Of the direction's length: the cube of one over it, in the gradient of a zero direction, is finite in float32."""


@operator
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
        k_eps: in the direction's length; a direction of zero writes nothing.
        bound: of the values where `value` is their logits: v = bound σ(value).
        erase: whether what is there along k is taken away; False writes on top of it.

    Returns:
        X⁺ (..., V, D) in the state's dtype.
    """
    wide = routing_dtype(state.dtype)
    x, h, beta, v = state.to(wide), h.to(wide), 2.0 * torch.sigmoid(gate.to(wide)), value.to(wide)
    v = v if bound is None else bound * torch.sigmoid(v)
    k = h * torch.rsqrt(h.square().sum(-1, keepdim=True) + k_eps**2)
    if erase:
        v = v - (x * k.unsqueeze(-2)).sum(-1)
    return (x + v.unsqueeze(-1) * (beta.unsqueeze(-1) * k).unsqueeze(-2)).to(state.dtype)


@delta_rewrite.check
def _(*_: Tensor, k_eps: float, **__: Any) -> None:
    if k_eps < LEAST_EPS:
        raise ValueError(f"k_eps={k_eps}: a direction of zero has no length to divide by, give at least {LEAST_EPS}")


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
    y, u = cast(h, x.dtype), cast(value, x.dtype)
    s = torch.sigmoid(cast(gate, x.dtype)).unsqueeze(-1)
    u = u if bound is None else torch.sigmoid(u)
    r = (y * y).sum(-1, keepdim=True).add_(k_eps**2).rsqrt_()
    p = dots(x, y) if erase else None
    a = s * r * _error(u, r, p, bound)
    after = torch.addcmul(x, a.unsqueeze(-1), y.unsqueeze(-2), value=2.0)  # β = 2 s
    return cast(after, state.dtype), (s, r, u, p)


@delta_rewrite.backward("eager")
def _rewrite_backward(
    inputs: Given, saved: Given, grads: Given, needs: Given, *, k_eps: float, bound: Any = None, erase: bool = True
) -> Grads:
    """With G the gradient of X⁺:

    d_a = G h       d_e = 2 s r d_a       d_p = -r d_e       d_s = 2 r <d_a, e>       d_r = 2 s <d_a, e> - <d_e, p>
    d_X = G + d_p ⊗ h                     d_h = Gᵀ a + Xᵀ d_p - r³ d_r h
    d_gate = s (1 - s) d_s                d_value = d_e,  or  bound u (1 - u) d_e
    """
    (state, h, _, _), (s, r, u, p), g = inputs, saved, widen(grads[0])
    x, y, e = state.to(g.dtype), h.to(g.dtype), _error(u, r, p, bound)
    d_a = dots(g, y)  # (..., V)
    d_e = d_a * (2.0 * s * r)
    d_p = -r * d_e if erase else None
    along = 2.0 * (d_a * e).sum(-1, keepdim=True)
    d_state = d_h = d_gate = d_value = None
    if needs[0]:
        d_state = g if d_p is None else torch.addcmul(g, d_p.unsqueeze(-1), y.unsqueeze(-2))
    if needs[1]:
        d_r = along * s if p is None else along * s - (d_e * p).sum(-1, keepdim=True)
        d_h = combined((2.0 * s * r * e).unsqueeze(-1), g).addcmul_(y, r.pow(3) * d_r, value=-1.0)
        d_h = d_h if d_p is None else d_h.add_(combined(d_p.unsqueeze(-1), x))
    if needs[2]:
        d_gate = (along * r * s * (1.0 - s)).squeeze(-1)
    if needs[3]:
        d_value = d_e if bound is None else d_e * u * (1.0 - u) * bound
    return d_state, d_h, d_gate, d_value


def _error(u: Tensor, r: Tensor, p: Tensor | None, bound: float | None) -> Tensor:
    """e (..., V): v - r p, or v where nothing is erased."""
    v = u if bound is None else u * bound
    return v if p is None else torch.addcmul(v, r, p, value=-1.0)
