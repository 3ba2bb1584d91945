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
the buffer as long again. Sums run in float32 at least and are cast once at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twoaxis.kernels.operator import operator
from twoaxis.kernels.precision import product, routing_dtype, widen


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
    for w in range(ways(static, token, channel)):
        terms = [
            widen(x) * weight.to(routing_dtype(dtype))
            for s, x in enumerate(sources)
            for weight in coefficients(static, token, channel, w, s)
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
    shape, count, width = sources[0].shape, len(sources), ways(static, token, channel)
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


def ways(static: Tensor | None, token: Tensor | None, channel: Tensor | None) -> int:
    """W of the weights that are given."""
    if static is not None:
        return static.shape[0]
    if token is not None:
        return token.shape[-2]
    assert channel is not None
    return channel.shape[0]


def coefficients(static: Tensor | None, token: Tensor | None, channel: Tensor | None, w: int, s: int) -> list[Tensor]:
    """The weights of way `w` and source `s`, shaped to multiply a source (..., D)."""
    found = [] if static is None else [static[w, s]]
    if token is not None:
        found.append(token[..., w, s, None])
    if channel is not None:
        found.append(channel[w, s])
    return found


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
