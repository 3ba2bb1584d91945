"""Forms of the operators on a history in calls of PyTorch: a pass over the sources forward, one backward.

What is saved besides references to the inputs is a few numbers per token: no widened or normalised copy of a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.history import coefficients, query_read, rms_logits, source_dots, ways, weighted_sum
from twoaxis.kernels.operator import Given, Grads
from twoaxis.kernels.precision import launch_bound, product, routing_dtype, widen

Weights = tuple[Tensor | None, Tensor | None, Tensor | None]


@weighted_sum.form("eager")
def _sums(
    sources: Sequence[Tensor], static: Tensor | None, token: Tensor | None, channel: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[()]]:
    weights = _wide(sources[0], static, token, channel)
    totals: list[Tensor | None] = [None] * ways(*weights)
    for s, x in enumerate(sources):  # all ways of a source while it is in cache
        for w, total in enumerate(totals):
            totals[w] = _sum_of_products([(x, c) for c in coefficients(*weights, w, s)], total)
    dtype = sources[0].dtype
    return tuple(total if total.dtype == dtype else total.to(dtype) for total in totals if total is not None), ()


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
        terms = [(g, c) for w, g in used for c in coefficients(*weights, w, s)] if of_sources[s] else []
        d_sources.append(_sum_of_products(terms) if terms else None)
    return d_sources, *d_weights


def _wide(source: Tensor, static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> Weights:
    """The weights in the routing dtype; scalars for all tokens and scalars per token multiply alike and are added."""
    dtype = routing_dtype(source.dtype)
    static, token, channel = (w if w is None or w.dtype == dtype else w.to(dtype) for w in (static, token, channel))
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


@source_dots.form("eager")
def _dots(query: Tensor, sources: Sequence[Tensor]) -> tuple[Tensor, tuple[()]]:
    return source_dots.reference(query, sources), ()


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
    inverse = inverse_rms(x, eps)
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


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """(..., 1) one over the root mean square; a norm reads `x` once and makes no squares of its size."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


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
    return out if out.dtype == sources[0].dtype else out.to(sources[0].dtype), ()
