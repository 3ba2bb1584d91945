"""The primitive against its readable reference, values and every gradient, and what it keeps for the backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import numbers
from twoaxis.kernels.weighted_sum import (
    Parcels,
    rms_logits,
    rms_logits_reference,
    share,
    source_dots,
    source_dots_reference,
    weighted_sum,
    weighted_sum_reference,
)

randn = functools.partial(numbers.randn, grad=True)


def agree(ours: Any, theirs: Any, leaves: list[Tensor], bound: float = 1e-12) -> None:
    ours, theirs = ([t] if isinstance(t, Tensor) else list(t) for t in (ours, theirs))
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= bound
    probes = [randn(*t.shape, seed=7).detach() for t in theirs]
    for a, b in zip(
        torch.autograd.grad(ours, leaves, probes), torch.autograd.grad(theirs, leaves, probes), strict=True
    ):
        assert (a - b).abs().max() <= bound * max(1.0, b.abs().max().item())


forms = st.sets(st.sampled_from(["static", "token", "channel"]), min_size=1)


@given(count=st.integers(1, 6), ways=st.integers(1, 4), forms=forms, lead=st.lists(st.integers(1, 3), max_size=3))
def test_equals_the_reference(count: int, ways: int, forms: set[str], lead: list[int]) -> None:
    sources = [randn(*lead, 5, seed=s) for s in range(count)]
    shapes = {"static": (ways, count), "token": (*lead, ways, count), "channel": (ways, count, 5)}
    weights = {form: randn(*shapes[form], seed=20 + i) for i, form in enumerate(sorted(forms))}
    agree(weighted_sum(sources, **weights), weighted_sum_reference(sources, **weights), [*sources, *weights.values()])


@given(count=st.integers(1, 5), ways=st.integers(1, 3), shared=st.booleans())
def test_dots_equal_the_reference(count: int, ways: int, shared: bool) -> None:
    sources = [randn(2, 3, 5, seed=s) for s in range(count)]
    query = randn(ways, 5, seed=9) if shared else randn(2, 3, ways, 5, seed=9)
    agree(source_dots(query, sources), source_dots_reference(query, sources), [query, *sources])


@given(queries=st.integers(1, 4), heads=st.sampled_from([1, 2, 4]), eps=st.sampled_from([None, 1e-6, 0.5]))
def test_logits_equal_the_reference(queries: int, heads: int, eps: float | None) -> None:
    source, u = randn(2, 3, 8, seed=1), randn(queries, heads, 8 // heads, seed=2)
    agree(rms_logits(source, u, eps), rms_logits_reference(source, u, eps), [source, u])


@pytest.mark.parametrize("operation", ["sum", "dots", "logits"])
def test_second_derivatives(operation: str) -> None:
    sources = [randn(2, 3, seed=s) for s in range(2)]
    if operation == "sum":
        weights = randn(1, 2, seed=5)
        torch.autograd.gradgradcheck(lambda w, *s: weighted_sum(s, static=w)[0], (weights, *sources))
    elif operation == "dots":
        torch.autograd.gradgradcheck(lambda q, *s: source_dots(q, s), (randn(2, 3, seed=5), *sources))
    else:
        torch.autograd.gradgradcheck(lambda s, u: rms_logits(s, u, 1e-3), (sources[0], randn(2, 1, 3, seed=5)))


def saved_bytes(count: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of distinct tensors saved by reads of every prefix of `count` sources, and bytes of the sources."""
    sources = [randn(4, 64, seed=s).detach().to(dtype).requires_grad_() for s in range(count)]
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    outs = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for n in range(1, count + 1):
            weights = torch.randn(4, 1, n).requires_grad_()
            outs.append(weighted_sum(sources[:n], token=weights.softmax(-1))[0])
    return sum(kept.values()), sum(s.numel() * s.element_size() for s in sources)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_saved_is_linear_in_depth(dtype: torch.dtype) -> None:
    for count in (8, 32):
        saved, sources = saved_bytes(count, dtype)
        small = sum(3 * 4 * 4 * n for n in range(1, count + 1))  # logits, weights and their copy, four tokens each
        assert saved <= sources + small, (count, saved, sources)


def test_narrow_sources_are_summed_wide() -> None:
    sources = [torch.full((1, 4), 1.0, dtype=torch.bfloat16)] + [torch.full((1, 4), 2.0**-9, dtype=torch.bfloat16)] * 64
    (total,) = weighted_sum(sources, static=torch.ones(1, 65))
    assert total.dtype == torch.bfloat16
    assert total[0, 0].item() == 1.125  # a bfloat16 running sum would stay at 1


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ([], {"static": torch.ones(1, 0)}, "at least one source, got 0"),
        ([torch.ones(2, 3)], {}, "give static, token or channel"),
        ([torch.ones(2, 3), torch.ones(2, 4)], {"static": torch.ones(1, 2)}, r"source 1 has shape \(2, 4\)"),
        ([torch.ones(2, 3)], {"static": torch.ones(1, 2)}, r"static weights have shape \(1, 2\).*\(1, 1\)"),
        ([torch.ones(2, 3)], {"token": torch.ones(3, 1, 1)}, r"token weights have shape \(3, 1, 1\)"),
        ([torch.ones(2, 3)], {"channel": torch.ones(1, 1, 4)}, r"channel weights"),
    ],
)
def test_bad_shapes_are_named(sources: list[Tensor], weights: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weighted_sum(sources, **weights)


def test_a_shared_source_keeps_gradients_in_their_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """What readers leave lives until the source's turn: bfloat16 stays bfloat16, and the sum is that of wide copies."""
    left: list[tuple[Tensor, Tensor]] = []
    deposit = Parcels.deposit
    monkeypatch.setattr(Parcels, "deposit", lambda self, terms: (left.extend(terms), deposit(self, terms))[1])
    torch.manual_seed(0)
    source = torch.randn(2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(2, 1) for _ in range(3)]
    upstream = [torch.randn(2, 2, 5, 8).bfloat16() for _ in weights]
    shared = share(source)
    outs = [weighted_sum([shared], static=w) for w in weights]
    torch.autograd.backward([y for ys in outs for y in ys], [g for gs in upstream for g in gs])
    assert len(left) == 6
    assert {g.dtype for g, _ in left} == {torch.bfloat16}
    wide = sum(w[i, 0] * gs[i].float() for w, gs in zip(weights, upstream, strict=True) for i in range(2))
    assert isinstance(wide, Tensor)
    assert source.grad is not None
    torch.testing.assert_close(source.grad.float(), wide, rtol=2**-7, atol=1e-6)
