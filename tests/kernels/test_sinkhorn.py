"""Sinkhorn: step by step with gradients, and its properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from twoaxis.kernels.sinkhorn import sinkhorn

# Matrices are [from, to].


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def literal(logits: Tensor, iterations: int, eps: float, first: int) -> Tensor:
    """Exponential, then alternate divisions; the first division is a softmax where there is an epsilon."""
    last = -1 if first == -2 else -2
    m = logits.exp()
    for t in range(iterations):
        m = m / (m.sum(first, keepdim=True) + (eps if t else 0.0)) + (0.0 if t else eps)
        m = m / (m.sum(last, keepdim=True) + eps)
    return m


@pytest.mark.parametrize("first", [-1, -2])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_step_by_step(iterations: int, eps: float, first: int) -> None:
    logits = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    ours, theirs = (
        sinkhorn(logits, iterations=iterations, eps=eps, first=first),
        literal(logits, iterations, eps, first),
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    g = torch.randn_like(ours)
    (expected,) = torch.autograd.grad(theirs, logits, g)
    (found,) = torch.autograd.grad(ours, logits, g)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@given(st.integers(1, 8), st.integers(0, 2**16), st.sampled_from([0.1, 1.0, 3.0]))
def test_sinkhorn_is_doubly_stochastic(n: int, seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    m = sinkhorn(logits, iterations=20)
    assert (m >= 0).all()
    torch.testing.assert_close(m.sum(-2), torch.ones(2, n, dtype=torch.float64), rtol=1e-13, atol=1e-13)
    # the sums along the other axis converge; the spectral norm is at most the root of the two largest sums
    others = m.sum(-1).amax(-1)
    assert (torch.linalg.matrix_norm(m, 2) <= others.sqrt() * (1 + 1e-12)).all()
    converged = sinkhorn(logits / max(spread, 1.0), iterations=300)
    torch.testing.assert_close(converged.sum(-1), torch.ones(2, n, dtype=torch.float64), rtol=1e-8, atol=1e-8)
    assert torch.linalg.matrix_norm(converged, 2).max() <= 1 + 1e-8


def test_orders_agree_only_when_converged() -> None:
    logits = 2 * torch.randn(5, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    few = [sinkhorn(logits, iterations=2, first=first) for first in (-1, -2)]
    assert (few[0] - few[1]).abs().max() > 1e-3
    many = [sinkhorn(logits, iterations=2_000, first=first) for first in (-1, -2)]
    torch.testing.assert_close(many[0], many[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(few[1].sum(-1), torch.ones(5, 4, dtype=torch.float64))
    assert (few[1].sum(-2) - 1).abs().max() > 1e-3


def test_reversed_order_is_the_package_s() -> None:
    package = pytest.importorskip("hyper_connections.manifold_constrained_hyper_connections")
    logits = 2 * torch.randn(5, 4, 4)
    theirs = package.sinkhorn_knopps(logits, iters=7)
    torch.testing.assert_close(sinkhorn(logits, iterations=7, first=-2), theirs, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(sinkhorn(logits, iterations=7, first=-1), theirs, atol=1e-3)


def test_sinkhorn_of_far_apart_logits_is_finite() -> None:
    """In float32, where exponentials of every entry of a column underflow."""
    logits = torch.tensor([[0.0, -300.0, -300.0], [0.0, -400.0, -300.0], [0.0, -200.0, -500.0]], requires_grad=True)
    for first in (-1, -2):
        m = sinkhorn(logits, iterations=20, first=first)
        last = -1 if first == -2 else -2
        torch.testing.assert_close(m.sum(last), torch.ones(3))
        (grad,) = torch.autograd.grad(m[0, 0] + 2 * m[1, 2], logits)
        assert torch.isfinite(grad).all()


def test_sinkhorn_runs_wide_and_refuses_other_axes() -> None:
    assert sinkhorn(torch.zeros(2, 2).bfloat16(), iterations=2).dtype == torch.float32
    with pytest.raises(ValueError, match="first must be the axis -1 or -2, got 0"):
        sinkhorn(torch.zeros(2, 2), iterations=2, first=0)


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
    logits = torch.randn(5, 4, 4, dtype=torch.float64, requires_grad=True)
    found, expected = torch.compile(run, backend=backend, fullgraph=True)(logits), run(logits)
    g = torch.randn_like(expected)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, logits, g)[0], torch.autograd.grad(expected, logits, g)[0])
    assert len(graphs) == 1
    assert "twoaxis.sinkhorn" in graphs[0]
    assert "sum" not in graphs[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operation_keeps_the_rules_of_operations(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 3, 4, 4).to(dtype).requires_grad_()
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn.default, (logits, 3, 0.0, -1))
    backward = (logits.detach(), torch.randn(2, 3, 4, 4), 3, 0.0, -1)
    torch.library.opcheck(torch.ops.twoaxis.sinkhorn_backward.default, backward)
