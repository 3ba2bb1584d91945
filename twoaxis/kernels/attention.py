"""Causal attention along an ordered axis, over a window of positions or all of them.

    out_i = Σ_j w_ij v_j       w_i = softmax_j( q_i · k_j · scale + bias_ij ),  with the sink's logit beside them
    j in sight of i:           0 <= i - j < window   and   i - j <= reach_i

A position that a query does not see has no part in its output, whatever it holds: a key or a value that is no number
spoils the queries that see it and no others. Torch's own kernels, which take the full prefix without a mask, multiply
values by weights of zero: there one that is no number spoils earlier queries too.

The forms, in the order in which they are tried:

    flex      GPUs: a fused kernel that visits the tiles of a mask                                 attention_fused.py
    flash     the full prefix without a mask: torch's fused kernel, on CPUs with its own backward  attention_fused.py
    sdpa      the same through `scaled_dot_product_attention`, on other devices and for compilers  attention_fused.py
    tiles     windows on a CPU: time and memory linear in the axis                                 attention_band.py
    blocked   everything, on every device: queries in chunks, memory linear in the axis            attention_blocked.py

Axis letters: N queries, which are the last of M keys; H query heads, Hkv key heads, G = H / Hkv query heads for each; D
head width; w window; R rows, which are the leading dimensions and the key heads in one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import routing_dtype


@operator
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Causal attention of the last N of M positions.

    Args:
        q: (..., H, N, D).
        k: (..., Hkv, M, D), where Hkv divides H.
        v: (..., Hkv, M, Dv).
        bias: broadcastable to (..., H, N, M), added to the logits.
        sink: (H,) a logit per head that joins the softmax and carries no value.
        reach: integers, broadcastable to (..., N): how many earlier positions each query may see at most.
        window: how many positions are visible, the current one included; None is all of them.
        scale: of the logits.

    Returns:
        (..., H, N, Dv) in q's dtype.
    """
    wide, n, by_key_head = routing_dtype(q.dtype), q.shape[-2], (k.shape[-3], q.shape[-3] // k.shape[-3])
    keys, values = unspoilt(k.to(wide), v.to(wide))
    q_g = q.to(wide).unflatten(-3, by_key_head).flatten(-3, -2)  # (..., Hkv, G*N, D)
    logits = (q_g @ keys.mT * scale).unflatten(-2, (by_key_head[1], n)).flatten(-4, -3)  # (..., H, N, M)
    if bias is not None:
        logits = logits + bias.to(wide)
    lag = lags(n, k.shape[-2], q.device)
    logits = logits.masked_fill(~in_sight(lag, window, None if reach is None else reach[..., None, :, None]), -math.inf)
    weights, _ = sink_softmax(logits, None if sink is None else sink[:, None, None])
    weights = weights.unflatten(-3, by_key_head).flatten(-3, -2)  # (..., Hkv, G*N, M)
    return (weights @ values).unflatten(-2, (by_key_head[1], n)).flatten(-4, -3).to(q.dtype)


def lags(n: int, m: int, device: torch.device) -> Tensor:
    """(N, M): how far before its query each key stands; the queries are the last of the keys. Negative is after."""
    return torch.arange(m - n, m, device=device)[:, None] - torch.arange(m, device=device)


def in_sight(lag: Tensor, window: int | None, reach: Tensor | None) -> Tensor:
    """Which keys a query sees; `reach` has the query's dimension before the last."""
    seen = lag >= 0
    if window is not None:
        seen = seen & (lag < window)
    return seen if reach is None else seen & (lag <= reach)


def sink_softmax(logits: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Softmax over the last dimension, and the share (..., 1) that a sink takes of it.

    The share is a weight of its own, never one less the others: a small one would be lost in their rounding.
    """
    if sink is None:
        return logits.softmax(-1), None
    column = sink.to(logits.dtype).expand(*logits.shape[:-1], 1)
    weights = torch.cat([logits, column], dim=-1).softmax(-1)
    return weights[..., :-1], weights[..., -1:]


def softmax_gradient(d_weights: Tensor, weights: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Grads of the logits and, (..., 1), of the sink. With m = Σ_j w_j d_j, and d of the sink's value zero:

    d_logits = w (d - m)          d_sink = -share m
    """
    if share is None:
        return torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype), None
    mean = (weights * d_weights).sum(-1, keepdim=True)
    return (d_weights - mean) * weights, -share * mean


def unspoilt(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values for products in which what is not seen has the weight zero.

    Zero times what is no number is no number, so a value that is none becomes zero and its key says so instead: logits
    are masked by choice, and the key spoils the queries that see it alone.
    """
    if device_of(v) == "cpu" and not torch.compiler.is_compiling() and finite(v):
        return k, v
    spoilt = ~v.isfinite().all(-1, keepdim=True)
    return k.masked_fill(spoilt, math.nan), v.masked_fill(spoilt, 0.0)


def finite(t: Tensor) -> bool:
    """Whether all numbers are finite, at the price of one sum; False too where the sum alone is not.

    Meta tensors pay the same and are taken to be finite.
    """
    if torch._C._are_functorch_transforms_active():
        return False
    total = t.detach().sum()
    return total.is_meta or math.isfinite(total)
