"""The softmax read with fixed queries, whose backward pass runs once per source.

    logits[i, l] = < u_l , x_i / rms(x_i) >          all sites l that read source i: one matrix product
    p_l = softmax over i of logits[i, l]
    h_l = scale · Σ_i p_l[i] x_i

A reader's gradient g_l needs p_l[i] · (scale <g_l, x_i> - <g_l, h_l>) for the logit of every source and p_l[i] g_l for
the source itself. Both need g_l beside x_i. Made by the reader they fetch every source again for every site; made by
the source, after all its readers, they fetch every g_l while the source stays in cache, and nothing of the source's
size is made for single reads. So a reader only leaves g_l, its log-sum-exp and <g_l, h_l> with each source.

Sources are a list of tensors, not slots of one buffer: on the CPUs measured, products over a buffer with tokens as the
batch take 1.3 to 5 times as long as one `addcmul` per source (512 tokens of width 768, 16 sources: 1.8 against 1.4 ms
for the sum, 7.2 against 2.4 ms for the dot products), filling it 2.6 ms more, and a list needs no owner. Decoding one
token is the exception: there calls count and not bytes, and `token_read` makes as few of them as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.kernels.backward import differentiated, readable, reference_gradients
from twoaxis.kernels.precision import full_precision, routing_dtype, widen
from twoaxis.kernels.weighted_sum import (
    Parcels,
    inverse_rms,
    logits_gradients,
    raw_logits,
    rms_logits,
    rms_logits_reference,
    scaled,
    weighted_sum,
    weighted_sum_reference,
)


class Reading(NamedTuple):
    """What a reader leaves with a source.

    Attributes:
        column: which of the source's logits it used.
        weight: (..., H) of the source in its softmax.
        grad: (..., H, D/H) of its output.
        mean: (..., H) <grad, output>.
        scale: of the output.
    """

    column: int
    weight: Tensor
    grad: Tensor
    mean: Tensor
    scale: float


@full_precision
def open_source(x: Tensor, queries: Tensor, eps: float | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A source by heads, (..., H, D/H), and its logits (..., H) for each of the queries that will read it.

    The gradient that passes through the source by heads is not complete, only the one of `x` is: hand it to
    `softmax_read` or `weighted_sum` and keep `x` for everything else.

    Args:
        x: (..., D).
        queries: (n, H, D/H), see `rms_logits`.
        eps: inside the mean square; None leaves the keys un-normalised.
    """
    if readable() or not differentiated(x, queries):
        return x.unflatten(-1, queries.shape[1:]), rms_logits(x, queries, eps).unbind(-1)
    shared, *columns = _Source.apply(x, queries, eps)
    return shared, tuple(columns)


class _Source(torch.autograd.Function):
    """Saves the source by reference, its inverse RMS and its logits; forms all gradients when its readers are done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queries: Tensor, eps: float | None) -> tuple[Tensor, ...]:
        inverse = inverse_rms(x, eps)
        logits = scaled(raw_logits(widen(x), widen(queries)), inverse)
        ctx.save_for_backward(x, queries, inverse, None if inverse is None else logits)
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.parcels, ctx.readings = eps, Parcels(), Parcels()
        return x.unflatten(-1, queries.shape[1:]), *logits.unbind(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *columns: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, queries, inverse, logits = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            return *reference_gradients(_opened(ctx.eps), (x, queries), needs, (grad, *columns)), None
        by_heads = widen(x).unflatten(-1, queries.shape[1:])
        total = None if grad is None else widen(grad).clone()
        for g, coefficient in ctx.parcels.collect():
            total = g * coefficient if total is None else total.addcmul_(g, coefficient)
        d_columns = list(columns)
        readings = ctx.readings.collect()
        product = torch.empty_like(by_heads) if readings else None
        for column, weight, g, mean, scale in readings:
            d_logit = torch.mul(g, by_heads, out=product).sum(-1).mul_(scale).sub_(mean).mul_(weight)
            earlier = d_columns[column]
            d_columns[column] = d_logit if earlier is None else earlier + d_logit
            coefficient = (weight if scale == 1.0 else weight * scale).unsqueeze(-1)
            total = g * coefficient if total is None else total.addcmul_(g, coefficient)
        d_source = None if total is None else total.flatten(-2)
        if all(column is None for column in d_columns):
            return None if d_source is None else d_source.to(x.dtype), None, None
        zero = by_heads.new_zeros(by_heads.shape[:-1])
        d_logits = torch.stack([zero if column is None else column for column in d_columns], dim=-1)
        d_source, d_queries = logits_gradients(x, queries, inverse, logits, d_logits, needs, d_source)
        return d_source.to(x.dtype) if needs[0] and d_source is not None else None, d_queries, None


def _opened(eps: float | None) -> Any:
    def reference(x: Tensor, queries: Tensor) -> tuple[Tensor, ...]:
        return x.unflatten(-1, queries.shape[1:]), *rms_logits_reference(x, queries, eps).unbind(-1)

    return reference


def softmax_and_lse(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the last dimension and the log-sum-exp; the backward pass of both needs the softmax alone."""
    if readable() or not differentiated(logits):
        return logits.softmax(-1), logits.logsumexp(-1)
    return _SoftmaxAndLse.apply(logits)  # type: ignore[no-any-return]


class _SoftmaxAndLse(torch.autograd.Function):
    """Saves the softmax and not the logits beside it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights = logits.softmax(-1)
        ctx.save_for_backward(weights)
        return weights, logits.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor, d_lse: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (weights,) = ctx.saved_tensors
        mean = (weights * d_weights).sum(-1)
        return weights * (d_weights + (d_lse - mean).unsqueeze(-1))


def softmax_read_reference(sources: Sequence[Tensor], logits: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    """`softmax_read` as one reads it."""
    weights = torch.stack(list(logits), dim=-1).softmax(-1) * scale
    return weighted_sum_reference(sources, token=weights.unsqueeze(-2))[0]


@full_precision
def softmax_read(sources: Sequence[Tensor], logits: Sequence[Tensor], scale: float = 1.0) -> Tensor:
    """`scale` times the average of `sources` by the softmax of their `logits`.

    Args:
        sources: S tensors (..., H, D/H), those of `open_source` among others.
        logits: S tensors (..., H).
        scale: of the average.

    Returns:
        (..., H, D/H) in the sources' dtype.
    """
    if readable():
        return softmax_read_reference(sources, logits, scale)
    if not differentiated(*sources, *logits):
        return _average(sources, torch.stack(list(logits), dim=-1), scale)
    if sources[0].dtype != routing_dtype(sources[0].dtype):  # <grad, output> would have lost too many bits
        weights = torch.stack(list(logits), dim=-1).softmax(-1)
        weights = weights if scale == 1.0 else weights * scale
        return weighted_sum(sources, token=weights.unsqueeze(-2))[0]
    return _SoftmaxRead.apply(scale, len(sources), *sources, *logits)  # type: ignore[no-any-return]


@full_precision
def token_read(sources: Sequence[Tensor], query: Tensor, eps: float | None, scale: float = 1.0) -> Tensor:
    """The softmax read of one token at a time: `open_source` and `softmax_read` in as few calls as there can be.

    Between two reads of a decoder the weights of a sub-layer pass through the caches, so that the first use of any
    operation is dear (about 15 microseconds, not 1 or 2) and the second is cheap. So the few operations here are those
    of the decoder's own norms, with the query in the place of the norm's scale; and nothing is kept from read to read.

    Args:
        sources: S tensors (..., 1, D).
        query: (D,) with the key norm's scale folded in.
        eps: inside the keys' mean square; None leaves them un-normalised.
        scale: of the average.

    Returns:
        (..., 1, D) in the sources' dtype.
    """
    states = widen(torch.cat(list(sources), dim=-2))  # (..., S, D)
    query = widen(query)
    keys = states * query if eps is None else F.rms_norm(states, query.shape, query, eps)
    weights = keys.sum(-1, keepdim=True).softmax(-2)
    out = (states * (weights if scale == 1.0 else weights * scale)).sum(-2, keepdim=True)
    return out if out.dtype == sources[0].dtype else out.to(sources[0].dtype)


def _average(sources: Sequence[Tensor], logits: Tensor, scale: float) -> Tensor:
    weights = logits.softmax(-1)
    weights = weights if scale == 1.0 else weights * scale
    total: Tensor | None = None
    for x, weight in zip(sources, weights.unsqueeze(-2).unbind(-1), strict=True):
        total = widen(x) * weight if total is None else total.addcmul_(x, weight)
    assert total is not None
    return total.to(sources[0].dtype)


class _SoftmaxRead(torch.autograd.Function):
    """Saves references to the sources and their logits, the log-sum-exp and the output, which the sub-layer keeps."""

    @staticmethod
    def forward(ctx: Any, scale: float, count: int, *tensors: Tensor) -> Tensor:
        sources, columns = tensors[:count], tensors[count:]
        logits = torch.stack(columns, dim=-1)
        out = _average(sources, logits, scale)
        ctx.save_for_backward(logits.logsumexp(-1), out, *tensors)
        ctx.scale, ctx.count = scale, count
        opened = [getattr(x.grad_fn, "readings", None) if x.output_nr == 0 else None for x in sources]
        ctx.readings = [
            (found, column.output_nr - 1) if found is not None and column.grad_fn is x.grad_fn else None
            for found, x, column in zip(opened, sources, columns, strict=True)
        ]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        lse, out, *tensors = ctx.saved_tensors
        scale, count = ctx.scale, ctx.count
        if torch.is_grad_enabled():
            found = reference_gradients(
                lambda *t: softmax_read_reference(t[:count], t[count:], scale),
                tensors,
                ctx.needs_input_grad[2:],
                (grad,),
            )
            return None, None, *found
        grad = widen(grad)
        product = grad * out
        mean = product.sum(-1)
        d_sources: list[Tensor | None] = []
        d_columns: list[Tensor | None] = []
        for x, column, opened in zip(tensors[:count], tensors[count:], ctx.readings, strict=True):
            weight = torch.exp(column - lse)
            if opened is not None:
                readings, number = opened
                readings.deposit([Reading(number, weight, grad, mean, scale)])
                d_sources.append(None)
                d_columns.append(None)
                continue
            d_columns.append(torch.mul(grad, x, out=product).sum(-1).mul_(scale).sub_(mean).mul_(weight))
            d_sources.append((grad * (weight * scale).unsqueeze(-1)).to(x.dtype))
        return None, None, *d_sources, *d_columns
