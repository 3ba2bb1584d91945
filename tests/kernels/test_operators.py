"""What single operators promise beside the equality of their forms: exact, precise, finite, one node for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.numbers import close, randn
from twoaxis.kernels import precision, using
from twoaxis.kernels.history import rms_logits, softmax_read, weighted_sum
from twoaxis.kernels.rewrite import delta_rewrite
from twoaxis.kernels.sinkhorn import sinkhorn
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mix_streams(randn(2, 4), randn(3, 3)), "weights for 3 streams, the state has 2"),
        (lambda: read_streams(randn(2, 4), randn(3, 1)), "weights for 3 streams, the state has 2"),
        (lambda: mix_streams(randn(2, 4), randn(2, 2), randn(4)), "y and gain together"),
        (lambda: sinkhorn(randn(2, 2), iterations=2, first=0), "first must be the axis -1 or -2, got 0"),
        (
            lambda: delta_rewrite(randn(2, 8), randn(8), randn(), randn(2), k_eps=0.0),
            "k_eps=0.0: a direction of zero .* give at least 1e-12",
        ),
        (lambda: weighted_sum([], static=randn(1, 0)), "at least one source, got 0"),
        (lambda: weighted_sum([randn(2, 3)]), "give static, token or channel"),
        (
            lambda: weighted_sum([randn(2, 3), randn(2, 4)], static=randn(1, 2)),
            r"source 1 has shape \(2, 4\), source 0 has \(2, 3\)",
        ),
        (
            lambda: weighted_sum([randn(2, 3)], token=randn(2, 1, 2)),
            r"token weights have shape \(2, 1, 2\), these sources need \(2, 1, 1\)",
        ),
        (
            lambda: weighted_sum([randn(2, 3)], channel=randn(1, 1, 2)),
            r"channel weights have shape \(1, 1, 2\), these sources need \(1, 1, 3\)",
        ),
        (
            lambda: weighted_sum([randn(2, 3)], token=randn(2, 1, 1), static=randn(2, 1)),
            r"token weights have shape .* need \(2, 2, 1\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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


# Sums over a history, and the rewrite.


@pytest.mark.parametrize("heads", [None, 1, 2])
def test_a_softmax_read_is_an_average_by_heads(heads: int | None) -> None:
    sources = [randn(2, 3, 6, seed=i) for i in range(3)]
    logits = [randn(2, 3, *([] if heads is None else [heads]), seed=9 + i) for i in range(3)]
    weights = torch.stack(logits, -1).softmax(-1).unbind(-1)
    each = [w.unsqueeze(-1) if heads is None else w.repeat_interleave(6 // heads, -1) for w in weights]
    naive = torch.stack([3.0 * w * x for w, x in zip(each, sources, strict=True)]).sum(0)
    close(softmax_read(sources, logits, scale=3.0), naive)


def test_a_direction_of_zero_at_the_least_epsilon_has_finite_gradients() -> None:
    shapes = (3, 2, 8), (3, 8), (3,), (3, 2)
    leaves = [randn(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]
    leaves[1].zero_()
    out = delta_rewrite(*(t.requires_grad_() for t in leaves), k_eps=1e-12)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), leaves))


# Sinkhorn, of matrices [from, to].


@pytest.mark.parametrize("first", [-1, -2])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_step_by_step(iterations: int, eps: float, first: int) -> None:
    """Exponential, then alternate divisions; the first division is a softmax where there is an epsilon."""
    logits, m = randn(3, 4, 4, grad=True), None
    for t in range(iterations):
        m = logits.exp() if m is None else m
        m = m / (m.sum(first, keepdim=True) + (eps if t else 0.0)) + (0.0 if t else eps)
        m = m / (m.sum(-3 - first, keepdim=True) + eps)
    assert m is not None
    ours = sinkhorn(logits, iterations=iterations, eps=eps, first=first)
    close(ours, m)
    (found,), (want,) = (torch.autograd.grad(out, logits, randn(3, 4, 4, seed=1)) for out in (ours, m))
    close(found, want, 1e-11)


def test_reversed_order_is_the_package_s() -> None:
    package = pytest.importorskip("hyper_connections.manifold_constrained_hyper_connections")
    logits = 2 * randn(5, 4, 4, dtype=torch.float32)
    theirs = package.sinkhorn_knopps(logits, iters=7)
    torch.testing.assert_close(sinkhorn(logits, iterations=7, first=-2), theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sinkhorn(logits, iterations=7, first=-1), theirs, atol=1e-3)


@pytest.mark.parametrize("first", [-1, -2])
def test_sinkhorn_of_far_apart_logits_is_finite(first: int) -> None:
    """In float32, where exponentials of every entry of a column underflow; narrow logits are computed in it too."""
    logits = torch.tensor([[0.0, -300.0, -300.0], [0.0, -400.0, -300.0], [0.0, -200.0, -500.0]], requires_grad=True)
    m = sinkhorn(logits, iterations=20, first=first)
    torch.testing.assert_close(m.sum(-3 - first), torch.ones(3))
    (grad,) = torch.autograd.grad(m[0, 0] + 2 * m[1, 2], logits)
    assert torch.isfinite(grad).all()
    assert sinkhorn(logits.bfloat16(), iterations=2, first=first).dtype == torch.float32


@pytest.mark.parametrize(("eps", "first"), [(0.0, -1), (1e-3, -2)])
def test_a_compiler_meets_one_operation(eps: float, first: int) -> None:
    """Whole graphs, the same numbers and gradients, and none of the divisions in the graph."""
    graphs: list[str] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph

    def run(logits: Tensor) -> Tensor:
        return sinkhorn(logits, iterations=20, eps=eps, first=first)

    torch._dynamo.reset()
    logits, g = randn(5, 4, 4, grad=True), randn(5, 4, 4, seed=1)
    found, expected = torch.compile(run, backend=backend, fullgraph=True)(logits), run(logits)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, logits, g)[0], torch.autograd.grad(expected, logits, g)[0])
    assert len(graphs) == 1
    assert "twoaxis.sinkhorn" in graphs[0]
    assert "sum" not in graphs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operation_keeps_the_rules_of_operations(dtype: torch.dtype) -> None:
    logits, g = randn(2, 3, 4, 4, dtype=dtype), randn(2, 3, 4, 4, seed=1, dtype=torch.float32)
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn.default, (logits.clone().requires_grad_(), 3, 0.0, -1))
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn_backward.default, (logits, g, 3, 0.0, -1))
