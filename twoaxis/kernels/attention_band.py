"""Windowed attention on a CPU: time and memory linear in the axis, whatever the window.

A query sees itself and the w-1 keys before it. **Tiles**: queries go in chunks of c; a chunk needs c + w-1 keys, so all
logits are one batched matrix product per call, with a band of width w inside each (c, c + w-1) tile:

    keys      | halo w-1 |   own c   |                tile, w = 3, c = 4:    x x x . . .
    queries              |   c rows                                          . x x x . .
                                                                             . . x x x .
    next chunk    | halo w-1 |   own c   |                                   . . . x x x

Keys are laid out once, rows end to end, and the overlapping key tiles are views of that, never copies; their gradients
are added back tile by tile. Narrow types are cast by the copy that lays them out, which on a CPU without bfloat16 units
is also the faster way.

**Gather**, for a compiler and windows of a few positions: one multiply-add per query and visible key, which it fuses.
Reads only, in the backward too: autograd's own backward of overlapping views scatters with atomics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.attention import attention, finite, lags, sink_softmax, softmax_gradient, unspoilt
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import routing_dtype

MIN_SKIPPED_LOGITS = 1 << 16
"""Logits that a band must leave out before it is worth laying tensors out for it."""
MAX_BAND = 256
"""The largest window for which a band is taken: its weights are saved, which a longer one would make the largest part
of what training remembers."""
MAX_GATHER = 16
"""The largest window for which elementwise code beats matrix products over tiles."""

Saved = tuple[Tensor, Tensor | None]
"""The weights and, with a sink, its share."""


def chunk_of(window: int) -> int:
    """Queries per chunk: half the window's halo, a multiple of 16 between 16 and 64."""
    return min(64, max(16, -(-(window - 1) // 32) * 16))


def _banded(q: Tensor, k: Tensor, v: Tensor, bias: Any, *_: Any, window: int | None, scale: float) -> bool:
    """Whether this is a window on a CPU, and no key is out of every query's sight."""
    n, m = q.shape[-2], k.shape[-2]
    return device_of(q) == "cpu" and bias is None and window is not None and n > 0 and m < n + window


def band_pays(q: Tensor, k: Tensor, *_: Any, window: int, scale: float) -> bool:
    """Whether the band is faster than all logits and a mask."""
    tile, keys = chunk_of(window) + window, k.shape[-2]
    return window <= MAX_BAND and keys > 2 * tile and math.prod(q.shape[:-1]) * (keys - tile) > MIN_SKIPPED_LOGITS


class _Layout(NamedTuple):
    """Where the numbers of one call stand.

    A row of keys is `halo` positions, the last `prefix` of them filled and the others zero, and then its own; a row of
    queries begins at its first chunk. Each row has a halo of its own, so that another row's numbers, which may not be
    finite, never meet its queries; the price is the chunks at a row's end that are computed for nothing.
    """

    lead: int  # product of the dimensions before the heads
    kv_heads: int  # rows per lead
    groups: int  # G, query heads per row
    length: int  # N, queries per row
    prefix: int  # keys before the first query
    c: int  # queries per chunk
    halo: int  # w - 1
    dtype: torch.dtype  # of what is laid out

    @property
    def chunks(self) -> int:
        """Chunks of one row: what covers its queries and its halo.

        The next row begins with zeros, which a tile may reach, unless it has a prefix.
        """
        if self.prefix:
            return -(-self.length // self.c) + -(-self.halo // self.c)
        return -(-(self.length + self.halo) // self.c)

    @property
    def total(self) -> int:
        """Chunks of all rows."""
        return self.lead * self.kv_heads * self.chunks

    @property
    def blank(self) -> int:
        """Positions of a row that are before the first key."""
        return self.halo - self.prefix

    def queries(self, t: Tensor) -> Tensor:
        """(..., H, N, D) of any strides and dtype to (total, G * c, D), zero where there is no query."""
        t = t.reshape(self.lead, self.kv_heads, self.groups, self.length, t.shape[-1])
        c, whole = self.c, self.length // self.c
        flat = t.new_empty((self.total, self.groups * c, t.shape[-1]), dtype=self.dtype)
        chunks = self.by_query_head(flat).transpose(2, 3)  # (lead, Hkv, G, chunks, c, D)
        chunks[:, :, :, whole:].zero_()
        chunks[:, :, :, :whole].copy_(t[..., : whole * c, :].unflatten(-2, (whole, c)))
        if rest := self.length - whole * c:
            chunks[:, :, :, whole, :rest].copy_(t[..., whole * c :, :])
        return flat

    def from_queries(self, flat: Tensor, lead: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The adjoint of `queries`; the memory is in the order (lead, N, H, D), which is what a projection reads."""
        c, whole, heads = self.c, self.length // self.c, self.kv_heads * self.groups
        chunks = self.by_query_head(flat).transpose(2, 3)
        out = flat.new_empty((*lead, self.length, heads, flat.shape[-1]), dtype=dtype)
        t = out.view(self.lead, self.length, self.kv_heads, self.groups, flat.shape[-1]).permute(0, 2, 3, 1, 4)
        t[..., : whole * c, :].unflatten(-2, (whole, c)).copy_(chunks[:, :, :, :whole])
        if rest := self.length - whole * c:
            t[..., whole * c :, :].copy_(chunks[:, :, :, whole, :rest])
        return out.transpose(-3, -2)

    def by_query_head(self, tiles: Tensor) -> Tensor:
        """(total, G * c, ...) seen as (lead, Hkv, chunks, G, c, ...)."""
        return tiles.view(self.lead, self.kv_heads, self.chunks, self.groups, self.c, tiles.shape[-1])

    def rows(self, t: Tensor) -> Tensor:
        """(..., Hkv, prefix + N, D) of any strides and dtype to the keys' rows laid end to end."""
        size, first = self.total * self.c, self.blank
        flat = t.new_empty((size + self.halo, t.shape[-1]), dtype=self.dtype)
        flat[size:].zero_()
        rows = self._by_row(flat)
        rows[:, :, :first].zero_()
        rows[:, :, first : first + t.shape[-2]].copy_(t.reshape(self.lead, *t.shape[-3:]))
        rows[:, :, first + t.shape[-2] :].zero_()
        return flat

    def from_rows(self, flat: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `rows`."""
        return self._by_row(flat)[:, :, self.blank : self.halo + self.length].reshape(like.shape).to(like.dtype)

    def _by_row(self, flat: Tensor) -> Tensor:
        """The rows laid end to end seen as (lead, Hkv, chunks * c, D)."""
        size = self.chunks * self.c
        return flat[: self.total * self.c].view(self.lead, self.kv_heads, size, flat.shape[-1])

    def tiles(self, flat: Tensor) -> Tensor:
        """(total, halo + c, D): the overlapping key tiles, a view of the rows laid end to end."""
        width = flat.shape[-1]
        return flat.as_strided((self.total, self.halo + self.c, width), (self.c * width, width, 1))

    def fold(self, tiles: Tensor) -> Tensor:
        """The adjoint of `tiles`: each position gets the sum of what the tiles that hold it say about it."""
        total, size, width = tiles.shape
        pieces = -(-size // self.c)
        flat = tiles.new_empty(total + pieces, self.c, width)
        flat[total:].zero_()
        flat[:total] = tiles[:, : self.c]
        for i in range(1, pieces):
            part = tiles[:, i * self.c : (i + 1) * self.c]
            flat[i : total + i, : part.shape[1]] += part
        return flat.view(-1, width)[: total * self.c + self.halo]


def _layout(q: Tensor, k: Tensor, window: int) -> _Layout:
    lead, heads = math.prod(q.shape[:-3]), (k.shape[-3], q.shape[-3] // k.shape[-3])
    prefix = k.shape[-2] - q.shape[-2]
    return _Layout(lead, *heads, q.shape[-2], prefix, chunk_of(window), window - 1, routing_dtype(q.dtype))


@attention.form("tiles", serves=_banded, pays=band_pays, compiled=None)
def _tiles(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Tensor | None, reach: Tensor | None, *, window: int, scale: float
) -> tuple[Tensor, Saved]:
    """Saves the weights (total, G * c, halo + c) and, with a sink, its share (total, G * c, 1)."""
    layout = _layout(q, k, window)
    lag = lags(layout.c, layout.halo + layout.c, q.device)
    outside = (lag < 0) | (lag > layout.halo)
    k_r, v_r = unspoilt(layout.rows(k), layout.rows(v))
    # the mask is added, not chosen, where no logit can become what is no number
    added = torch.zeros(lag.shape, dtype=layout.dtype, device=q.device).masked_fill_(outside, -math.inf)
    logits = torch.baddbmm(added.repeat(layout.groups, 1), layout.queries(q), layout.tiles(k_r).mT, alpha=scale)
    by_head = layout.by_query_head(logits)
    if torch.compiler.is_compiling() or not finite(k_r):
        by_head.masked_fill_(outside, -math.inf)
    if first := -(-layout.blank // layout.c):
        place = torch.arange(first, device=q.device)[:, None] * layout.c + torch.arange(lag.shape[1], device=q.device)
        by_head[:, :, :first].masked_fill_((place < layout.blank)[:, None, None], -math.inf)
    if reach is not None:
        reach = reach.expand(*q.shape[:-3], q.shape[-2]).reshape(layout.lead, -1)
        reach = F.pad(reach, (0, layout.chunks * layout.c - layout.length))
        by_head.masked_fill_(lag > reach.view(layout.lead, 1, layout.chunks, 1, layout.c, 1), -math.inf)
    weights, share = sink_softmax(by_head, None if sink is None else sink.view(layout.kv_heads, 1, layout.groups, 1, 1))
    weights = weights.view(logits.shape) if share is None else weights.flatten(0, 2).flatten(1, 2)
    out = torch.bmm(weights, layout.tiles(v_r))
    share = None if share is None else share.reshape(*logits.shape[:2], 1)
    return layout.from_queries(out, q.shape[:-3], q.dtype), (weights, share)


@attention.backward("tiles")
def _tiles_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, window: int, scale: float) -> Grads:
    """As the blocked form's, with all chunks at once: d_k and d_v of a tile are folded into those of the positions."""
    (q, k, v, _, sink, _), (weights, share) = inputs, saved
    layout = _layout(q, k, window)
    grad = layout.queries(grads[0])
    d_weights = torch.bmm(grad, layout.tiles(layout.rows(v)).mT)
    d_v = layout.from_rows(layout.fold(torch.bmm(weights.mT, grad)), v) if needs[2] else None
    d_logits, pull = softmax_gradient(d_weights, weights, share)
    d_q = d_k = d_sink = None
    if needs[4] and pull is not None:
        d_sink = layout.by_query_head(pull).sum((0, 2, 4, 5)).view(sink.shape)
    d_logits.mul_(scale)
    if needs[0]:
        d_q = layout.from_queries(torch.bmm(d_logits, layout.tiles(layout.rows(k))), q.shape[:-3], q.dtype)
    if needs[1]:
        d_k = layout.from_rows(layout.fold(torch.bmm(d_logits.mT, layout.queries(q))), k)
    return d_q, d_k, d_v, None, d_sink, None


def _short(*inputs: Any, window: int | None, scale: float) -> bool:
    return window is not None and window <= MAX_GATHER and _banded(*inputs, window=window, scale=scale)


@attention.form("gather", serves=_short, pays=band_pays, compiled=True)
def _gather(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Tensor | None, reach: Tensor | None, *, window: int, scale: float
) -> tuple[Tensor, Saved]:
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
    wide, blank = routing_dtype(q.dtype), window - 1 - (k.shape[-2] - q.shape[-2])
    padded = (F.pad(t, (0, 0, blank, 0)).contiguous().unsqueeze(-3) for t in unspoilt(k.to(wide), v.to(wide)))
    keys, values = (_windows(t, window) for t in padded)
    return q.to(wide).unflatten(-3, (k.shape[-3], q.shape[-3] // k.shape[-3])), keys, values


def _windows(t: Tensor, window: int) -> Tensor:
    """(..., M, D) to (..., M - w+1, D, w), a view. Of `unfold`, the same view, a compiler saves a copy w times as large
    for the backward pass; a view of strides it makes again."""
    *lead, count, width = t.shape
    return t.as_strided((*lead, count - window + 1, width, window), (*t.stride(), t.stride(-2)))
