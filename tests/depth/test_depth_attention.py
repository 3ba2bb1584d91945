"""Depth attention against torch's attention with a band mask over the depth axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import twoaxis
from twoaxis.depth.depth_attention import DepthAttention


def make(blocks: int = 3, width: int = 8, **options: Any) -> DepthAttention:
    made = twoaxis.stream("depth_attention", blocks=blocks, width=width, heads=options.pop("heads", 2), **options)
    assert isinstance(made, DepthAttention)
    made = made.double()
    with torch.no_grad():
        made.output.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return made


@given(
    window=st.one_of(st.none(), st.integers(1, 9)),
    blocks=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    inject=st.sampled_from(["add", "replace"]),
    shared=st.booleans(),
)
def test_equals_masked_attention_over_depth(
    window: int | None, blocks: int, heads: tuple[int, int], inject: str, shared: bool
) -> None:
    stream = make(blocks, window=window, heads=heads[0], kv_heads=heads[1], head_width=4, inject=inject, shared=shared)
    torch.manual_seed(blocks)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    maps = [torch.randn(8, 8, dtype=torch.float64) / 4 for _ in stream.sites]
    state, states, reads = stream.open(x), [], []
    for site, m in zip(stream.sites, maps, strict=True):
        states.append(state.value.x)
        seen = stream.read(state, site)
        reads.append(seen.x)
        state = stream.write(state, site, torch.tanh(seen.x @ m), seen, seen)

    h, oracle = x, []
    history: list[torch.Tensor] = []
    for i, m in enumerate(maps):
        row = 0 if shared else i
        history.append(h)
        depth = torch.stack(history, dim=2)  # (B, T, l+1, D)
        q = F.linear(h, stream.query[row]).unflatten(-1, (heads[0], 4)).unsqueeze(-2)
        rows = range(len(history))
        k, v = (
            torch.stack([F.linear(depth[:, :, r], w[0 if shared else r]) for r in rows], dim=2).unflatten(
                -1, (heads[1], 4)
            )
            for w in (stream.key, stream.value)
        )
        k, v = (t.transpose(2, 3).repeat_interleave(heads[0] // heads[1], dim=2) for t in (k, v))
        mask = torch.arange(len(history)) > i - (window or 99)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, :]).squeeze(-2).flatten(-2)
        read = F.linear(z, stream.output[row])
        read = h + read if inject == "add" else read
        oracle.append(read)
        h = (read if inject == "add" else h) + torch.tanh(read @ m)
    want = torch.stack(oracle)
    assert (torch.stack(reads) - want).abs().max() <= 1e-12 * max(1.0, want.abs().max().item())
    leaves = [x, *stream.parameters()]
    ours = torch.autograd.grad(stream.close(state).square().sum(), leaves, allow_unused=True)
    theirs = torch.autograd.grad(h.square().sum(), leaves, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        a, b = (torch.zeros(1) if g is None else g for g in (a, b))
        assert (a - b).abs().max() <= 1e-11 * max(1.0, b.abs().max().item())


def test_window_bounds_what_is_carried() -> None:
    stream = make(blocks=10, window=3)
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    state = stream.open(x)
    for site in stream.sites:
        assert len(state.value.ring.pieces) == min(site.index + 1, 3)
        seen = stream.read(state, site)
        state = stream.write(state, site, x, seen, seen)


def test_weights_sum_to_one_over_named_sources() -> None:
    stream = make(window=3, read_out=True)
    state = stream.open(torch.randn(1, 2, 8, dtype=torch.float64))
    for site in stream.sites:
        weights = stream.weights(state, site)
        assert weights is not None
        assert weights.shape == (1, 2, 2, len(stream.sources(site)))
        assert (weights.sum(-1) - 1).abs().max() <= 1e-14
        seen = stream.read(state, site)
        state = stream.write(state, site, seen.x, seen, seen)
    assert stream.sources(stream.sites[4]) == ("state before site 2", "state before site 3", "state before site 4")


def test_block_granularity_reads_once_per_block() -> None:
    stream = make(granularity="block")
    assert [site.kind for site in stream.sites if stream.sources(site)] == ["attention"] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"heads": 3}, r"heads \(3\) must divide the width \(8\)"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
        ({"inject": "multiply"}, "unknown inject 'multiply'.*it is one of add, replace"),
        ({"granularity": "token"}, "unknown granularity 'token'"),
        ({"head_width": 0}, "head_width must be at least 1, got 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("depth_attention", blocks=2, width=8, **options)
