"""Operations on a state of N parallel streams, (..., N, D): routing logits, reading, mixing, means.

    stream_logits    rows @ norm(state)                                 one set of logits per vector of the state
    read_streams     out   = Σ_i weights[i] state_i                     read of hyper-connections
    mix_streams      out_w = Σ_i weights[w,i] state_i + gain_w y        mix and write of hyper-connections
    stream_mean      state_0 + mean(state - state_0)                    exact where the streams are equal

The logits and the read hand the state on: they return it beside their result, and what follows uses that one. The
numbers are the same; the gradient then passes through the operations one after another, each adding its part to what
it is given, and the state's gradient is never collected from several full-size pieces.

Sums run in float32 at least and are cast once at the end.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import product, routing_dtype, widen

LEAST_EPS = 1e-24
"""Of a norm: the cube of one over its root, in the gradient of a vector of zeros, is finite in float32."""


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
    if norm == "layer":
        x = F.layer_norm(x, x.shape[-1:], eps=eps)
    elif norm == "rms":
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return product(x, rows.to(x.dtype).mT), state


@operator
def read_streams(state: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """One weighted sum of the streams.

    Args:
        state: (..., N, D).
        weights: (..., N) per token, or (N,) shared by all tokens.

    Returns:
        (..., D) in the state's dtype, and the state to go on with.
    """
    x = widen(state)
    return (weights.to(x.dtype).unsqueeze(-1) * x).sum(-2).to(state.dtype), state


@read_streams.check
def _(state: Tensor, weights: Tensor) -> None:
    if weights.shape[-1] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-1]} streams, the state has {state.shape[-2]}")


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
    dtype = mixed_dtype(state, y)
    x = state.to(routing_dtype(dtype))
    weights = None if weights is None else weights.to(x.dtype)
    if weights is not None and weights.dim() == 1:
        x = weights.unsqueeze(-1) * x
    elif weights is not None:  # a sum of products, which a compiler fuses; a matrix product it leaves to itself
        terms = [weights[..., i, None] * x[..., i : i + 1, :] for i in range(x.shape[-2])]
        x = sum(terms[1:], terms[0])
    if y is not None and gain is not None:
        x = x + gain.to(x.dtype).unsqueeze(-1) * y.to(x.dtype).unsqueeze(-2)
    return x.to(dtype)


@mix_streams.check
def _(state: Tensor, weights: Tensor | None = None, y: Tensor | None = None, gain: Tensor | None = None) -> None:
    if weights is not None and weights.shape[-1] != state.shape[-2]:
        raise ValueError(f"weights for {weights.shape[-1]} streams, the state has {state.shape[-2]}")
    if (y is None) != (gain is None):
        raise ValueError("give y and gain together")


def mixed_dtype(state: Tensor, y: Tensor | None) -> torch.dtype:
    """The dtype that adding `y` to the state would give."""
    if y is None or y.dtype == state.dtype:
        return state.dtype
    return torch.promote_types(state.dtype, y.dtype)


@operator
def stream_mean(state: Tensor) -> Tensor:
    """The mean of the streams (..., D); equal streams give exactly that stream, whatever their number."""
    if state.shape[-2] == 1:
        return state.squeeze(-2)
    x = widen(state)
    base = x[..., 0, :]
    return (base + (x - base.unsqueeze(-2)).mean(-2)).to(state.dtype)
