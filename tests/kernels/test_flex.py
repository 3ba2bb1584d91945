"""The form for GPUs: the same mask without a kernel, on the CPU (no gradients there), against the definition."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from twoaxis.kernels.flex import TILE, flex_form, flex_serves, window_mask
from twoaxis.window import window_attention

CPU = torch.device("cpu")


def pairs(n: int, m: int, window: int) -> Tensor:
    lag = torch.arange(m - n, m)[:, None] - torch.arange(m)
    return (lag >= 0) & (lag < window)


@given(n=st.integers(1, 600), more=st.integers(0, 400), window=st.integers(1, 500))
def test_tiles_are_those_with_a_visible_pair(n: int, more: int, window: int) -> None:
    m = n + more
    mask = window_mask(n, m, window, None, CPU)
    rows, columns = -(-n // TILE), -(-m // TILE)
    grid = torch.zeros(rows * TILE, columns * TILE, dtype=torch.bool)
    grid[:n, :m] = pairs(n, m, window)
    needed = grid.view(rows, TILE, columns, TILE).any(1).any(-1)
    visited = mask.to_dense()[0, 0].bool()
    assert visited.shape == needed.shape
    assert (visited & needed).equal(needed)
    # the last tile of queries may be short; nowhere else is a tile visited for nothing
    assert visited[:-1].equal(needed[:-1])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("n", "m", "window"), [(300, 300, 5), (140, 290, 130)])
def test_values_are_those_of_the_definition(
    heads: int, kv_heads: int, sinks: bool, documents: bool, n: int, m: int, window: int
) -> None:
    draw = torch.Generator().manual_seed(n + window)
    double = {"dtype": torch.float64, "generator": draw}
    q = torch.randn(2, heads, n, 16, **double)
    k = torch.randn(2, kv_heads, m, 16, **double)
    v = torch.randn(2, kv_heads, m, 8, **double)
    sink = torch.randn(heads, **double) if sinks else None
    reach = torch.randint(0, 200, (2, n), generator=draw) if documents else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without its kernel
        ours = flex_form(flex_attention, q, k, v, window, 0.3, sink, reach)
    turned = [t.transpose(1, 2) for t in (q, k, v)]
    truth = window_attention(
        turned[0], turned[1], turned[2], window, 1, scale=0.3, sink=sink, reach=reach, fused=False
    ).transpose(1, 2)
    torch.testing.assert_close(ours, truth, rtol=0, atol=1e-10)


def test_a_cpu_keeps_the_band() -> None:
    q = torch.randn(1, 2, 8, 64)
    assert not flex_serves(q, q)
