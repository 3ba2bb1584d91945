"""The gated rank-one rewrite of a state of V value channels, (..., V, D), and the read of such a state.

    delta_rewrite    k = h / sqrt(|h|² + k_eps²)       β = 2 σ(gate)       v = bound σ(value)  or  value
                     X⁺ = X + β (v - X k) ⊗ k                              erase=False: without X k
    read_channels    out = Σ_m weight[m] ⊙ X[m]                            and the state to go on with

Channels lie side by side along D, so that every operation runs over rows of D numbers. As in `twoaxis.kernels.streams`
a read hands the state on, so that its gradient joins that of what follows in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import routing_dtype, widen

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


@operator
def read_channels(state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over V channels with one weight per channel and column.

    Args:
        state: (..., V, D).
        weight: (V, D).

    Returns:
        (..., D) in the state's dtype, and the state to go on with.
    """
    return (widen(state) * weight.to(routing_dtype(state.dtype))).sum(-2).to(state.dtype), state
