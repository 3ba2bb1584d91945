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
"""

from __future__ import annotations

import math
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
    """Where the numbers of one call stand: a row per leading dimension and key head, all rows end to end.

    A row of keys begins with a halo of zeros, and a row of queries with zeros in the place of keys that no query stands
    on. So what a tile reaches beyond its own row is the next one's zeros: another row's numbers, which may not be
    finite, never meet its queries. The price is the chunks at a row's end that are computed for nothing.
    """

    lead: int  # product of the dimensions before the heads
    kv_heads: int  # rows per lead
    length: int  # M, keys per row
    before: int  # keys before the first query
    c: int  # queries per chunk
    halo: int  # w - 1
    dtype: torch.dtype  # of what is laid out

    @property
    def chunks(self) -> int:
        """Chunks of one row: what covers its keys and its halo."""
        return -(-(self.length + self.halo) // self.c)

    def queries(self, t: Tensor) -> Tensor:
        """(..., H, N, D) to (chunks of all rows, c G, D), a query's heads side by side."""
        by_row = t.reshape(self.lead, self.kv_heads, -1, *t.shape[-2:]).transpose(2, 3)  # (lead, Hkv, N, G, D)
        return self._laid(by_row, self.before)[: -self.halo or None].view(-1, self.c * by_row.shape[3], t.shape[-1])

    def from_queries(self, tiles: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `queries`; the memory is in the order (lead, N, H, D), which is what a projection reads."""
        by_row = self._by_row(tiles.view(-1, like.shape[-3] // self.kv_heads, tiles.shape[-1]))
        picked = by_row[:, :, self.before : self.length].transpose(1, 2)  # (lead, N, Hkv, G, D)
        heads_last = (*like.shape[:-3], like.shape[-2], like.shape[-3], tiles.shape[-1])
        return picked.to(like.dtype, memory_format=torch.contiguous_format).reshape(heads_last).transpose(-3, -2)

    def keys(self, t: Tensor) -> Tensor:
        """(..., Hkv, M, D) to the rows end to end."""
        return self._laid(t.reshape(self.lead, *t.shape[-3:]), self.halo)

    def from_keys(self, flat: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `keys`."""
        return self._by_row(flat)[:, :, self.halo : self.halo + self.length].reshape(like.shape).to(like.dtype)

    def _laid(self, rows: Tensor, first: int) -> Tensor:
        """Rows (lead, Hkv, positions, ...) of any strides and dtype end to end, from position `first` of each on."""
        flat = rows.new_empty((self._size() + self.halo, *rows.shape[3:]), dtype=self.dtype)
        flat[self._size() :].zero_()
        by_row, last = self._by_row(flat), first + rows.shape[2]
        by_row[:, :, :first].zero_()
        by_row[:, :, first:last].copy_(rows)
        by_row[:, :, last:].zero_()
        return flat

    def _by_row(self, flat: Tensor) -> Tensor:
        """What lies end to end seen as (lead, Hkv, positions, ...)."""
        return flat[: self._size()].view(self.lead, self.kv_heads, -1, *flat.shape[1:])

    def _size(self) -> int:
        """Positions of all rows."""
        return self.lead * self.kv_heads * self.chunks * self.c

    def tiles(self, flat: Tensor) -> Tensor:
        """(chunks of all rows, halo + c, D): the overlapping key tiles, a view of the rows end to end."""
        width = flat.shape[-1]
        return flat.as_strided((self._size() // self.c, self.halo + self.c, width), (self.c * width, width, 1))

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
        return flat.view(-1, width)


def _layout(q: Tensor, k: Tensor, window: int) -> _Layout:
    (kv_heads, length), n = k.shape[-3:-1], q.shape[-2]
    dtype = routing_dtype(q.dtype)
    return _Layout(math.prod(q.shape[:-3]), kv_heads, length, length - n, chunk_of(window), window - 1, dtype)


@attention.form("tiles", serves=_banded, pays=band_pays, compiled=None)
def _tiles(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Tensor | None, reach: Tensor | None, *, window: int, scale: float
) -> tuple[Tensor, Saved]:
    """Saves the weights (chunks of all rows, c G, halo + c) and, with a sink, its share (..., c G, 1)."""
    layout = _layout(q, k, window)
    lead, kv_heads, c = layout.lead, layout.kv_heads, layout.c
    groups = q.shape[-3] // kv_heads
    lag = lags(c, layout.halo + c, q.device)
    outside = (lag < 0) | (lag > layout.halo)
    k_r, v_r = unspoilt(layout.keys(k), layout.keys(v))
    # the mask is added, not chosen, where no logit can become what is no number
    added = torch.zeros(lag.shape, dtype=layout.dtype, device=q.device).masked_fill_(outside, -math.inf)
    added = added.repeat_interleave(groups, 0)
    logits = torch.baddbmm(added, layout.queries(q), layout.tiles(k_r).mT, alpha=scale)
    by_query = logits.view(lead, kv_heads, layout.chunks, c, groups, -1)
    if torch.compiler.is_compiling() or not finite(k_r):
        by_query.masked_fill_(outside[:, None], -math.inf)
    if first := -(-layout.halo // c):  # chunks whose tiles begin before the first key
        place = torch.arange(first, device=q.device)[:, None] * c + torch.arange(lag.shape[1], device=q.device)
        by_query[:, :, :first].masked_fill_((place < layout.halo)[:, None, None], -math.inf)
    if reach is not None:
        reach = reach.expand(*q.shape[:-3], q.shape[-2]).reshape(lead, -1)
        reach = F.pad(reach, (layout.before, layout.chunks * c - layout.length))
        by_query.masked_fill_(lag[:, None] > reach.view(lead, 1, layout.chunks, c, 1, 1), -math.inf)
    weights, share = sink_softmax(by_query, None if sink is None else sink.view(kv_heads, 1, 1, groups, 1))
    weights, share = weights.reshape(logits.shape), None if share is None else share.reshape(*logits.shape[:2], 1)
    return layout.from_queries(torch.bmm(weights, layout.tiles(v_r)), q), (weights, share)


@attention.backward("tiles")
def _tiles_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, window: int, scale: float) -> Grads:
    """As the blocked form's, with all chunks at once: d_k and d_v of a tile are folded into those of the positions."""
    (q, k, v, _, sink, _), (weights, share) = inputs, saved
    layout = _layout(q, k, window)
    grad = layout.queries(grads[0])
    d_weights = torch.bmm(grad, layout.tiles(layout.keys(v)).mT)
    d_v = layout.from_keys(layout.fold(torch.bmm(weights.mT, grad)), v) if needs[2] else None
    d_logits, pull = softmax_gradient(d_weights, weights, share)
    d_q = d_k = d_sink = None
    if needs[4] and pull is not None:
        by_head = pull.view(layout.lead, layout.kv_heads, -1, len(sink) // layout.kv_heads)
        d_sink = by_head.sum((0, 2)).view(sink.shape)
    d_logits.mul_(scale)
    if needs[0]:
        d_q = layout.from_queries(torch.bmm(d_logits, layout.tiles(layout.keys(k))), q)
    if needs[1]:
        d_k = layout.from_keys(layout.fold(torch.bmm(d_logits.mT, layout.queries(q))), k)
    return d_q, d_k, d_v, None, d_sink, None
