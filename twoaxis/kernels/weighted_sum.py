"""The weighted sum over sources: the one primitive all history methods share.

    y_w = Σ_s ( static[w,s] + token[...,w,s] + channel[w,s,:] ) ⊙ x_s

Shapes: ... any leading dimensions (batch, time, heads), S sources, W ways, D width of a source.

Any of the three weight forms may be given; they add. The sources stay a list: they are never stacked or
copied, a read keeps references to them and its small weights, so what training remembers is linear in depth
however many sites read a source. Sums run in float32 at least and are cast once at the end.

A softmax read is `softmax` over small logits followed by this sum; the logits come from `source_dots` (queries
against keys of the caller's making) or `rms_logits` (fixed queries against RMS-normalised sources).

Each operation has its readable form (`*_reference`, plain differentiable torch) and a form with its own backward.
Under `torch.compile` the readable form is what runs: the compiler fuses it better than a hand-written backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.precision import full_precision, routing_dtype, widen


def weighted_sum_reference(
    sources: Sequence[Tensor],
    *,
    static: Tensor | None = None,
    token: Tensor | None = None,
    channel: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The sum as one reads it: one multiply and one add per way and source."""
    outs = []
    for w in range(_ways(static, token, channel)):
        total: Tensor | None = None
        for s, source in enumerate(sources):
            x = widen(source)
            for weight, form in ((static, "static"), (token, "token"), (channel, "channel")):
                if weight is not None:
                    term = x * _coefficient(weight, form, w, s)
                    total = term if total is None else total + term
        assert total is not None
        outs.append(total.to(sources[0].dtype))
    return tuple(outs)


@full_precision
def weighted_sum(
    sources: Sequence[Tensor],
    *,
    static: Tensor | None = None,
    token: Tensor | None = None,
    channel: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Mix `sources` into one tensor per way.

    Args:
        sources: S tensors (..., D) of one shape and dtype.
        static: (W, S) one scalar per way and source, shared by all tokens.
        token: (..., W, S) one scalar per token, way and source.
        channel: (W, S, D) one weight per channel.

    Returns:
        W tensors (..., D) in the sources' dtype.
    """
    _check(sources, static, token, channel)
    wide = routing_dtype(sources[0].dtype)
    static, token, channel = (None if w is None else w.to(wide) for w in (static, token, channel))
    if torch.compiler.is_compiling():
        return weighted_sum_reference(sources, static=static, token=token, channel=channel)
    return _WeightedSum.apply(static, token, channel, *sources)  # type: ignore[no-any-return]


class _WeightedSum(torch.autograd.Function):
    """One pass over the sources forward, one backward; only references and the small weights are saved."""

    @staticmethod
    def forward(
        ctx: Any, static: Tensor | None, token: Tensor | None, channel: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(static, token, channel, *sources)
        totals: list[Tensor] = []
        wide = routing_dtype(sources[0].dtype)
        for w in range(_ways(static, token, channel)):
            total = torch.zeros(sources[0].shape, dtype=wide, device=sources[0].device)
            for s, x in enumerate(sources):
                for coefficient in _coefficients(static, token, channel, w, s):
                    total.addcmul_(x, coefficient)
            totals.append(total.to(sources[0].dtype))
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        static, token, channel, *sources = ctx.saved_tensors
        needs = ctx.needs_input_grad
        d_static = torch.zeros_like(static) if needs[0] else None
        d_token = torch.zeros_like(token) if needs[1] else None
        d_channel = torch.zeros_like(channel) if needs[2] else None
        d_sources: list[Tensor | None] = []
        wide_grads = [None if g is None else widen(g) for g in grads]
        for s, x in enumerate(sources):
            d_x = torch.zeros_like(x, dtype=routing_dtype(x.dtype)) if needs[3 + s] else None
            for w, g in enumerate(wide_grads):
                if g is None:
                    continue
                if d_x is not None:
                    for coefficient in _coefficients(static, token, channel, w, s):
                        d_x.addcmul_(g, coefficient)
                if d_static is not None or d_token is not None or d_channel is not None:
                    _weight_gradients(d_static, d_token, d_channel, g * x, w, s)
            d_sources.append(None if d_x is None else d_x.to(x.dtype))
        return d_static, d_token, d_channel, *d_sources


def _weight_gradients(
    d_static: Tensor | None, d_token: Tensor | None, d_channel: Tensor | None, product: Tensor, w: int, s: int
) -> None:
    if d_channel is not None:
        d_channel[w, s] = product.reshape(-1, product.shape[-1]).sum(0)
    if d_token is not None:
        d_token[..., w, s] = product.sum(-1)
    if d_static is not None:
        d_static[w, s] = product.sum()


def _coefficient(weight: Tensor, form: str, w: int, s: int) -> Tensor:
    """The weight of way `w` and source `s`, shaped to multiply a source (..., D)."""
    return weight[..., w, s, None] if form == "token" else weight[w, s]


def _coefficients(static: Tensor | None, token: Tensor | None, channel: Tensor | None, w: int, s: int) -> list[Tensor]:
    if static is not None and token is not None:
        token, static = token + static, None
    forms = ((static, "static"), (token, "token"), (channel, "channel"))
    return [_coefficient(weight, form, w, s) for weight, form in forms if weight is not None]


def _ways(static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> int:
    if static is not None:
        return static.shape[0]
    if token is not None:
        return token.shape[-2]
    assert channel is not None
    return channel.shape[0]


def _check(sources: Sequence[Tensor], static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> None:
    if not sources:
        raise ValueError("weighted_sum needs at least one source, got 0")
    if static is None and token is None and channel is None:
        raise ValueError("weighted_sum needs weights: give static, token or channel")
    shape, count = sources[0].shape, len(sources)
    for i, source in enumerate(sources):
        if source.shape != shape:
            raise ValueError(f"source {i} has shape {tuple(source.shape)}, source 0 has {tuple(shape)}")
    ways = _ways(static, token, channel)
    expected = {
        "static": (static, (ways, count)),
        "token": (token, (*shape[:-1], ways, count)),
        "channel": (channel, (ways, count, shape[-1])),
    }
    for form, (weight, want) in expected.items():
        if weight is not None and tuple(weight.shape) != tuple(want):
            raise ValueError(f"{form} weights have shape {tuple(weight.shape)}, these sources need {want}")


def source_dots_reference(query: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """`source_dots` as one reads it."""
    return torch.stack([(widen(query) * widen(s).unsqueeze(-2)).sum(-1) for s in sources], dim=-1)


@full_precision
def source_dots(query: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """Dot products of W queries with S sources.

    Args:
        query: (..., W, D) per token, or (W, D) shared by all tokens.
        sources: S tensors (..., D).

    Returns:
        (..., W, S) in float32 at least.
    """
    if torch.compiler.is_compiling():
        return source_dots_reference(query, sources)
    return _SourceDots.apply(query, *sources)  # type: ignore[no-any-return]


class _SourceDots(torch.autograd.Function):
    """Saves references to the query and the sources, no widened copies and no products."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(query, *sources)
        return source_dots_reference(query, sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, *sources = ctx.saved_tensors
        wide = widen(query)
        d_query = None
        if ctx.needs_input_grad[0]:
            total = torch.zeros((*grad.shape[:-1], query.shape[-1]), dtype=wide.dtype, device=query.device)
            for s, x in enumerate(sources):
                total.addcmul_(widen(x).unsqueeze(-2), grad[..., s, None])
            d_query = total.sum_to_size(query.shape).to(query.dtype)
        d_sources = [
            (grad[..., s, None] * wide).sum(-2).to(x.dtype) if ctx.needs_input_grad[1 + s] else None
            for s, x in enumerate(sources)
        ]
        return d_query, *d_sources


def rms_logits_reference(source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
    """`rms_logits` as one reads it."""
    x, u = widen(source), widen(queries)
    inverse_rms = 1.0 if eps is None else torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    _, heads, width = u.shape
    keys = (x * inverse_rms).unflatten(-1, (heads, width))  # (..., H, D/H)
    return torch.einsum("...hd,nhd->...hn", keys, u)


@full_precision
def rms_logits(source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
    """Logits of one source for every fixed query that will ever read it: one small matrix product.

        s[..., h, n] = < queries[n, h], (source / rms(source))_h >

    Args:
        source: (..., D).
        queries: (n, H, D/H), with the key norm's scale folded in; H = 1 unless the read has heads.
        eps: inside the mean square; None leaves the source un-normalised.

    Returns:
        (..., H, n) in float32 at least.
    """
    if torch.compiler.is_compiling():
        return rms_logits_reference(source, queries, eps)
    return _RmsLogits.apply(source, queries, eps)  # type: ignore[no-any-return]


class _RmsLogits(torch.autograd.Function):
    """Saves the source by reference, its inverse RMS and the logits, never the keys."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
        x, u = widen(source), widen(queries)
        _, heads, width = u.shape
        inverse_rms = None if eps is None else torch.rsqrt(x.square().mean(-1) + eps)  # (...)
        raw = torch.einsum("...hd,nhd->...hn", x.unflatten(-1, (heads, width)), u)
        logits = raw if inverse_rms is None else raw * inverse_rms[..., None, None]
        ctx.save_for_backward(source, queries, inverse_rms, logits if eps is not None else None)
        ctx.eps = eps
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, queries, inverse_rms, logits = ctx.saved_tensors
        x, u = widen(source), widen(queries)
        _, heads, width = u.shape
        if torch.is_grad_enabled() and inverse_rms is not None:
            # a second derivative sees through what was saved, so that is made anew from the source
            inverse_rms = torch.rsqrt(x.square().mean(-1) + ctx.eps)
            logits = rms_logits_reference(source, queries, ctx.eps)
        scaled = grad if inverse_rms is None else grad * inverse_rms[..., None, None]  # (..., H, n)
        d_source = d_queries = None
        if ctx.needs_input_grad[0]:
            d_source = torch.einsum("...hn,nhd->...hd", scaled, u).flatten(-2)
            if inverse_rms is not None:
                # the RMS sees every channel, so all heads' logits pull on the source's length
                pull = (grad * logits).sum((-2, -1)) * inverse_rms.square() / x.shape[-1]
                d_source = d_source - x * pull.unsqueeze(-1)
            d_source = d_source.to(source.dtype)
        if ctx.needs_input_grad[1]:
            rows = x.unflatten(-1, (heads, width)).flatten(0, -3)  # (N, H, D/H)
            d_queries = torch.einsum("bhn,bhd->nhd", scaled.flatten(0, -3), rows).to(queries.dtype)
        return d_source, d_queries, None
