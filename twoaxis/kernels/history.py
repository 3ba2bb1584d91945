"""Operators on a history: a list of sources (..., D), the states or outputs of earlier places.

    weighted_sum   y_w = Σ_s ( static[w,s] + token[...,w,s] + channel[w,s,:] ) ⊙ x_s
    rms_logits     s[...,h,n] = < queries[n,h] , (x / rms(x))_h >           one source, all queries that read it
    source_dots    s[...,w,s] = < query[...,w] , x_s >
    softmax_read   y = scale · Σ_s softmax_s(logits) x_s                    by channel groups (heads)
    query_read     the softmax read with the logits of one query

Shapes: ... any leading dimensions (batch, time, heads), S sources, W ways, D width of a source, H heads.

The sources stay a list: they are never stacked or copied, a read keeps references to them and its small weights, so
what training remembers is linear in depth however many sites read a source. On the CPUs measured, products over a
buffer with tokens as the batch take 1.3 to 5 times as long as one multiplication and addition per source, and filling
the buffer as long again. Sums run in float32 at least and are cast once at the end. The eager forms save, besides
references to the inputs, a few numbers per token: no widened or normalised copy of a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.operator import Given, Grads, operator
from twoaxis.kernels.precision import cast, launch_bound, product, routing_dtype, widen

Weights = tuple[Tensor | None, Tensor | None, Tensor | None]


# Weighted sums.


@operator
def weighted_sum(
    sources: Sequence[Tensor], static: Tensor | None = None, token: Tensor | None = None, channel: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Mix `sources` into one tensor per way: the primitive that all history methods share.

    Any of the three kinds of weights may be given; they add.

    Args:
        sources: S tensors (..., D) of one shape and dtype.
        static: (W, S) one scalar per way and source, shared by all tokens.
        token: (..., W, S) one scalar per token, way and source.
        channel: (W, S, D) one weight per channel.

    Returns:
        W tensors (..., D) in the sources' dtype.
    """
    dtype = sources[0].dtype
    outs = []
    for w in range(_ways(static, token, channel)):
        terms = [
            widen(x) * weight.to(routing_dtype(dtype))
            for s, x in enumerate(sources)
            for weight in _coefficients(static, token, channel, w, s)
        ]
        outs.append(sum(terms[1:], terms[0]).to(dtype))
    return tuple(outs)


@weighted_sum.check
def _(
    sources: Sequence[Tensor], static: Tensor | None = None, token: Tensor | None = None, channel: Tensor | None = None
) -> None:
    if not sources:
        raise ValueError("weighted_sum needs at least one source, got 0")
    if static is None and token is None and channel is None:
        raise ValueError("weighted_sum needs weights: give static, token or channel")
    shape, count, width = sources[0].shape, len(sources), _ways(static, token, channel)
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"source {i} has shape {tuple(source.shape)}, source 0 has {tuple(shape)}")
    for name, weight, want in (
        ("static", static, (width, count)),
        ("token", token, (*shape[:-1], width, count)),
        ("channel", channel, (width, count, shape[-1])),
    ):
        if weight is not None and tuple(weight.shape) != tuple(want):
            raise ValueError(f"{name} weights have shape {tuple(weight.shape)}, these sources need {tuple(want)}")


def _ways(static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> int:
    """W of the weights that are given."""
    if (scalars := token if static is None else static) is not None:
        return scalars.shape[-2]
    assert channel is not None
    return channel.shape[0]


def _coefficients(static: Tensor | None, token: Tensor | None, channel: Tensor | None, w: int, s: int) -> list[Tensor]:
    """The weights of way `w` and source `s`, shaped to multiply a source (..., D)."""
    found = [] if static is None else [static[w, s]]
    if token is not None:
        found.append(token[..., w, s, None])
    if channel is not None:
        found.append(channel[w, s])
    return found


@weighted_sum.form("eager")
def _sums(
    sources: Sequence[Tensor], static: Tensor | None, token: Tensor | None, channel: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[()]]:
    weights = _wide(sources[0], static, token, channel)
    totals: list[Tensor | None] = [None] * _ways(*weights)
    for s, x in enumerate(sources):  # all ways of a source while it is in cache
        for w, total in enumerate(totals):
            totals[w] = _sum_of_products([(x, c) for c in _coefficients(*weights, w, s)], total)
    dtype = sources[0].dtype
    return tuple(cast(total, dtype) for total in totals if total is not None), ()


@weighted_sum.backward("eager")
def _sums_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """With g_w the gradient of y_w and a the weights of all three kinds together:

    d_x_s = Σ_w a[w,s] ⊙ g_w       d_token[...,w,s] = <g_w, x_s>       d_static[w,s] and d_channel[w,s,:] its sums
    """
    (sources, *given), (of_sources, *of_weights) = inputs, needs
    weights = _wide(sources[0], *given)
    used = [(w, widen(g)) for w, g in enumerate(grads) if g is not None]
    d_weights = [
        torch.zeros_like(v, dtype=routing_dtype(v.dtype)) if need else None
        for v, need in zip(given, of_weights, strict=True)
    ]
    buffer = torch.empty_like(used[0][1]) if any(of_weights) else None
    d_sources: list[Tensor | None] = []
    for s, x in enumerate(sources):
        if buffer is not None:
            for w, g in used:
                _add_weight_gradients(d_weights, torch.mul(g, x, out=buffer), w, s)
        terms = [(g, c) for w, g in used for c in _coefficients(*weights, w, s)] if of_sources[s] else []
        d_sources.append(_sum_of_products(terms) if terms else None)
    return d_sources, *d_weights


def _wide(source: Tensor, static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> Weights:
    """The weights in the routing dtype; scalars for all tokens and scalars per token multiply alike and are added."""
    dtype = routing_dtype(source.dtype)
    static, token, channel = (w if w is None else cast(w, dtype) for w in (static, token, channel))
    return (static, token, channel) if static is None or token is None else (None, token + static, channel)


def _sum_of_products(terms: Iterable[tuple[Tensor, Tensor]], total: Tensor | None = None) -> Tensor:
    """`total`, in place, plus Σ x ⊙ coefficient; in the coefficients' dtype."""
    for x, coefficient in terms:
        total = widen(x) * coefficient if total is None else total.addcmul_(x, coefficient)
    assert total is not None
    return total


def _add_weight_gradients(d_weights: Sequence[Tensor | None], along: Tensor, w: int, s: int) -> None:
    """The gradients of way `w` and source `s` from the product (..., D) of the way's gradient and the source."""
    d_static, d_token, d_channel = d_weights
    if d_channel is not None:
        d_channel[w, s] = along.reshape(-1, along.shape[-1]).sum(0)
    if d_token is not None:
        d_token[..., w, s] = along.sum(-1)
    if d_static is not None:
        d_static[w, s] = along.sum()


# Logits.


@operator
def rms_logits(source: Tensor, queries: Tensor, *, eps: float | None) -> Tensor:
    """Logits of one source for every fixed query that will ever read it: one small matrix product.

    Args:
        source: (..., D).
        queries: (n, H, D/H), with the key norm's scale folded in; H = 1 unless the read has heads.
        eps: inside the mean square; None leaves the source un-normalised.

    Returns:
        (..., H, n) in float32 at least; the logits of one query for all tokens lie side by side in memory.
    """
    x, u = widen(source), queries.to(routing_dtype(source.dtype))
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    keys = x.unflatten(-1, u.shape[1:])  # (..., H, D/H)
    if len(u) == 1:  # a compiler fuses this with what follows, a product with a matrix it leaves to itself
        return (keys * u[0]).sum(-1, keepdim=True)
    rows = keys.reshape(-1, *u.shape[1:]).transpose(0, 1)  # (H, tokens, D/H)
    return product(rows, u.permute(1, 2, 0)).transpose(0, 1).reshape(*x.shape[:-1], u.shape[1], len(u))


@rms_logits.form("eager")
def project(
    source: Tensor, queries: Tensor, *, eps: float | None
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Saves the inverse RMS r (...) and the logits. The product runs as (H, n, tokens): few rows beat few columns."""
    x, u = widen(source), queries.to(routing_dtype(source.dtype))
    count, heads, width = u.shape
    if heads == 1:
        logits = product(u[:, 0], x.reshape(-1, width).mT).mT.reshape(*x.shape[:-1], 1, count)
    else:
        rows = x.reshape(-1, heads, width).transpose(0, 1)  # (H, tokens, D/H)
        logits = product(u.transpose(0, 1), rows.mT).permute(2, 0, 1).reshape(*x.shape[:-1], heads, count)
    if eps is None:
        return logits, (None, None)
    # a norm reads x once and makes no squares of its size
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    logits = logits * inverse.unsqueeze(-1)
    return logits, (inverse, logits)


@rms_logits.backward("eager")
def project_backward(inputs: Given, saved: Given, grads: Given, needs: Given, *, eps: float | None) -> Grads:
    """With s = r u·x, r = (mean x² + eps)^(-1/2) and g the gradient of s:

        d_u = Σ_tokens g r x        d_x = Σ_n g r u  -  (r² / D) (Σ_hn g s) x

    The root mean square sees every channel, so that the logits of all heads pull on the length of x.
    """
    (source, queries), (inverse, logits), grad = inputs, saved, grads[0]
    x, u = widen(source), queries.to(grad.dtype)
    _, heads, width = u.shape
    d_raw = grad if inverse is None else grad * inverse.unsqueeze(-1)
    d_raw = d_raw.reshape(-1, *grad.shape[-2:]).permute(1, 2, 0)  # (H, n, tokens)
    d_source = d_queries = None
    if needs[0]:
        d_source = product(d_raw.mT, u.transpose(0, 1)).transpose(0, 1).reshape(x.shape)  # from (H, tokens, D/H)
        if inverse is not None:
            pull = (grad * logits).sum((-2, -1)).unsqueeze(-1).mul_(inverse.square().div_(-x.shape[-1]))
            d_source.addcmul_(x, pull)
    if needs[1]:
        rows = x.reshape(-1, heads, width).transpose(0, 1)  # (H, tokens, D/H)
        d_queries = product(d_raw, rows).transpose(0, 1)
    return d_source, d_queries


@operator
def source_dots(query: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Dot products of W queries with S sources.

    Args:
        query: (..., W, D) per token, or (W, D) shared by all tokens.
        sources: S tensors (..., D).

    Returns:
        (..., W, S) in float32 at least.
    """
    return torch.stack([(widen(query) * widen(x).unsqueeze(-2)).sum(-1) for x in sources], dim=-1)


@source_dots.backward("eager")
def _dots_backward(inputs: Given, saved: Given, grads: Given, needs: Given) -> Grads:
    """d_query[...,w] = Σ_s g[...,w,s] x_s,   d_x_s = Σ_w g[...,w,s] query[...,w]."""
    query, sources = inputs
    columns = grads[0].unsqueeze(-2).unbind(-1)  # of each source (..., W, 1)
    d_query = None
    if needs[0]:
        total = _sum_of_products([(x.unsqueeze(-2), column) for x, column in zip(sources, columns, strict=True)])
        d_query = total.sum_to_size(query.shape)
    rows = [(w, widen(q)) for w, q in enumerate(query.unbind(-2))]
    return d_query, [
        _sum_of_products([(q, column[..., w, :]) for w, q in rows]) if need else None
        for column, need in zip(columns, needs[1], strict=True)
    ]


# Softmax reads.


@operator
def softmax_read(sources: Sequence[Tensor], logits: Sequence[Tensor], *, scale: float = 1.0) -> Tensor:
    """`scale` times the average of `sources` by the softmax of their `logits`, which `weighted_sum` adds up.

    Args:
        sources: S tensors (..., D).
        logits: S tensors (..., H), one logit for each of H groups of channels; or (...), one for a whole source.
        scale: of the average.

    Returns:
        (..., D) in the sources' dtype.
    """
    weights = torch.stack(list(logits), dim=-1).softmax(-1)
    weights = weights if scale == 1.0 else weights * scale
    if weights.dim() == sources[0].dim():  # (..., S): no heads
        return weighted_sum(sources, token=weights.unsqueeze(-2))[0]
    heads = weights.shape[-2]
    if heads == 1:  # (..., 1, S) is one way
        return weighted_sum(sources, token=weights)[0]
    grouped = [x.unflatten(-1, (heads, -1)) for x in sources]
    return weighted_sum(grouped, token=weights.unsqueeze(-2))[0].flatten(-2)


@operator
def query_read(sources: Sequence[Tensor], query: Tensor, *, eps: float | None, scale: float = 1.0) -> Tensor:
    """The softmax read of one query: for a token at a time, where logits made ahead for later sites do not pay.

    Args:
        sources: S tensors (..., D).
        query: (H, D/H), with the key norm's scale folded in.
        eps: inside the keys' mean square; None leaves them un-normalised.
        scale: of the average.

    Returns:
        (..., D) in the sources' dtype.
    """
    logits = [rms_logits(x, query.unsqueeze(0), eps=eps)[..., 0] for x in sources]
    return softmax_read(sources, logits, scale=scale)


def _one_head(sources: Sequence[Tensor], query: Tensor, **_: Any) -> bool:
    return len(query) == 1 and launch_bound(sources[0])


@query_read.form("few_tokens", serves=_one_head)
def _read_few(
    sources: Sequence[Tensor], query: Tensor, *, eps: float | None, scale: float = 1.0
) -> tuple[Tensor, tuple[()]]:
    """The fewest calls, without gradients.

    Between two reads of a decoder the weights of a sub-layer pass through the caches, so that the first use of any
    operation takes long (about 15 microseconds, not 1 or 2) and the second does not. So the few operations here are
    those of the decoder's norms, with the query in the place of the norm's scale.
    """
    states, query = widen(torch.stack(list(sources), dim=-2)), widen(query[0])  # (..., S, D)
    keys = states * query if eps is None else F.rms_norm(states, query.shape, query, eps)
    weights = keys.sum(-1, keepdim=True).softmax(-2)
    out = (states * (weights if scale == 1.0 else weights * scale)).sum(-2)
    return cast(out, sources[0].dtype), ()
