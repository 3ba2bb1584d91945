"""What `test_every_form` does not ask of attention: shapes at random, rows and positions kept apart, edges, memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.support.numbers import close, randn
from twoaxis.base.meter import Meter
from twoaxis.kernels import attention_blocked, attention_fused
from twoaxis.kernels.attention import attention
from twoaxis.kernels.attention_band import band_pays
from twoaxis.kernels.attention_fused import TILE, window_mask
from twoaxis.kernels.dispatch import target
from twoaxis.kernels.operator import _Apply


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of the blocked form, the last one short."""
    monkeypatch.setattr(attention_blocked, "LOGITS", 1)
    monkeypatch.setattr(attention_blocked, "SMALLEST", 16)


def run(form: str, *inputs: Tensor | None, window: int | None, scale: float = 0.7) -> Tensor:
    """A form by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return _Apply.apply(attention, attention.forms[form], None, {"window": window, "scale": scale}, *inputs)  # type: ignore[no-any-return]


@given(
    form=st.sampled_from(["tiles", "blocked"]),
    n=st.integers(1, 150),
    window=st.one_of(st.integers(1, 16), st.sampled_from([20, 33, 64, 100, None])),
    share=st.sampled_from([0.0, 0.4, 1.0]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    sink=st.booleans(),
    packed=st.booleans(),
    lead=st.sampled_from([(2,), (), (2, 3)]),
)
@pytest.mark.usefixtures("small_chunks")
def test_any_shape(
    form: str,
    n: int,
    window: int | None,
    share: float,
    heads: tuple[int, int],
    sink: bool,
    packed: bool,
    lead: tuple[int, ...],
) -> None:
    form = "blocked" if window is None else form
    m = n + int(share * ((window or 10) - 1))
    q, k, v = (randn(*lead, heads[i > 0], m if i else n, 4 - i // 2, seed=i, grad=True) for i in range(3))
    sinks = randn(heads[0], seed=4, grad=True) if sink else None
    reach = torch.randint(0, (window or 20) + 3, (*lead, n), generator=torch.Generator().manual_seed(5))
    given = (q, k, v, None, sinks, reach if packed else None)
    ours, theirs = run(form, *given, window=window), attention.reference(*given, window=window, scale=0.7)
    close(ours, theirs, 1e-13)
    leaves, probe = [t for t in given[:5] if t is not None], randn(*theirs.shape, seed=9)
    for got, want in zip(*(torch.autograd.grad(y, leaves, probe) for y in (ours, theirs)), strict=True):
        assert (got - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())


@pytest.mark.parametrize("window", [None, 3])
def test_no_queries(window: int | None) -> None:
    """An empty chunk, also by the reference, which runs alone under the transforms of torch."""
    q, k, v = randn(2, 4, 0, 4), randn(2, 2, 5, 4), randn(2, 2, 5, 3)
    for run in (attention, attention.reference):
        assert run(q, k, v, None, None, None, window=window, scale=0.7).shape == (2, 4, 0, 3)


FORMS = [("flash", None), ("tiles", 5), ("tiles", 20), ("blocked", 5), ("blocked", None)]


@pytest.mark.parametrize(("form", "window"), FORMS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("what", ["key", "value"])
@pytest.mark.usefixtures("small_chunks")
def test_what_is_no_number_spoils_those_who_see_it(form: str, window: int | None, documents: bool, what: str) -> None:
    if form == "flash" and (documents or what == "value"):
        pytest.skip("torch's kernel takes no documents, and its values are multiplied by zero weights too")
    q, k, v = (randn(2, 2, 70, 4, seed=s) for s in range(3))
    reach = torch.arange(70).remainder(40).expand(2, 70) if documents else None
    clean = run(form, q, k, v, None, None, reach, window=window)
    (k if what == "key" else v)[1, 0, 33, 2] = torch.nan
    seen = torch.arange(70) - 33
    seen = (seen >= 0) & (seen < (window or 70)) & (torch.ones(70).bool() if reach is None else seen <= reach[0])
    for found in (
        run(form, q, k, v, None, None, reach, window=window),
        attention.reference(q, k, v, None, None, reach, window=window, scale=0.7),
    ):
        assert found[1, 0].isnan().any(-1).equal(seen)
        close(found[1, 0, ~seen], clean[1, 0, ~seen], 1e-13)
        close(found[[0, 1], [1, 1]], clean[[0, 1], [1, 1]], 1e-13)


@pytest.mark.parametrize(("form", "window"), [("tiles", 5), ("blocked", None)])
@pytest.mark.parametrize("logit", [0.0, -10.0, -20.0, -40.0])
def test_the_gradient_of_a_small_sink(form: str, window: int | None, logit: float) -> None:
    """In float32: its weight of 1e-18 must not come out as one less the others."""
    q, k, v = (randn(2, 2, 60, 8, seed=s) for s in range(3))
    sink, probe = torch.tensor([logit, logit / 2]), randn(2, 2, 60, 8, seed=9)
    want = sink.double().requires_grad_()
    attention.reference(q, k, v, None, want, None, window=window, scale=0.5).backward(probe)
    got = sink.requires_grad_()
    run(form, q.float(), k.float(), v.float(), None, got, None, window=window, scale=0.5).backward(probe.float())
    assert got.grad is not None
    assert want.grad is not None
    torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("window", [None, 5])
def test_any_scale(window: int | None, scale: float) -> None:
    q, k, v = (randn(8, 2, 70, 4, seed=s, grad=True) for s in range(3))
    ours = attention(q, k, v, None, None, None, window=window, scale=scale)
    theirs = attention.reference(q, k, v, None, None, None, window=window, scale=scale)
    close(ours, theirs, 1e-13)
    pairs = zip(*(torch.autograd.grad(y.square().sum(), [q, k, v]) for y in (ours, theirs)), strict=True)
    assert all((a - b).abs().max() <= 1e-12 for a, b in pairs)


@pytest.mark.parametrize("form", ["flash", "tiles", "blocked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_wide_in_both_passes(form: str, dtype: torch.dtype) -> None:
    narrow = [randn(2, 2, 60, 8, seed=s, dtype=dtype).requires_grad_() for s in range(3)]
    wide = [t.detach().float().requires_grad_() for t in narrow]
    probe, window = randn(2, 2, 60, 8, seed=9, dtype=dtype), 7 if form == "tiles" else None
    ours, exact = (run(form, *t, None, None, None, window=window) for t in (narrow, wide))
    assert torch.equal(ours, exact.to(dtype))
    found, want = torch.autograd.grad(ours, narrow, probe), torch.autograd.grad(exact, wide, probe.float())
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, want, strict=True))


def test_the_band_is_taken_where_it_leaves_enough_out() -> None:
    def pays(rows: int, queries: int, keys: int, window: int) -> bool:
        return band_pays(torch.empty(rows, queries, 4), torch.empty(rows, keys, 4), window=window, scale=1.0)

    assert not pays(8, 64, 64, 4), "44 keys of 64 left out by 8 heads are fewer logits than the layout costs"
    assert pays(64, 64, 64, 4)
    assert pays(8, 128, 128, 16)
    assert not pays(1000, 64, 64, 16), "a tile of 32 keys is half of the axis"
    assert not pays(8, 1, 16, 16), "decoding"
    assert pays(8, 4096, 4096, 256)
    assert not pays(8, 4096, 4096, 257), "the weights of a wide band are too many to be saved"


@pytest.mark.parametrize("device", ["cpu", None])
@pytest.mark.parametrize(
    ("window", "documents", "sink"),
    [(None, False, False), (None, True, False), (None, True, True), (16, True, False), (700, False, True)],
)
def test_memory_is_linear_in_the_axis(device: str | None, window: int | None, documents: bool, sink: bool) -> None:
    """Both passes, whatever is masked; counted on shapes without numbers."""

    def peak(n: int) -> int:
        q, k, v = (torch.empty(2, 8, n, 32, device="meta", requires_grad=True) for _ in range(3))
        reach = torch.empty(2, n, dtype=torch.long, device="meta") if documents else None
        sinks = torch.empty(8, device="meta", requires_grad=True) if sink else None
        with target(device), Meter() as meter:
            attention(q, k, v, None, sinks, reach, window=window, scale=0.2).sum().backward()
        return meter.peak

    small, large = peak(1024), peak(4096)
    assert large <= 4.1 * small
    assert large <= 30 * 2 * 8 * 4096 * 32 * 4, "at most 30 tensors of the size of the queries"


@pytest.mark.slow
@pytest.mark.parametrize(("window", "documents"), [(None, False), (None, True), (4, True), (40, True)])
def test_compiled_forms_equal_the_reference(window: int | None, documents: bool) -> None:
    n = 600 if window is None else 150
    leaves = [randn(2, 4 if not i else 2, n + (2 if i and window else 0), 4, seed=i, grad=True) for i in range(3)]
    sink = None if window is None else randn(4, seed=4, grad=True)
    reach = torch.arange(n).remainder(90).expand(2, n) if documents else None
    inputs = (*leaves, None, sink, reach)
    leaves = [*leaves, *([] if sink is None else [sink])]
    torch._dynamo.reset()

    def both(f: Any) -> tuple[Tensor, ...]:
        y = f(*inputs, window=window, scale=0.7)
        return y, *torch.autograd.grad((y * randn(*y.shape, seed=9)).sum(), leaves)

    for got, want in zip(both(torch.compile(attention, fullgraph=True)), both(attention.reference), strict=True):
        assert (got - want).abs().max() <= 1e-11 * max(1.0, want.abs().max().item())


# The form for GPUs: the same mask without a kernel, on the CPU (no gradients there), against the definition.


@given(n=st.integers(1, 600), more=st.integers(0, 400), window=st.integers(1, 500))
def test_tiles_are_those_with_a_visible_pair(n: int, more: int, window: int) -> None:
    m = n + more
    mask = window_mask(n, m, window, None, torch.device("cpu"))
    rows, columns = -(-n // TILE), -(-m // TILE)
    grid = torch.zeros(rows * TILE, columns * TILE, dtype=torch.bool)
    lag = torch.arange(m - n, m)[:, None] - torch.arange(m)
    grid[:n, :m] = (lag >= 0) & (lag < window)
    needed = grid.view(rows, TILE, columns, TILE).any(1).any(-1)
    visited = mask.to_dense()[0, 0].bool()
    assert visited.shape == needed.shape
    assert (visited & needed).equal(needed)
    # the last tile of queries may be short; nowhere else is a tile visited for nothing
    assert visited[:-1].equal(needed[:-1])


@pytest.mark.parametrize(("sinks", "documents"), [(False, False), (True, True)])
@pytest.mark.parametrize(("n", "m", "window"), [(300, 300, 5), (140, 290, 130), (140, 290, None)])
def test_the_mask_for_gpus(
    sinks: bool, documents: bool, n: int, m: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, kv_heads = 4, 2
    monkeypatch.setattr(attention_fused, "_kernel", lambda: flex_attention)
    q, k, v = randn(2, heads, n, 16), randn(2, kv_heads, m, 16, seed=1), randn(2, kv_heads, m, 8, seed=2)
    sink = randn(heads, seed=3) if sinks else None
    reach = torch.randint(0, 200, (2, n), generator=torch.Generator().manual_seed(4)) if documents else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without its kernel
        ours, _ = attention.forms["flex"].forward(q, k, v, None, sink, reach, window=window, scale=0.3)
    close(ours, attention.reference(q, k, v, None, sink, reach, window=window, scale=0.3), 1e-10)
