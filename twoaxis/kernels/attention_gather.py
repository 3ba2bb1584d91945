"""Attention over a short window for a compiler: one multiply-add per query and visible key, which it fuses.

Reads only, in the backward too: autograd's own backward of overlapping views scatters with atomics.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.attention import attention, band_pays, banded, sink_softmax, softmax_gradient, unspoilt
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import routing_dtype

LONGEST = 16
"""The largest window for which elementwise code beats matrix products over tiles."""


def _serves(*inputs: Any, window: int | None, scale: float) -> bool:
    return window is not None and window <= LONGEST and banded(*inputs, window=window, scale=scale)


@attention.form("gather", serves=_serves, pays=band_pays, compiled=True)
def _gather(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Tensor | None, reach: Tensor | None, *, window: int, scale: float
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Saves the weights (..., Hkv, G, N, w) and the sink's share."""
    n, halo = q.shape[-2], window - 1
    blank = halo - (k.shape[-2] - n)  # slots of the first query that are before the first key
    slot = torch.arange(window, device=q.device)
    seen = torch.arange(n, device=q.device)[:, None] + slot >= blank  # (N, w)
    if reach is not None:
        seen = (seen & (halo - slot <= reach.unsqueeze(-1))).unsqueeze(-3).unsqueeze(-3)  # (..., 1, 1, N, w)
    q_g, keys, values = _slots(q, k, v, window)
    logits = ((q_g.unsqueeze(-1) * keys).sum(-2) * scale).masked_fill(~seen, -math.inf)
    weights, share = sink_softmax(logits, None if sink is None else sink.view(*q_g.shape[-4:-2], 1, 1))
    out = (weights.unsqueeze(-2) * values).sum(-1)
    return out.flatten(-4, -3).to(q.dtype), (weights, share)


@attention.backward("gather")
def _gather_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, window: int, scale: float) -> Grads:
    """As the blocked form's; the gradient of a key is the sum over the w queries that see it."""
    (q, k, v, _, sink, _), (weights, share), halo = inputs, saved, window - 1
    q_g, keys, values = _slots(q, k, v, window)
    grad = grads[0].to(q_g.dtype).unflatten(-3, q_g.shape[-4:-2])
    d_logits, pull = softmax_gradient((grad.unsqueeze(-1) * values).sum(-2), weights, share)
    d_logits = d_logits * scale
    d_q = (d_logits.unsqueeze(-2) * keys).sum(-1).flatten(-4, -3)

    def at_keys(per_query: Tensor, per_slot: Tensor) -> Tensor:
        """The sum over the queries that see a key of their weight for it times their vector."""
        vectors = _windows(F.pad(per_query, (0, 0, halo, halo)).contiguous(), window)  # (..., N + halo, D, w)
        slots = F.pad(per_slot, (0, 0, halo, halo)).contiguous()
        shape, strides = (*vectors.shape[:-2], window), (*slots.stride()[:-2], window, halo)
        skew = slots.as_strided(shape, strides, halo)  # one query on is one slot back
        found = (skew.unsqueeze(-2) * vectors).sum(-1).sum(-3)
        return found[..., found.shape[-2] - k.shape[-2] :, :]

    d_sink = None if pull is None or sink is None else pull.sum_to_size(*q_g.shape[-4:-2], 1, 1).view(sink.shape)
    return d_q, at_keys(q_g, d_logits), at_keys(grad, weights), None, d_sink, None


def _slots(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (..., Hkv, G, N, D), and the keys and values that each query sees, (..., Hkv, 1, N, D, w), all wide."""
    wide, kv_heads = routing_dtype(q.dtype), k.shape[-3]
    blank = window - 1 - (k.shape[-2] - q.shape[-2])
    padded = (
        F.pad(t, (0, 0, blank, 0)).contiguous().unsqueeze(-3) for t in unspoilt(k.to(wide), v.to(wide))
    )  # (..., Hkv, 1, N + halo, D)
    return q.to(wide).unflatten(-3, (kv_heads, q.shape[-3] // kv_heads)), *(_windows(t, window) for t in padded)  # type: ignore[return-value]


def _windows(t: Tensor, window: int) -> Tensor:
    """(..., M, D) to (..., M - w+1, D, w), a view. Of `unfold`, the same view, a compiler saves a copy w times as large
    for the backward pass; a view of strides it makes again."""
    *lead, count, width = t.shape
    return t.as_strided((*lead, count - window + 1, width, window), (*t.stride(), t.stride(-2)))
