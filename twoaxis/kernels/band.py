"""Windowed attention as a band: time and memory linear in the axis, whatever the window.

A query sees itself and the w-1 keys before it. Queries go in chunks of c; a chunk needs c + w-1 keys, so all logits are
one batched matrix product per call, with a band of width w inside each (c, c + w-1) tile:

    keys      | halo w-1 |   own c   |                tile, w = 3, c = 4:    x x x . . .
    queries              |   c rows                                          . x x x . .
                                                                             . . x x x .
    next chunk    | halo w-1 |   own c   |                                   . . . x x x

The three forms, equal up to rounding:

    band_reference   plain differentiable torch, for reading and for other devices than a CPU
    chunked          own backward. Keys are laid out once, rows end to end, and the overlapping key tiles are views of
                     that, never copies; their gradients are added back tile by tile
    gathered         own backward, one multiply-add per query and visible key: for a compiler, which fuses it. Reads
                     only, in the backward too: autograd's own backward of overlapping views scatters with atomics

`band_attention` chooses. Everything runs in float32 at least: narrow types are cast by the copy that lays them out,
which on a CPU without bfloat16 units is also the faster way.

Axis letters: R rows (batch and key heads), G query heads per key head, N positions, D head width, w window.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.backward import readable, reference_gradients
from twoaxis.kernels.dispatch import device_of
from twoaxis.kernels.precision import full_precision, routing_dtype, widen

GATHER = 16
"""The largest window for which a compiled elementwise form beats matrix products over tiles."""


SAVED = 1 << 16
"""Logits that a band must leave out before it is worth laying tensors out for it."""


def chunk_of(window: int) -> int:
    """Queries per chunk: half the window's halo, a multiple of 16 between 16 and 64."""
    return min(64, max(16, -(-(window - 1) // 32) * 16))


def band_pays(rows: int, queries: int, keys: int, window: int) -> bool:
    """Whether the band is faster than all logits and a mask, for `rows` heads and sequences."""
    tile = chunk_of(window) + window
    return keys > 2 * tile and rows * queries * (keys - tile) > SAVED


@full_precision
def band_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last N of M positions, each over itself and the `window - 1` before it.

    Args:
        q: (..., H, N, D).
        k: (..., Hkv, M, D), where Hkv divides H, and N <= M < N + window: no key is out of every query's sight.
        v: (..., Hkv, M, Dv).
        window: how many positions are visible, the current one included.
        scale: of the logits.
        sink: (H,) a logit per head that joins the softmax and carries no value.
        reach: (..., N) how many earlier positions each query may see at most.

    Returns:
        (..., H, N, Dv) in q's dtype.
    """
    assert q.shape[-2] <= k.shape[-2] < q.shape[-2] + window, "keys that no query sees"
    compiling = torch.compiler.is_compiling()
    if device_of(q) != "cpu" or (readable() and not compiling):
        return band_reference(q, k, v, window, scale, sink, reach)
    form = _gathered if compiling and window <= GATHER else _chunked
    return form(q, k, v, window, scale, sink, reach)


@full_precision
def band_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float,
    sink: Tensor | None = None,
    reach: Tensor | None = None,
) -> Tensor:
    """`band_attention` as one reads it: pad, cut into chunks, join each with the halo before it."""
    n, m, heads, kv_heads = q.shape[-2], k.shape[-2], q.shape[-3], k.shape[-3]
    groups, halo = heads // kv_heads, window - 1
    c = max(16, -(-halo // 16) * 16)  # at least the halo, which then comes from one chunk
    prefix, chunks = m - n, -(-n // c)
    tail = chunks * c - n

    def tiles(t: Tensor) -> Tensor:  # (..., Hkv, M, D) -> (..., Hkv, chunks, halo + c, D)
        t = F.pad(widen(t), (0, 0, c - prefix, tail)).unflatten(-2, (chunks + 1, c))
        return torch.cat([t[..., :-1, c - halo :, :], t[..., 1:, :, :]], dim=-2)

    q_c = F.pad(widen(q), (0, 0, 0, tail)).unflatten(-2, (chunks, c)).unflatten(-4, (kv_heads, groups))
    q_c = q_c.transpose(-4, -3)  # (..., Hkv, chunks, G, c, D)
    logits = (q_c.flatten(-3, -2) @ tiles(k).transpose(-2, -1) * scale).unflatten(-2, (groups, c))
    lag = _lag(c, halo, q.device)
    start = torch.arange(chunks, device=q.device)[:, None, None] * c
    seen = (lag >= 0) & (lag < window) & (start + torch.arange(halo + c, device=q.device) - halo >= -prefix)
    if reach is not None:
        reach_c = F.pad(reach, (0, tail)).unflatten(-1, (chunks, c))
        seen = (seen & (lag <= reach_c[..., None])).unsqueeze(-4)  # (..., 1, chunks, c, halo + c)
    logits = logits.masked_fill(~seen.unsqueeze(-3), -math.inf)
    weights = sink_softmax(logits, None if sink is None else sink.view(kv_heads, 1, groups, 1, 1))
    out = (weights.flatten(-3, -2) @ tiles(v)).unflatten(-2, (groups, c))  # (..., Hkv, chunks, G, c, Dv)
    out = out.transpose(-4, -3).flatten(-5, -4).flatten(-3, -2)  # (..., H, chunks * c, Dv)
    return out[..., :n, :].to(q.dtype)


def sink_softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last dimension; a sink takes its share of the mass and is then dropped."""
    if sink is None:
        return logits.softmax(-1)
    column = sink.to(logits.dtype).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]


def _lag(c: int, halo: int, device: torch.device) -> Tensor:
    """(c, halo + c): how far before its query each key of a tile stands; negative is after."""
    return torch.arange(c, device=device)[:, None] + halo - torch.arange(halo + c, device=device)[None, :]


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
    """

    lead: int
    kv_heads: int
    groups: int
    length: int
    prefix: int
    c: int
    halo: int

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

    def blank(self) -> int:
        """Positions of a row that are before the first key."""
        return self.halo - self.prefix

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


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sink: Tensor | None, reach: Tensor | None
) -> Tensor:
    """Lay out, attend, lay out back; each with its own backward."""
    lead, n, heads, kv_heads = q.shape[:-3], q.shape[-2], q.shape[-3], k.shape[-3]
    layout = _Layout(
        lead=math.prod(lead),
        kv_heads=kv_heads,
        groups=heads // kv_heads,
        length=n,
        prefix=k.shape[-2] - n,
        c=chunk_of(window),
        halo=window - 1,
    )
    hidden = None
    if reach is not None:
        reach = F.pad(reach.expand(*lead, n), (0, layout.chunks * layout.c - n)).reshape(layout.lead, 1, -1)
        reach = reach.expand(-1, kv_heads, -1).reshape(layout.total, 1, layout.c, 1)
        hidden = _lag(layout.c, layout.halo, q.device) > reach  # (total, 1, c, halo + c)
    q_c = _ToChunks.apply(q.reshape(layout.lead, kv_heads, layout.groups, n, q.shape[-1]), layout)
    k_r, v_r = (_ToRows.apply(t.reshape(layout.lead, *t.shape[-3:]), layout) for t in (k, v))
    out = _Band.apply(q_c, k_r, v_r, sink, hidden, layout, scale)
    out = _FromChunks.apply(out, layout, q.dtype)  # (lead, Hkv, G, N, Dv)
    return out.reshape(*lead, heads, n, v.shape[-1])


class _ToChunks(torch.autograd.Function):
    """(lead, Hkv, G, N, D) of any strides and dtype to (total, G * c, D), wide, zero where there is no query."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: _Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, t.dtype
        c, whole = layout.c, layout.length // layout.c
        flat = t.new_empty((layout.total, layout.groups * c, t.shape[-1]), dtype=routing_dtype(t.dtype))
        chunks = _chunk_view(flat, layout)
        chunks[:, :, :, whole:].zero_()
        chunks[:, :, :, :whole].copy_(t[..., : whole * c, :].unflatten(-2, (whole, c)))
        if rest := layout.length - whole * c:
            chunks[:, :, :, whole, :rest].copy_(t[..., whole * c :, :])
        return flat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _FromChunks.apply(grad, ctx.layout, ctx.dtype), None


class _FromChunks(torch.autograd.Function):
    """The adjoint of `_ToChunks`; the memory is in the order (lead, N, Hkv, G, D), which is what a projection reads."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, layout: _Layout, dtype: torch.dtype) -> Tensor:
        ctx.layout = layout
        c, whole = layout.c, layout.length // layout.c
        chunks = _chunk_view(flat, layout)
        shape = (layout.lead, layout.length, layout.kv_heads, layout.groups, flat.shape[-1])
        t = flat.new_empty(shape, dtype=dtype).permute(0, 2, 3, 1, 4)
        t[..., : whole * c, :].unflatten(-2, (whole, c)).copy_(chunks[:, :, :, :whole])
        if rest := layout.length - whole * c:
            t[..., whole * c :, :].copy_(chunks[:, :, :, whole, :rest])
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _ToChunks.apply(grad, ctx.layout), None, None


def _chunk_view(flat: Tensor, layout: _Layout) -> Tensor:
    """(total, G * c, D) seen as (lead, Hkv, G, chunks, c, D)."""
    shape = (layout.lead, layout.kv_heads, layout.chunks, layout.groups, layout.c, flat.shape[-1])
    return flat.view(shape).transpose(2, 3)


class _ToRows(torch.autograd.Function):
    """(lead, Hkv, prefix + N, D) of any strides and dtype to the keys' rows laid end to end, wide."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: _Layout) -> Tensor:
        ctx.layout, ctx.dtype = layout, t.dtype
        size = layout.total * layout.c
        flat = t.new_empty((size + layout.halo, t.shape[-1]), dtype=routing_dtype(t.dtype))
        flat[size:].zero_()
        rows, first = _row_view(flat, layout), layout.blank()
        rows[:, :, :first].zero_()
        rows[:, :, first : first + t.shape[-2]].copy_(t)
        rows[:, :, first + t.shape[-2] :].zero_()
        return flat

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        layout, first = ctx.layout, ctx.layout.blank()
        rows = _row_view(grad, layout)
        return rows[:, :, first : layout.halo + layout.length].to(ctx.dtype), None


def _row_view(flat: Tensor, layout: _Layout) -> Tensor:
    """The rows laid end to end seen as (lead, Hkv, chunks * c, D)."""
    size = layout.chunks * layout.c
    return flat[: layout.total * layout.c].view(layout.lead, layout.kv_heads, size, flat.shape[-1])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, hidden: Tensor | None, layout: _Layout, scale: float
) -> tuple[Tensor, Tensor]:
    """The output of every chunk (total, G * c, Dv), and its weights (total, G * c, halo + c)."""
    c, halo, groups = layout.c, layout.halo, layout.groups
    lag = _lag(c, halo, q.device)
    band = torch.zeros(lag.shape, dtype=q.dtype, device=q.device).masked_fill_((lag < 0) | (lag > halo), -math.inf)
    logits = torch.baddbmm(band.repeat(groups, 1), q, layout.tiles(k).mT, alpha=scale)
    size = halo + c
    if first := -(-layout.blank() // c):
        place = torch.arange(first, device=q.device)[:, None, None] * c + torch.arange(size, device=q.device)
        rows = logits.view(layout.lead * layout.kv_heads, layout.chunks, groups * c, size)
        rows[:, :first].masked_fill_(place < layout.blank(), -math.inf)
    if hidden is not None:
        logits.view(layout.total, groups, c, size).masked_fill_(hidden, -math.inf)
    if sink is None:
        weights = logits.softmax(-1)
    else:
        by_head = logits.view(layout.lead, layout.kv_heads, layout.chunks, groups, c, size)
        weights = sink_softmax(by_head, sink.view(layout.kv_heads, 1, groups, 1, 1))
        weights = weights.reshape(layout.total, groups * c, size)
    return torch.bmm(weights, layout.tiles(v)), weights


class _Band(torch.autograd.Function):
    """Attention of the chunks; saves the laid-out inputs and the weights, whose size is N (c + w-1) per head."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        hidden: Tensor | None,
        layout: _Layout,
        scale: float,
    ) -> Tensor:
        out, weights = _attend(q, k, v, sink, hidden, layout, scale)
        ctx.save_for_backward(q, k, v, sink, hidden, weights)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @full_precision
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sink, hidden, weights = ctx.saved_tensors
        layout, needs = ctx.layout, ctx.needs_input_grad
        if torch.is_grad_enabled():

            def again(*tensors: Tensor) -> Tensor:
                q, k, v, sink = tensors
                return _attend(q, k, v, sink, hidden, layout, ctx.scale)[0]

            return *reference_gradients(again, (q, k, v, sink), needs[:4], (grad,)), None, None, None
        d_weights = torch.bmm(grad, layout.tiles(v).mT)
        d_v = layout.fold(torch.bmm(weights.mT, grad)) if needs[2] else None
        d_sink = None
        if sink is not None and needs[3]:
            # the sink is a key of value zero: what its weight takes, all visible keys lose
            pull = ((weights.sum(-1) - 1) * (weights * d_weights).sum(-1)).view(
                layout.lead, layout.kv_heads, layout.chunks, layout.groups, layout.c
            )
            d_sink = pull.sum((0, 2, 4)).view(-1).to(sink.dtype)
        d_logits = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        d_q = torch.bmm(d_logits, layout.tiles(k)) if needs[0] else None
        d_k = layout.fold(torch.bmm(d_logits.mT, q)) if needs[1] else None
        return d_q, d_k, d_v, d_sink, None, None, None


def _gathered(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sink: Tensor | None, reach: Tensor | None
) -> Tensor:
    """Every query against its w keys, slot by slot, without matrix products."""
    n, heads, kv_heads, halo = q.shape[-2], q.shape[-3], k.shape[-3], window - 1
    blank = halo - (k.shape[-2] - n)  # slots of the first query that are before the first key
    slot = torch.arange(window, device=q.device)
    seen = torch.arange(n, device=q.device)[:, None] + slot >= blank  # (N, w)
    if reach is not None:
        seen = (seen & (halo - slot <= reach.unsqueeze(-1))).unsqueeze(-3).unsqueeze(-3)  # (..., 1, 1, N, w)
    q_g = widen(q).unflatten(-3, (kv_heads, heads // kv_heads))  # (..., Hkv, G, N, D)
    k_p, v_p = (
        F.pad(widen(t), (0, 0, blank, 0)).contiguous().unsqueeze(-3) for t in (k, v)
    )  # (..., Hkv, 1, N + halo, D)
    if sink is not None:
        sink = sink.to(q_g.dtype).view(kv_heads, heads // kv_heads, 1, 1)
    out = _Gather.apply(q_g, k_p, v_p, sink, seen, window, scale)
    return out.flatten(-4, -3).to(q.dtype)


def _windows(t: Tensor, window: int) -> Tensor:
    """(..., M, D) to (..., M - w+1, D, w), a view. Of `unfold`, the same view, a compiler saves a copy w times as large
    for the backward pass; a view of strides it makes again."""
    *lead, count, width = t.shape
    return t.as_strided((*lead, count - window + 1, width, window), (*t.stride(), t.stride(-2)))


class _Gather(torch.autograd.Function):
    """q (..., Hkv, G, N, D) over k, v (..., Hkv, 1, N + w-1, D); the query at i sees the keys i .. i + w-1."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, seen: Tensor, window: int, scale: float
    ) -> Tensor:
        keys, values = (_windows(t, window) for t in (k, v))  # (..., N, D, w)
        logits = ((q.unsqueeze(-1) * keys).sum(-2) * scale).masked_fill(~seen, -math.inf)
        weights = sink_softmax(logits, sink)
        ctx.save_for_backward(q, k, v, sink, weights)
        ctx.window, ctx.scale = window, scale
        return (weights.unsqueeze(-2) * values).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sink, weights = ctx.saved_tensors
        window, halo = ctx.window, ctx.window - 1
        keys, values = (_windows(t, window) for t in (k, v))
        d_weights = (grad.unsqueeze(-1) * values).sum(-2)
        pull = (weights * d_weights).sum(-1, keepdim=True)
        d_sink = None
        if sink is not None:
            d_sink = ((weights.sum(-1, keepdim=True) - 1) * pull).sum_to_size(sink.shape)
        d_logits = weights * (d_weights - pull) * ctx.scale
        d_q = (d_logits.unsqueeze(-2) * keys).sum(-1)

        def at_keys(per_query: Tensor, per_slot: Tensor) -> Tensor:
            """The sum over the queries that see a key of their weight for it times their vector."""
            vectors = _windows(F.pad(per_query, (0, 0, halo, halo)).contiguous(), window)  # (..., N + halo, D, w)
            slots = F.pad(per_slot, (0, 0, halo, halo)).contiguous()
            shape, strides = (*vectors.shape[:-2], window), (*slots.stride()[:-2], window, halo)
            skew = slots.as_strided(shape, strides, halo)  # one query on is one slot back
            return (skew.unsqueeze(-2) * vectors).sum(-1).sum(-3, keepdim=True)

        return d_q, at_keys(q, d_logits), at_keys(grad, weights), d_sink, None, None, None
