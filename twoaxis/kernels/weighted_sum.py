"""The weighted sum over sources: the one primitive all history methods share.

    y_w = Σ_s ( static[w,s] + token[...,w,s] + channel[w,s,:] ) ⊙ x_s

Shapes: ... any leading dimensions (batch, time, heads), S sources, W ways, D width of a source.

Any of the three weight forms may be given; they add. The sources stay a list: they are never stacked or
copied, a read keeps references to them and its small weights, so what training remembers is linear in depth
however many sites read a source. Sums run in float32 at least and are cast once at the end.

A softmax read is `softmax` over small logits followed by this sum; the logits come from `source_dots` (queries
against keys of the caller's making) or `rms_logits` (fixed queries against RMS-normalised sources). `softmax_read.py`
fuses the three where queries are fixed. A source that several sums read is given to them through `share`.

Each operation has its readable form (`*_reference`, plain differentiable torch) and a form with its own backward.
Under `torch.compile` the readable form is what runs: the compiler fuses it better than a hand-written backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twoaxis.kernels.backward import differentiated, readable, reference_gradients
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
    if readable():
        return weighted_sum_reference(sources, static=static, token=token, channel=channel)
    if not differentiated(static, token, channel, *sources):
        return _sums(static, token, channel, sources)
    return _WeightedSum.apply(static, token, channel, *sources)  # type: ignore[no-any-return]


class Parcels:
    """What the readers of a source leave for its gradient, by backward pass; sums leave terms (g, coefficient).

    Passes over one graph may run inside one another (a hook or a recomputed block that differentiates) and in several
    threads, so none may touch another's terms.
    """

    def __init__(self) -> None:
        self.terms: dict[int, list[Any]] = {}

    def deposit(self, terms: Sequence[Any]) -> None:
        """Leave terms; where the source is never asked for its gradient they are forgotten when the pass ends."""
        task = torch._C._current_graph_task_id()
        if task not in self.terms:
            self.terms[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._forget, task))
        self.terms[task] += terms

    def _forget(self, task: int) -> None:
        self.terms.pop(task, None)

    def collect(self) -> list[Any]:
        """Take the terms of the backward pass that is running."""
        return self.terms.pop(torch._C._current_graph_task_id(), [])


class _Share(torch.autograd.Function):
    """The identity. Its backward runs after those of all readers and adds up what they left."""

    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.parcels = Parcels()
        return source.view_as(source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        terms = ctx.parcels.collect()
        if not terms:
            return grad
        total = _sum_of_products(terms)
        total = total if grad is None else total.add_(grad)
        return total.to(terms[0][0].dtype if grad is None else grad.dtype)


def share(source: Tensor) -> Tensor:
    """A source that several `weighted_sum`s will read: its gradient is formed once, after the last of them.

    Left to itself autograd makes a tensor of the source's size for every read and adds them up one by one; the first
    read of a backward pass, which has the most sources, then makes one for each of them while everything the forward
    pass has saved is still alive. A shared source instead gets references to the readers' gradients and their weights.

    The gradient that passes through the result itself is not complete, only the one of `source` is: hand the result to
    `weighted_sum` and keep `source` for everything else. Second derivatives take the usual way.
    """
    if readable() or not differentiated(source):
        return source
    return _Share.apply(source)  # type: ignore[no-any-return]


class _WeightedSum(torch.autograd.Function):
    """One pass over the sources forward, one backward; only references and the small weights are saved."""

    @staticmethod
    def forward(
        ctx: Any, static: Tensor | None, token: Tensor | None, channel: Tensor | None, *sources: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(static, token, channel, *sources)
        ctx.set_materialize_grads(False)
        ctx.gathered = [getattr(x.grad_fn, "parcels", None) if x.output_nr == 0 else None for x in sources]
        return _sums(static, token, channel, sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        static, token, channel, *sources = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return reference_gradients(_positional, (static, token, channel, *sources), needs, grads)
        ways = [(w, widen(g)) for w, g in enumerate(grads) if g is not None]
        if not ways:
            return (None,) * len(needs)
        d_static, d_token, d_channel = (
            torch.zeros_like(v) if need else None for v, need in zip((static, token, channel), needs[:3], strict=True)
        )
        product = torch.empty_like(ways[0][1]) if any(needs[:3]) else None
        # a term must not hold the graph that holds it, or a pass that breaks off leaves a circle behind
        fixed, moving = _together(static, token)
        fixed, moving, wide = (None if c is None else c.detach() for c in (fixed, moving, channel))
        d_sources: list[Tensor | None] = []
        for s, x in enumerate(sources):
            if product is not None:
                for w, g in ways:
                    _weight_gradients(d_static, d_token, d_channel, torch.mul(g, x, out=product), w, s)
            # the gradients as they came: what is deposited lives on, and wide copies would take twice the room
            given = [(grads[w], c) for w, _ in ways for c in _coefficients(fixed, moving, wide, w, s)]
            terms = [(g, c) for g, c in given if g is not None] if needs[3 + s] else []
            if terms and ctx.gathered[s] is not None:
                ctx.gathered[s].deposit(terms)
                terms = []
            d_sources.append(_sum_of_products(terms).to(x.dtype) if terms else None)
        return d_static, d_token, d_channel, *d_sources


def _positional(
    static: Tensor | None, token: Tensor | None, channel: Tensor | None, *sources: Tensor
) -> tuple[Tensor, ...]:
    return weighted_sum_reference(sources, static=static, token=token, channel=channel)


def _sums(
    static: Tensor | None, token: Tensor | None, channel: Tensor | None, sources: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    static, token = _together(static, token)
    totals: list[Tensor | None] = [None] * _ways(static, token, channel)
    for s, x in enumerate(sources):  # all ways of a source while it is in cache
        for w, total in enumerate(totals):
            terms = [(x, c) for c in _coefficients(static, token, channel, w, s)]
            totals[w] = _sum_of_products(terms, total)
    return tuple(total.to(sources[0].dtype) for total in totals if total is not None)


def _sum_of_products(terms: Iterable[tuple[Tensor, Tensor]], total: Tensor | None = None) -> Tensor:
    """`total`, in place, plus Σ x ⊙ coefficient; in the coefficients' dtype."""
    for x, coefficient in terms:
        total = widen(x) * coefficient if total is None else total.addcmul_(x, coefficient)
    assert total is not None
    return total


def _weight_gradients(
    d_static: Tensor | None, d_token: Tensor | None, d_channel: Tensor | None, product: Tensor, w: int, s: int
) -> None:
    if d_channel is not None:
        torch.sum(product.reshape(-1, product.shape[-1]), 0, out=d_channel[w, s])
    if d_token is not None:
        torch.sum(product, -1, out=d_token[..., w, s])
    if d_static is not None:
        d_static[w, s] = product.sum()


def _coefficient(weight: Tensor, form: str, w: int, s: int) -> Tensor:
    """The weight of way `w` and source `s`, shaped to multiply a source (..., D)."""
    return weight[..., w, s, None] if form == "token" else weight[w, s]


def _together(static: Tensor | None, token: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Scalars for all tokens and scalars per token multiply alike, so they are added once."""
    return (static, token) if static is None or token is None else (None, token + static)


def _coefficients(static: Tensor | None, token: Tensor | None, channel: Tensor | None, w: int, s: int) -> list[Tensor]:
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
    if readable() or not differentiated(query, *sources):
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
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return reference_gradients(lambda q, *s: source_dots_reference(q, s), (query, *sources), needs, (grad,))
        columns = grad.unsqueeze(-2).unbind(-1)  # of each source (..., W, 1)
        d_query = None
        if needs[0]:
            total = _sum_of_products([(x.unsqueeze(-2), column) for x, column in zip(sources, columns, strict=True)])
            d_query = total.sum_to_size(query.shape).to(query.dtype)
        ways = [(w, widen(q)) for w, q in enumerate(query.unbind(-2))]
        d_sources = [
            _sum_of_products([(q, column[..., w, :]) for w, q in ways]).to(x.dtype) if need else None
            for x, column, need in zip(sources, columns, needs[1:], strict=True)
        ]
        return d_query, *d_sources


def rms_logits_reference(source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
    """`rms_logits` as one reads it."""
    x, u = widen(source), widen(queries)
    inverse_rms = 1.0 if eps is None else torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    _, heads, width = u.shape
    keys = (x * inverse_rms).unflatten(-1, (heads, width))  # (..., H, D/H)
    if len(u) == 1:  # a compiler fuses this with what follows, a product with a matrix it leaves to itself
        return (keys * u[0]).sum(-1, keepdim=True)
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
        (..., H, n) in float32 at least; the logits of one query for all tokens lie side by side in memory.
    """
    if readable():
        return rms_logits_reference(source, queries, eps)
    if not differentiated(source, queries):
        return scaled(raw_logits(widen(source), widen(queries)), inverse_rms(source, eps))
    return _RmsLogits.apply(source, queries, eps)  # type: ignore[no-any-return]


class _RmsLogits(torch.autograd.Function):
    """Saves the source by reference, its inverse RMS and the logits, never the keys."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, queries: Tensor, eps: float | None) -> Tensor:
        inverse = inverse_rms(source, eps)
        logits = scaled(raw_logits(widen(source), widen(queries)), inverse)
        ctx.save_for_backward(source, queries, inverse, None if inverse is None else logits)
        ctx.eps = eps
        return logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, queries, inverse, logits = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            found = reference_gradients(
                lambda s, q: rms_logits_reference(s, q, ctx.eps), (source, queries), needs, (grad,)
            )
            return *found, None
        d_source, d_queries = logits_gradients(source, queries, inverse, logits, grad, needs)
        return None if d_source is None else d_source.to(source.dtype), d_queries, None


@full_precision
def logits_gradients(
    source: Tensor,
    queries: Tensor,
    inverse: Tensor | None,
    logits: Tensor | None,
    grad: Tensor,
    needs: Sequence[bool],
    total: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `rms_logits` for the source, in its routing dtype, and for the queries.

    Args:
        source: (..., D).
        queries: (n, H, D/H).
        inverse: (...) its inverse RMS; None where keys are not normalised.
        logits: (..., H, n) the result; needed where keys are normalised.
        grad: (..., H, n) of the result.
        needs: whether the source's and the queries' gradients are wanted.
        total: (..., D) what the source's gradient is added to, in place.
    """
    x, u = widen(source), widen(queries)
    _, heads, width = u.shape
    d_raw = scaled(grad, inverse).reshape(-1, *grad.shape[-2:]).permute(1, 2, 0)  # (H, n, N)
    d_queries = None
    if needs[0]:
        if total is not None and heads == 1 and total.is_contiguous():
            total.view(-1, width).addmm_(d_raw[0].mT, u[:, 0])
        else:
            through = torch.matmul(d_raw.mT, u.transpose(0, 1)).transpose(0, 1).reshape(x.shape)  # of (H, N, D/H)
            total = through if total is None else total.add_(through)
        if inverse is not None and logits is not None:
            # the RMS sees every channel, so all heads' logits pull on the source's length: by <d_source, source>,
            # which is what the logits say without another pass over the source
            pull = (grad * logits).sum((-2, -1)).mul_(inverse.square().div_(-x.shape[-1]))
            total.addcmul_(x, pull.unsqueeze(-1))
    if needs[1]:
        rows = x.reshape(-1, heads, width).transpose(0, 1)  # (H, N, D/H)
        d_queries = torch.matmul(d_raw, rows).transpose(0, 1).to(queries.dtype)
    return total, d_queries


def inverse_rms(source: Tensor, eps: float | None) -> Tensor | None:
    """(...), or None where keys are not normalised. A norm reads the source once and makes no squares of its size."""
    if eps is None:
        return None
    return torch.linalg.vector_norm(widen(source), dim=-1).square_().div_(source.shape[-1]).add_(eps).rsqrt_()


def raw_logits(x: Tensor, u: Tensor) -> Tensor:
    """Dot products (..., H, n), made as (H, n, N): products with few rows are faster than those with few columns."""
    _, heads, width = u.shape
    if heads == 1:
        return (u[:, 0] @ x.reshape(-1, width).mT).mT.reshape(*x.shape[:-1], 1, len(u))
    rows = x.reshape(-1, heads, width).transpose(0, 1)  # (H, N, D/H)
    found = torch.matmul(u.transpose(0, 1), rows.mT)
    return found.permute(2, 0, 1).reshape(*x.shape[:-1], heads, len(u))


def scaled(logits: Tensor, inverse: Tensor | None) -> Tensor:
    """Logits (..., H, n) of normalised keys from those of raw ones."""
    return logits if inverse is None else logits * inverse[..., None, None]
