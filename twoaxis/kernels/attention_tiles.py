"""Windowed attention as a band of tiles: time and memory linear in the axis, whatever the window.

A query sees itself and the w-1 keys before it. Queries go in chunks of c; a chunk needs c + w-1 keys, so all logits are
one batched matrix product per call, with a band of width w inside each (c, c + w-1) tile:

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
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.attention import (
    attention,
    band_pays,
    banded,
    chunk_of,
    finite,
    lags,
    sink_softmax,
    softmax_gradient,
    unspoilt,
)
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import routing_dtype


class _Layout(NamedTuple):
    """Where the numbers of one call stand.

    A row of keys is `halo` positions, the last `prefix` of them filled and the others zero, and then its own; a row of
    queries begins at its first chunk. Each row has a halo of its own, so that another row's numbers, which may not be
    finite, never meet its queries; the price is the chunks at a row's end that are computed for nothing.

    Attributes:
        lead: product of the dimensions before the heads.
        kv_heads: rows per lead.
        groups: G, query heads per row.
        length: N, queries per row.
        prefix: keys before the first query.
        c: queries per chunk.
        halo: w - 1.
        dtype: of what is laid out.
    """

    lead: int
    kv_heads: int
    groups: int
    length: int
    prefix: int
    c: int
    halo: int
    dtype: torch.dtype

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
        chunks = self._by_head(flat)
        chunks[:, :, :, whole:].zero_()
        chunks[:, :, :, :whole].copy_(t[..., : whole * c, :].unflatten(-2, (whole, c)))
        if rest := self.length - whole * c:
            chunks[:, :, :, whole, :rest].copy_(t[..., whole * c :, :])
        return flat

    def from_queries(self, flat: Tensor, lead: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The adjoint of `queries`; the memory is in the order (lead, N, H, D), which is what a projection reads."""
        c, whole, heads = self.c, self.length // self.c, self.kv_heads * self.groups
        chunks = self._by_head(flat)
        out = flat.new_empty((*lead, self.length, heads, flat.shape[-1]), dtype=dtype)
        t = out.view(self.lead, self.length, self.kv_heads, self.groups, flat.shape[-1]).permute(0, 2, 3, 1, 4)
        t[..., : whole * c, :].unflatten(-2, (whole, c)).copy_(chunks[:, :, :, :whole])
        if rest := self.length - whole * c:
            t[..., whole * c :, :].copy_(chunks[:, :, :, whole, :rest])
        return out.transpose(-3, -2)

    def _by_head(self, flat: Tensor) -> Tensor:
        """(total, G * c, D) seen as (lead, Hkv, G, chunks, c, D)."""
        return flat.view(self.lead, self.kv_heads, self.chunks, self.groups, self.c, flat.shape[-1]).transpose(2, 3)

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

    def by_query_head(self, tiles: Tensor) -> Tensor:
        """(total, G * c, keys) seen as (lead, Hkv, chunks, G, c, keys)."""
        return tiles.view(self.lead, self.kv_heads, self.chunks, self.groups, self.c, tiles.shape[-1])

    def hidden(self, reach: Tensor) -> Tensor:
        """(lead, 1, chunks, 1, c, halo + c): which keys are beyond the reach (lead, N) of their query."""
        reach = F.pad(reach, (0, self.chunks * self.c - self.length))
        lag = lags(self.c, self.halo + self.c, reach.device)
        return lag > reach.view(self.lead, 1, self.chunks, 1, self.c, 1)


def _layout(q: Tensor, k: Tensor, window: int) -> _Layout:
    return _Layout(
        lead=math.prod(q.shape[:-3]),
        kv_heads=k.shape[-3],
        groups=q.shape[-3] // k.shape[-3],
        length=q.shape[-2],
        prefix=k.shape[-2] - q.shape[-2],
        c=chunk_of(window),
        halo=window - 1,
        dtype=routing_dtype(q.dtype),
    )


@attention.form("tiles", serves=banded, pays=band_pays, compiled=None)
def _tiles(
    q: Tensor, k: Tensor, v: Tensor, bias: None, sink: Tensor | None, reach: Tensor | None, *, window: int, scale: float
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
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
        by_head.masked_fill_(
            layout.hidden(reach.expand(*q.shape[:-3], q.shape[-2]).reshape(layout.lead, -1)), -math.inf
        )
    weights, share = sink_softmax(by_head, None if sink is None else sink.view(layout.kv_heads, 1, layout.groups, 1, 1))
    weights = weights.view(logits.shape) if share is None else weights.flatten(0, 2).flatten(1, 2)
    out = torch.bmm(weights, layout.tiles(v_r))
    share = None if share is None else share.reshape(layout.total, layout.groups * layout.c, 1)
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
    d_sink = None
    if needs[4] and pull is not None:
        d_sink = layout.by_query_head(pull).sum((0, 2, 4, 5)).view(sink.shape)
    d_logits.mul_(scale)
    d_q = d_k = None
    if needs[0]:
        d_q = layout.from_queries(torch.bmm(d_logits, layout.tiles(layout.rows(k))), q.shape[:-3], q.dtype)
    if needs[1]:
        d_k = layout.from_rows(layout.fold(torch.bmm(d_logits.mT, layout.queries(q))), k)
    return d_q, d_k, d_v, None, d_sink, None
