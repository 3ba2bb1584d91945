"""Attention with queries in chunks: any device, window, documents, bias and sink, and memory linear in the axis.

A chunk of c queries needs the keys from the first one's window to its last query, so what is alive at once is one chunk
of logits. The backward computes the weights of a chunk again; only where one chunk is all are they saved.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.kernels.attention import attention, in_sight, lags, sink_softmax, softmax_gradient, unspoilt
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import routing_dtype

LOGITS = 1 << 21
"""Logits of a chunk: what stays in a core's caches between its passes, and is work enough for a call."""
SMALLEST, LARGEST = 32, 512
"""Queries of a chunk."""


class _Blocks(NamedTuple):
    """The inputs, wide, with the query heads of each key head apart."""

    q: Tensor  # (..., Hkv, G, N, D), scaled
    k: Tensor  # (..., Hkv, M, D)
    v: Tensor  # (..., Hkv, M, Dv)
    bias: Tensor | None  # broadcastable to (..., Hkv, G, N, M)
    sink: Tensor | None  # (Hkv, G, 1, 1)
    reach: Tensor | None  # broadcastable to (..., 1, 1, N, 1)
    window: int | None

    def chunks(self) -> list[tuple[slice, slice]]:
        """The queries of each chunk, and the keys that they see."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        rows, width = math.prod(self.q.shape[:-2]), m if self.window is None else min(m, self.window + LARGEST)
        # a compiler has every chunk in its graph: few of them
        smallest = LARGEST // 2 if torch.compiler.is_compiling() else SMALLEST
        size = min(LARGEST, max(smallest, LOGITS // max(1, rows * width) // 16 * 16))
        size = max(n, 1) if rows * n * m <= LOGITS else size
        before = (
            m if self.window is None else self.window - 1
        )  # keys that the first query of a chunk sees beside its own
        cuts = [slice(at, min(at + size, n)) for at in range(0, n, size)]
        return [(rows, slice(max(0, m - n + rows.start - before), m - n + rows.stop)) for rows in cuts]

    def weights(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """(..., Hkv, G, c, keys) of one chunk, and the sink's share (..., Hkv, G, c, 1)."""
        n, m = rows.stop - rows.start, keys.stop - keys.start
        logits = (_queries(self.q, rows) @ self.k[..., keys, :].mT).unflatten(-2, (self.q.shape[-3], n))
        if self.bias is not None:
            logits += _part(self.bias, rows, keys)
        reach = None if self.reach is None else _part(self.reach, rows, keys)
        logits.masked_fill_(~in_sight(lags(n, m, logits.device), self.window, reach), -math.inf)
        return sink_softmax(logits, self.sink)


def _queries(t: Tensor, rows: slice) -> Tensor:
    """(..., Hkv, G*c, D) of (..., Hkv, G, N, D)."""
    return t[..., rows, :].flatten(-3, -2)


def _part(t: Tensor, rows: slice, keys: slice) -> Tensor:
    """What a chunk sees of something broadcastable to all logits."""
    t = t if t.shape[-2] == 1 else t[..., rows, :]
    return t if t.shape[-1] == 1 else t[..., keys]


def _blocks(inputs: Given, window: int | None, scale: float) -> _Blocks:
    q, k, v, bias, sink, reach = inputs
    wide, kv_heads = routing_dtype(q.dtype), k.shape[-3]
    scaled = torch.mul(q.to(wide), scale, out=q.new_empty(q.shape, dtype=wide))  # which also lays it out
    scaled = scaled.unflatten(-3, (kv_heads, q.shape[-3] // kv_heads))
    if bias is not None:  # a dimension of heads that is broadcast stays one
        by_heads = bias.dim() > 2 and bias.shape[-3] > 1
        bias = bias.to(wide).unflatten(-3, (kv_heads, -1)) if by_heads else bias.to(wide).unsqueeze(-3)
    sink = None if sink is None else sink.to(wide).view(*scaled.shape[-4:-2], 1, 1)
    reach = None if reach is None else reach[..., None, None, :, None]
    return _Blocks(scaled, k.to(wide).contiguous(), v.to(wide).contiguous(), bias, sink, reach, window)


@attention.form("blocked", compiled=None)
def _blocked(*inputs: Any, window: int | None, scale: float) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Saves the weights and the sink's share where all queries are one chunk."""
    blocks = _blocks(inputs, window, scale)
    k, v = unspoilt(blocks.k, blocks.v)
    blocks = blocks._replace(k=k, v=v)
    (*lead, heads, n, _), chunks = inputs[0].shape, blocks.chunks()
    out = v.new_empty((*lead, n, heads, v.shape[-1]), dtype=inputs[0].dtype)
    out = out.transpose(-3, -2)  # as a projection reads it
    weights = share = None
    for rows, keys in chunks:
        weights, share = blocks.weights(rows, keys)
        part = weights.flatten(-3, -2) @ v[..., keys, :]
        out[..., rows, :] = part.view(*lead, heads, rows.stop - rows.start, v.shape[-1])
    return out, (weights, share) if len(chunks) == 1 else (None, None)


@attention.backward("blocked")
def _blocked_backward(
    inputs: Given, saved: Given, grads: Given, needs: Given, *, window: int | None, scale: float
) -> Grads:
    """With G the output's gradient and s the scaled logits, of which `softmax_gradient` gives d_s from d_w = G Vᵀ:

    d_v = wᵀ G        d_q = scale d_s k        d_k = d_sᵀ (scale q)        d_bias = d_s, summed where it is broadcast
    """
    blocks = _blocks(inputs, window, scale)
    grad = grads[0].to(blocks.q.dtype).contiguous().unflatten(-3, blocks.q.shape[-4:-2])
    found: dict[str, Tensor | None] = dict.fromkeys(blocks._fields[:6])
    sums = {name for name, need in zip(found, needs, strict=True) if need}

    def add(name: str, part: Tensor, at: slice) -> None:
        """Into the gradient of an input, which is `part` itself where it is whole."""
        whole, total = getattr(blocks, name).shape, found[name]
        if total is None and part.shape == whole:
            found[name] = part
            return
        found[name] = total = part.new_zeros(whole) if total is None else total
        total[..., at, :] += part

    for rows, keys in blocks.chunks():
        weights, share = saved if saved[0] is not None else blocks.weights(rows, keys)
        assert weights is not None
        g = _queries(grad, rows)
        if "v" in sums:
            add("v", weights.flatten(-3, -2).mT @ g, keys)
        d_weights = (g @ blocks.v[..., keys, :].mT).view(weights.shape)
        d_logits, pull = softmax_gradient(d_weights, weights, share)
        if "bias" in sums and blocks.bias is not None:
            total = found["bias"] = torch.zeros_like(blocks.bias) if found["bias"] is None else found["bias"]
            part = _part(total, rows, keys)
            part += d_logits.sum_to_size(part.shape)
        if "sink" in sums and pull is not None:
            add("sink", pull.sum_to_size(*pull.shape[-4:-2], 1, 1), slice(None))
        d_logits = d_logits.flatten(-3, -2)
        if "q" in sums:
            part = (d_logits @ blocks.k[..., keys, :]).mul_(scale)
            add("q", part.unflatten(-2, (grad.shape[-3], rows.stop - rows.start)), rows)
        if "k" in sums:
            add("k", d_logits.mT @ _queries(blocks.q, rows), keys)
    return (*(None if d is None else d.reshape(t.shape) for d, t in zip(found.values(), inputs, strict=True)),)
