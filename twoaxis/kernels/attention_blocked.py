"""Attention with queries in chunks: any device, window, documents, bias and sink, and memory linear in the axis.

A chunk of c queries needs the keys from the first one's window to its last query, so what is alive at once is one chunk
of logits. The backward computes the weights of a chunk again; only where one chunk is all are they saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """The inputs, wide, with the query heads of each key head apart.

    Attributes:
        q: (..., Hkv, G, N, D), scaled.
        k: (..., Hkv, M, D).
        v: (..., Hkv, M, Dv).
        bias: broadcastable to (..., Hkv, G, N, M), or None.
        sink: (Hkv, G, 1, 1) or None.
        reach: broadcastable to (..., 1, 1, N, 1), or None.
        window: positions visible, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink: Tensor | None
    reach: Tensor | None
    window: int | None

    def chunks(self) -> list[tuple[slice, slice]]:
        """The queries of each chunk, and the keys that they see."""
        n, m = self.q.shape[-2], self.k.shape[-2]
        rows, width = math.prod(self.q.shape[:-2]), m if self.window is None else min(m, self.window + LARGEST)
        # a compiler has every chunk in its graph: few of them
        smallest = LARGEST // 2 if torch.compiler.is_compiling() else SMALLEST
        size = min(LARGEST, max(smallest, LOGITS // max(1, rows * width) // 16 * 16))
        size = max(n, 1) if rows * n * m <= LOGITS else size
        return list(self._cut(n, m, size))

    def _cut(self, n: int, m: int, size: int) -> Iterator[tuple[slice, slice]]:
        for at in range(0, n, size):
            end, first = min(at + size, n), 0 if self.window is None else max(0, m - n + at - self.window + 1)
            yield slice(at, end), slice(first, m - n + end)

    def weights(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """(..., Hkv, G, c, keys) of one chunk, and the sink's share (..., Hkv, G, c, 1)."""
        n, m = rows.stop - rows.start, keys.stop - keys.start
        logits = (self.queries(self.q, rows) @ self.k[..., keys, :].mT).unflatten(-2, (self.q.shape[-3], n))
        if self.bias is not None:
            logits += self.part(self.bias, rows, keys)
        reach = self.reach if self.reach is None or self.reach.shape[-2] == 1 else self.reach[..., rows, :]
        logits.masked_fill_(~in_sight(lags(n, m, logits.device), self.window, reach), -math.inf)
        return sink_softmax(logits, self.sink)

    @staticmethod
    def queries(t: Tensor, rows: slice) -> Tensor:
        """(..., Hkv, G*c, D) of (..., Hkv, G, N, D)."""
        return t[..., rows, :].flatten(-3, -2)

    @staticmethod
    def part(bias: Tensor, rows: slice, keys: slice) -> Tensor:
        """What a chunk sees of a bias."""
        bias = bias if bias.shape[-2] == 1 else bias[..., rows, :]
        return bias if bias.shape[-1] == 1 else bias[..., keys]


def _heads_apart(t: Tensor, kv_heads: int) -> Tensor:
    """(..., H, N, D) as (..., Hkv, G, N, D); a dimension that is broadcast stays one."""
    return t.unflatten(-3, (kv_heads, -1)) if t.dim() > 2 and t.shape[-3] > 1 else t.unsqueeze(-3)


def _blocks(inputs: Sequence[Any], window: int | None, scale: float) -> _Blocks:
    q, k, v, bias, sink, reach = inputs
    wide, kv_heads = routing_dtype(q.dtype), k.shape[-3]
    scaled = torch.mul(q.to(wide), scale, out=q.new_empty(q.shape, dtype=wide))  # which also lays it out
    scaled = scaled.unflatten(-3, (kv_heads, q.shape[-3] // kv_heads))
    bias = None if bias is None else _heads_apart(bias.to(wide), kv_heads)
    sink = None if sink is None else sink.to(wide).view(*scaled.shape[-4:-2], 1, 1)
    reach = None if reach is None else reach[..., None, None, :, None]
    return _Blocks(scaled, k.to(wide).contiguous(), v.to(wide).contiguous(), bias, sink, reach, window)


@attention.form("blocked", compiled=None)
def _blocked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    reach: Tensor | None,
    *,
    window: int | None,
    scale: float,
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Saves the weights and the sink's share where all queries are one chunk."""
    blocks = _blocks((q, k, v, bias, sink, reach), window, scale)
    k, v = unspoilt(blocks.k, blocks.v)
    blocks = blocks._replace(k=k, v=v)
    (*lead, heads, n, _), chunks = q.shape, blocks.chunks()
    out = blocks.v.new_empty((*lead, n, heads, v.shape[-1]), dtype=q.dtype).transpose(
        -3, -2
    )  # as a projection reads it
    weights = share = None
    for rows, keys in chunks:
        weights, share = blocks.weights(rows, keys)
        part = weights.flatten(-3, -2) @ blocks.v[..., keys, :]
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
    found: dict[str, Tensor | None] = {name: None for name, _ in zip(blocks._fields, needs, strict=False)}
    sums = {name for name, need in zip(found, needs, strict=False) if need}

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
        g = blocks.queries(grad, rows)
        if "v" in sums:
            add("v", weights.flatten(-3, -2).mT @ g, keys)
        d_weights = (g @ blocks.v[..., keys, :].mT).view(weights.shape)
        d_logits, pull = softmax_gradient(d_weights, weights, share)
        if "bias" in sums and blocks.bias is not None:
            total = found["bias"] = torch.zeros_like(blocks.bias) if found["bias"] is None else found["bias"]
            part = blocks.part(total, rows, keys)
            part += d_logits.sum_to_size(part.shape)
        if "sink" in sums and pull is not None:
            pull = pull.sum_to_size(*pull.shape[-4:-2], 1, 1)
            found["sink"] = pull if found["sink"] is None else found["sink"] + pull
        d_logits = d_logits.flatten(-3, -2)
        if "q" in sums:
            part = (d_logits @ blocks.k[..., keys, :]).mul_(scale)
            add("q", part.unflatten(-2, (grad.shape[-3], rows.stop - rows.start)), rows)
        if "k" in sums:
            add("k", d_logits.mT @ blocks.queries(blocks.q, rows), keys)
    return (*(None if d is None else d.reshape(t.shape) for d, t in zip(found.values(), inputs, strict=True)),)
