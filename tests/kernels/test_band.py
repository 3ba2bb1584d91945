"""The three forms of the band against each other: values, every gradient, second derivatives, rows kept apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twoaxis.kernels import band
from twoaxis.kernels.band import band_attention, band_pays, band_reference, chunk_of

FORMS = {"chunked": band._chunked, "gathered": band._gathered}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(
    n: int, prefix: int, heads: tuple[int, int], sink: bool, reach: int | None, lead: tuple[int, ...] = (2,)
) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    q = randn(*lead, heads[0], n, 4, seed=1).requires_grad_()
    k = randn(*lead, heads[1], n + prefix, 4, seed=2).requires_grad_()
    v = randn(*lead, heads[1], n + prefix, 3, seed=3).requires_grad_()
    sinks = randn(heads[0], seed=4).requires_grad_() if sink else None
    generator = torch.Generator().manual_seed(5)
    return [q, k, v], sinks, None if reach is None else torch.randint(0, reach, (*lead, n), generator=generator)


@given(
    form=st.sampled_from(sorted(FORMS)),
    n=st.integers(1, 150),
    window=st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 100])),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    sink=st.booleans(),
    packed=st.booleans(),
    lead=st.sampled_from([(2,), (), (2, 3)]),
)
def test_forms_equal_the_reference(
    form: str,
    n: int,
    window: int,
    share: float,
    heads: tuple[int, int],
    sink: bool,
    packed: bool,
    lead: tuple[int, ...],
) -> None:
    leaves, sinks, reach = inputs(n, int(share * (window - 1)), heads, sink, window + 3 if packed else None, lead)
    ours = FORMS[form](leaves[0], leaves[1], leaves[2], window, 0.7, sinks, reach)
    theirs = band_reference(leaves[0], leaves[1], leaves[2], window, 0.7, sinks, reach)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-13
    if sinks is not None:
        leaves = [*leaves, sinks]
    probe = randn(*theirs.shape, seed=9)
    for got, want in zip(*(torch.autograd.grad(y, leaves, probe) for y in (ours, theirs)), strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("window", [2, 20])
def test_second_derivatives(window: int) -> None:
    (q, k, v), sink, reach = inputs(23, 1, (2, 1), True, 30, (1,))
    assert sink is not None

    def run(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        return band_attention(q, k, v, window, 0.7, sink, reach)

    assert torch.autograd.gradcheck(run, (q, k, v, sink), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, sink), fast_mode=True)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_of_one_argument_only(which: int) -> None:
    leaves = [t.detach() for t in inputs(40, 0, (2, 2), False, None)[0]]
    leaves[which].requires_grad_()
    got, want = (
        torch.autograd.grad(f(leaves[0], leaves[1], leaves[2], 5, 0.7).sum(), leaves[which])[0]
        for f in (band_attention, band_reference)
    )
    assert (got - want).abs().max() <= 1e-13
    assert which == 1 or want.abs().max() > 0.1


@pytest.mark.parametrize("window", [3, 20])
def test_a_row_that_is_not_finite_stays_alone(window: int) -> None:
    q, k, v = (randn(3, 2, 50, 4, seed=s) for s in range(3))
    clean = band_attention(q, k, v, window, 0.5)
    for t in (q, k, v):
        t[1] = torch.nan
    spoilt = band_attention(q, k, v, window, 0.5)
    assert torch.equal(spoilt[[0, 2]], clean[[0, 2]])
    assert spoilt[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_wide_in_both_passes(dtype: torch.dtype) -> None:
    narrow = [randn(2, 2, 60, 8, seed=s, dtype=dtype).requires_grad_() for s in range(3)]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    probe = randn(2, 2, 60, 8, seed=9, dtype=dtype)
    ours = band_attention(narrow[0], narrow[1], narrow[2], 7, 0.3)
    exact = band_attention(wide[0], wide[1], wide[2], 7, 0.3)
    assert torch.equal(ours, exact.to(dtype))
    for got, want in zip(
        torch.autograd.grad(ours, narrow, probe), torch.autograd.grad(exact, wide, probe.float()), strict=True
    ):
        assert torch.equal(got, want.to(dtype))


def test_autocast_narrows_neither_pass() -> None:
    leaves = [randn(1, 2, 60, 8, seed=s, dtype=torch.float32).requires_grad_() for s in range(3)]

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(band_attention(leaves[0], leaves[1], leaves[2], 7, 0.3).sum(), leaves)

    plain = gradients()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def test_activation_checkpointing_gives_the_same_bits() -> None:
    leaves = inputs(60, 0, (4, 2), False, None)[0]

    def run(*t: Tensor) -> Tensor:
        return band_attention(t[0], t[1], t[2], 7, 0.3).square().sum()

    stored = torch.autograd.grad(run(*leaves), leaves)
    again = torch.autograd.grad(checkpoint(run, *leaves, use_reentrant=False), leaves)
    assert all(torch.equal(a, b) for a, b in zip(stored, again, strict=True))


def test_chunks_follow_the_window() -> None:
    assert [chunk_of(w) for w in (1, 4, 16, 33, 34, 64, 65, 128, 1000)] == [16, 16, 16, 16, 32, 32, 32, 64, 64]


def test_the_band_is_taken_where_it_leaves_enough_out() -> None:
    assert not band_pays(8, 64, 64, 4), "44 keys of 64 left out by 8 heads are fewer logits than the layout costs"
    assert band_pays(64, 64, 64, 4)
    assert band_pays(8, 128, 128, 16)
    assert not band_pays(1000, 64, 64, 16), "a tile of 32 keys is half of the axis"
    assert not band_pays(8, 1, 16, 16), "decoding"


def test_memory_and_work_are_linear_in_the_axis() -> None:
    from twoaxis.base.meter import Meter

    def measured(n: int) -> tuple[int, int]:
        leaves = [torch.randn(1, 2, n, 16, requires_grad=True) for _ in range(3)]
        with Meter() as meter:
            band_attention(leaves[0], leaves[1], leaves[2], 16, 0.25).sum().backward()
        return meter.flops, meter.peak

    for small, large in zip(measured(512), measured(2048), strict=True):
        assert 3.7 <= large / small <= 4.05


@pytest.mark.slow
@pytest.mark.parametrize("window", [4, 40])
def test_compiled_forms_equal_the_reference(window: int) -> None:
    leaves, sink, reach = inputs(150, 2, (4, 2), True, window + 3)
    assert sink is not None
    leaves = [*leaves, sink]

    def run(f: Any) -> tuple[Tensor, ...]:
        y = f(leaves[0], leaves[1], leaves[2], window, 0.7, leaves[3], reach)
        return y, *torch.autograd.grad((y * randn(*y.shape, seed=9)).sum(), leaves)

    for got, want in zip(run(torch.compile(band_attention, fullgraph=True)), run(band_reference), strict=True):
        assert (got - want).abs().max() <= 1e-11 * max(1.0, want.abs().max().item())
