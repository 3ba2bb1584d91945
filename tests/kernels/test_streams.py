"""What the operations on parallel streams are for, beside equality of their forms: exact, precise, finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.numbers import close, randn
from twoaxis.kernels import precision, using
from twoaxis.kernels.history import rms_logits
from twoaxis.kernels.streams import mix_streams, read_streams, stream_logits, stream_mean

FORMS = ("reference", "eager", "few_tokens")


def test_dtypes_follow_addition() -> None:
    h, w, gain, y = torch.randn(4, 2, 8), torch.randn(2, 2), torch.randn(2), torch.randn(4, 8)
    for form in FORMS:
        with using(form):
            assert mix_streams(h.bfloat16(), w).dtype == torch.bfloat16
            assert mix_streams(h.bfloat16(), w, y, gain).dtype == torch.float32
            assert mix_streams(h, w, y.bfloat16(), gain).dtype == torch.float32
            assert stream_logits(h.bfloat16(), torch.randn(3, 8), norm="rms", eps=1e-6)[0].dtype == torch.float32


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weights for 3 streams, the state has 2"):
        mix_streams(torch.zeros(2, 4), torch.zeros(3, 3))
    with pytest.raises(ValueError, match="y and gain together"):
        mix_streams(torch.zeros(2, 4), torch.zeros(2, 2), torch.zeros(4))
    with pytest.raises(ValueError, match="weights for 3 streams, the state has 2"):
        read_streams(torch.zeros(2, 4), torch.zeros(3, 1))


def test_a_layer_norm_survives_a_large_mean() -> None:
    """In float32, where a squared mean, or rows that met the mean, would leave nothing but rounding."""
    rows, x, g = randn(3, 256), randn(2048, 256, seed=1) + 100.0, randn(2048, 3, seed=2).abs()

    def grads(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.float().to(dtype).requires_grad_() for t in (x, rows)]
        out = stream_logits(leaves[0], leaves[1], norm="layer", eps=1e-5)[0]
        return out, *torch.autograd.grad(out, leaves, g.to(dtype))

    for found, want in zip(grads(torch.float32), grads(torch.float64), strict=True):
        close(found.double(), want, 1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_of_zeros_without_epsilon_is_finite(norm: str, form: str) -> None:
    state, rows = torch.zeros(3, 2, 8, requires_grad=True), torch.randn(4, 8)
    with using(form):
        out = stream_logits(state, rows, norm=norm, eps=0.0)[0]
    assert torch.equal(out, torch.zeros(3, 2, 4))
    out.sum().backward()
    assert state.grad is not None
    assert state.grad.isfinite().all()


@pytest.mark.parametrize("setting", ["tf32", "bf16", "ieee"])
@pytest.mark.parametrize("form", FORMS)
def test_products_are_never_narrow(form: str, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float32 products may be narrow they run in float64; the identity keeps every bit either way."""
    used: list[torch.dtype] = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: used.append(a.dtype) or product(a, b))
    h, y, rows = torch.randn(2, 3, 4, 1024), torch.randn(2, 3, 1024), torch.randn(5, 1024)
    products: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, products.fp32_precision = products.fp32_precision, setting
    try:
        with using(form):
            leaves = [h.clone().requires_grad_(), y.clone().requires_grad_()]
            out = mix_streams(leaves[0], torch.eye(4), leaves[1], torch.zeros(4))
            assert torch.equal(out, h)
            assert torch.equal(torch.autograd.grad(out, leaves, h)[0], h)
            assert torch.equal(read_streams(h, torch.eye(4)[1, :, None])[0], h[..., 1, :])
            stream_logits(h, rows, norm="rms", eps=1e-6)
            for heads in (1, 2):
                rms_logits(leaves[0], rows.view(5, heads, -1), eps=1e-6).sum().backward()
        assert used
        assert set(used) == {torch.float32 if setting == "ieee" else torch.float64}
        assert precision.narrow_products("cpu") is (setting != "ieee")
    finally:
        products.fp32_precision = before


def test_the_mean_of_equal_streams_is_exact() -> None:
    x = torch.randn(1000)
    for n in range(1, 12):
        assert torch.equal(stream_mean(x.expand(n, 1000)), x)
    assert not torch.equal(x.expand(7, 1000).mean(0), x)
    h = randn(3, 5, 4)
    close(stream_mean(h), h.mean(-2), 1e-14)


def test_streams_that_are_copies_do_not_run_token_by_token() -> None:
    """Equal streams at the start, and one gradient for all of a sum."""
    y, weights, gain, read = torch.randn(1, 96, 64), torch.rand(1, 96, 4, 4), torch.rand(1, 96, 4), torch.rand(1, 96, 4)
    grad = torch.randn(1, 96, 1, 64).expand(1, 96, 4, 64)
    leaves = [t.requires_grad_() for t in (torch.randn(1, 96, 1, 64).expand(1, 96, 4, 64), weights, y, gain)]
    read.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out, passed = read_streams(leaves[0], read.unsqueeze(-1))
        mixed = mix_streams(passed, *leaves[1:4])
        torch.autograd.backward((out, mixed), (torch.ones_like(out), grad))
    assert sum(e.count for e in seen.key_averages() if e.key in ("aten::bmm", "aten::select", "aten::mm")) < 30
