"""Softmax reads against their reference: values, every gradient, and what must not leak between backward passes."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support import numbers
from twoaxis.kernels.softmax_read import (
    open_source,
    softmax_and_lse,
    softmax_read,
    softmax_read_reference,
    token_read,
)
from twoaxis.kernels.weighted_sum import rms_logits_reference, share, weighted_sum, weighted_sum_reference

randn = functools.partial(numbers.randn, grad=True)


def chain(x: Tensor, maps: Tensor, queries: Tensor, scale: float, fused: bool) -> Tensor:
    """A network in depth: every site reads all sources so far, its output is the next source, used elsewhere too."""
    heads, sites = queries.shape[1], queries.shape[0]
    sources: list[Tensor] = []
    logits: list[tuple[Tensor, ...]] = []
    total, new = x, x
    for site in range(sites):
        if fused:
            opened, columns = open_source(new, queries[site:], 1e-3)
        else:
            opened = new.unflatten(-1, (heads, -1))
            columns = rms_logits_reference(new, queries[site:], 1e-3).unbind(-1)
        sources.append(opened)
        logits.append(columns)
        now = [column[site - number] for number, column in enumerate(logits)]
        read = softmax_read if fused else softmax_read_reference
        h = read(sources, now, scale).flatten(-2)
        if site == 1:  # a plain sum of the same sources, and the source itself
            weights = torch.stack(now, dim=-1).sigmoid().unsqueeze(-2)
            add = weighted_sum if fused else weighted_sum_reference
            h = h + add(sources, token=weights)[0].flatten(-2) + new
        new = torch.tanh(h @ maps[site])
        total = total + new
    return total


@given(heads=st.sampled_from([1, 2]), sites=st.integers(1, 4), scale=st.sampled_from([1.0, 3.0]))
def test_equals_the_reference(heads: int, sites: int, scale: float) -> None:
    leaves = [randn(2, 3, 6, seed=1), randn(sites, 6, 6, seed=2), randn(sites, heads, 6 // heads, seed=3)]
    ours, theirs = (chain(*leaves, scale=scale, fused=fused) for fused in (True, False))
    assert (ours - theirs).abs().max() < 1e-12
    probe = randn(2, 3, 6, seed=4).detach()
    for a, b in zip(torch.autograd.grad(ours, leaves, probe), torch.autograd.grad(theirs, leaves, probe), strict=True):
        assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max().item())


@given(
    count=st.integers(1, 5),
    eps=st.sampled_from([None, 0.0, 1e-2]),
    scale=st.sampled_from([1.0, 3.0]),
    narrow=st.booleans(),
)
def test_one_token_at_a_time(count: int, eps: float | None, scale: float, narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float64
    sources = [randn(2, 1, 6, seed=s).detach().to(dtype) for s in range(count)]
    query = randn(6, seed=9).detach().float() if narrow else randn(6, seed=9).detach()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        ours = token_read(sources, query, eps, scale)
    wide = [s.to(query.dtype) for s in sources]
    theirs = softmax_read_reference(
        wide, [rms_logits_reference(s, query.view(1, 1, -1), eps)[..., 0, 0] for s in wide], scale
    )
    assert ours.dtype == dtype
    assert ours.shape == (2, 1, 6)
    assert (ours - theirs).abs().max() <= (2**-8 * theirs.abs().max() if narrow else 1e-13)


def test_second_derivatives() -> None:
    leaves = (randn(2, 4, seed=1), randn(3, 4, 4, seed=2), randn(3, 1, 4, seed=3))
    assert torch.autograd.gradgradcheck(lambda *t: chain(*t, scale=2.0, fused=True), leaves)


def test_softmax_and_lse() -> None:
    logits = randn(2, 3, 5, seed=1)
    weights, lse = softmax_and_lse(logits)
    assert torch.equal(weights, logits.softmax(-1))
    assert torch.equal(lse, logits.logsumexp(-1))
    assert torch.autograd.gradcheck(softmax_and_lse, (logits,))
    assert torch.autograd.gradgradcheck(softmax_and_lse, (logits,))


def test_backward_passes_do_not_see_each_other() -> None:
    leaves = [randn(2, 6, seed=1), randn(3, 6, 6, seed=2), randn(3, 1, 6, seed=3)]
    out = chain(*leaves, scale=1.0, fused=True).sum()
    want = torch.autograd.grad(chain(*leaves, scale=1.0, fused=False).sum(), leaves)
    for subset in ([1], [2], [0, 2], [0, 1, 2], [0, 1, 2]):  # readers run, their sources' nodes do not always
        got = torch.autograd.grad(out, [leaves[i] for i in subset], retain_graph=True)
        for i, a in zip(subset, got, strict=True):
            assert (a - want[i]).abs().max() < 1e-11, (subset, i)


def test_two_futures_of_one_source_add_up() -> None:
    x, queries = randn(3, 4, seed=1), randn(2, 1, 4, seed=2)

    def reads(fused: bool) -> Tensor:
        if fused:
            a, columns = open_source(x, queries, None)
            b, others = open_source(x * 2.0, queries, None)
            return sum(softmax_read([a, b], [columns[i], others[i]]).square().sum() for i in (0, 1, 1))  # type: ignore[return-value]
        a, b = (t.unflatten(-1, (1, -1)) for t in (x, x * 2.0))
        columns, others = (rms_logits_reference(t, queries, None).unbind(-1) for t in (x, x * 2.0))
        return sum(softmax_read_reference([a, b], [columns[i], others[i]]).square().sum() for i in (0, 1, 1))  # type: ignore[return-value]

    ours, theirs = (torch.autograd.grad(reads(fused), [x, queries]) for fused in (True, False))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("fused", [True, False])
def test_recomputed_blocks_have_the_same_gradients(fused: bool) -> None:
    leaves = [randn(2, 6, seed=1), randn(3, 6, 6, seed=2), randn(3, 1, 6, seed=3)]
    plain = torch.autograd.grad(chain(*leaves, scale=1.0, fused=False).sum(), leaves)
    again = checkpoint(lambda *t: chain(*t, scale=1.0, fused=fused), *leaves, use_reentrant=False)
    assert isinstance(again, Tensor)
    for a, b in zip(torch.autograd.grad(again.sum(), leaves), plain, strict=True):
        assert (a - b).abs().max() < 1e-11


@given(ways=st.integers(1, 3), forms=st.sets(st.sampled_from(["static", "token", "channel"]), min_size=1))
def test_a_shared_source_gets_the_whole_gradient(ways: int, forms: set[str]) -> None:
    leaves = [randn(2, 5, seed=s) for s in range(3)]
    shapes = {"static": (ways, 3), "token": (2, ways, 3), "channel": (ways, 3, 5)}
    weights = {form: randn(*shapes[form], seed=9 + i) for i, form in enumerate(sorted(forms))}

    def total(fused: bool) -> Tensor:
        sources = [share(x) for x in leaves] if fused else leaves
        add = weighted_sum if fused else weighted_sum_reference
        outs = [*add(sources, **weights), *add(sources[::-1], **weights)]
        return sum((out.square().sum() for out in outs), leaves[0].sum())

    wanted = [*leaves, *weights.values()]
    for a, b in zip(*(torch.autograd.grad(total(f), wanted) for f in (True, False)), strict=True):
        assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max().item())


def test_narrow_sources_and_frozen_ones() -> None:
    x, queries = torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(1, 1, 8).requires_grad_()
    a, (la,) = open_source(x, queries, 1e-6)
    b, (lb,) = open_source(-x, queries, 1e-6)
    out = softmax_read([a, b], [la, lb])
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert queries.grad is not None
    assert queries.grad.abs().max() > 0
