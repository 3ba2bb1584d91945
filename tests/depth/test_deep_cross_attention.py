"""DeepCrossAttention: GRN versions, ways, k-DCA, the ReLU's slope, placement. Golden files: tests/test_goldens.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close, randn
from tests.support.streams import composed, moved, run, toys
from twoaxis.depth import counts
from twoaxis.depth.counts import count
from twoaxis.depth.deep_cross_attention import DeepCrossAttention

WIDTH, BLOCKS = 8, 5
PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")


def make(
    kinds: Sequence[str] | Sequence[Sequence[str]] = PLAIN_BLOCK,
    blocks: int = BLOCKS,
    random: bool = True,
    **options: Any,
) -> DeepCrossAttention:
    """A stream, with parameters far from their start unless told."""
    stream = twoaxis.stream("deep_cross_attention", blocks=blocks, width=WIDTH, kinds=kinds, **options).double()
    assert isinstance(stream, DeepCrossAttention)
    return moved(stream, 1.0, start=False) if random else stream


def embedding() -> Tensor:
    return randn(2, 3, WIDTH, seed=9, grad=True)


def test_the_start_is_ones_and_zeros() -> None:
    stream = make(random=False)
    assert all(torch.equal(p, torch.ones_like(p)) for p in stream.static.values())
    assert all(torch.equal(p, torch.zeros_like(p)) for p in stream.token.values())
    assert len(stream.static) == len(stream.token) == BLOCKS + 1
    assert not make(version=2).token


@pytest.mark.parametrize("relu", ["trainable", "literal"])
def test_w_learns_only_with_a_slope_at_zero(relu: str) -> None:
    """The published ReLU gives w a gradient of exactly zero at its start; the clamp does not."""
    stream = make(random=False, relu=relu)
    names = {f"token.{block}" for block in range(BLOCKS + 1)}
    assert set(stream.dead()) == (names if relu == "literal" else set())
    run(stream, embedding()).square().sum().backward()
    for w in stream.token.values():
        assert w.grad is not None
        rows = w.grad.abs().amax(-1)
        assert bool((rows == 0).all() if relu == "literal" else (rows > 0).all())


def test_dead_names_rows_and_follows_the_values() -> None:
    stream = make(relu="literal")
    assert stream.dead() == {}
    with torch.no_grad():
        stream.token["2"][1].zero_()
    assert set(stream.dead()) == {"token.2[1]"}
    run(stream, embedding()).sum().backward()
    grad = stream.token["2"].grad
    assert grad is not None
    assert (grad.abs().amax(-1) == 0).tolist() == [False, True, False]


@pytest.mark.slow
def test_the_slope_survives_the_compiler() -> None:
    stream = make(random=False)
    torch.compile(composed(stream), fullgraph=True)(embedding()).square().sum().backward()
    compiled = [w.grad for w in stream.token.values()]
    again = make(random=False)
    run(again, embedding()).square().sum().backward()
    for got, want in zip(compiled, (w.grad for w in again.token.values()), strict=True):
        assert got is not None
        assert want is not None
        close(got, want, 1e-10)


def test_published_parameters() -> None:
    stream = twoaxis.stream("deep_cross_attention", blocks=6, width=512)
    # lucidrains' count for this size without its norm scales
    assert count(stream).parameters == sum(p.numel() for p in stream.parameters()) == 49152 - 7 * 512
    assert sum(len(stream.ways(site)) - 1 for site in stream.sites) == 2 * 6


def test_ways_and_sources() -> None:
    stream = make(MIXED_BLOCK, window=2)
    assert [stream.ways(site) for site in stream.sites[:3]] == [("x",), ("q", "k", "v"), ("x",)]
    assert {make(("parallel",)).ways(s) for s in make(("parallel",)).sites} == {("q", "k", "v", "x")}
    assert {make(ways="single").ways(s) for s in make().sites} == {("x",)}
    first = {site.block: site for site in stream.layout.sites if site.first}
    assert stream.sources(first[0]) == ("embedding",)
    assert stream.sources(first[2]) == ("embedding", "block 0", "block 1")
    assert stream.sources(first[3]) == ("embedding", "overflow", "block 1", "block 2")
    assert stream.sources(stream.layout.out) == ("embedding", "overflow", "block 3", "block 4")
    assert stream.sources(stream.sites[1]) == ()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_weights_reproduce_the_read_of_equal_channels(version: int) -> None:
    """Vector weights are shown as their mean over channels, which is what acts on a source with equal channels."""
    stream = make(version=version, window=2, blocks=1)
    x = torch.full((2, 3, WIDTH), 0.7, dtype=torch.float64)
    state = stream.open(x)
    weights = stream.weights(state, stream.sites[0])
    seen = stream.read(state, stream.sites[0])
    assert weights is not None
    assert weights.shape == (2, 3, 3, 1)
    assert seen.k is not None
    close(seen.k.mean(-1), 0.7 * weights[..., 1, 0])


def test_a_block_without_attention_reads_once() -> None:
    stream = make([PLAIN_BLOCK, ("mlp",), PLAIN_BLOCK], blocks=3)
    assert {block: len(read.ways) for block, read in stream.grns.items()} == {0: 3, 1: 1, 2: 3, 3: 1}


def test_placement_decides_per_way() -> None:
    """Only the attention on: q, k, v are GRNs while the residual stays plain. Only the first site on: one GRN."""
    stream = make(MIXED_BLOCK, placement="attention")
    assert {read.ways for read in stream.grns.values()} == {("q", "k", "v")}
    assert BLOCKS not in stream.grns
    x = embedding()
    out, steps, _ = trace(stream, x, toys(stream))
    total = x
    for step in steps:
        assert torch.equal(step["seen"].x, total)
        assert (step["seen"].q is not None) == (step["site"].kind == "attention")
        total = total + step["y"]
    assert torch.equal(out, total)
    assert {read.ways for read in make(MIXED_BLOCK, placement="mixer").grns.values()} == {("x",)}


def test_cost() -> None:
    slots = BLOCKS * (BLOCKS + 1) // 2
    cost = counts.count(make())
    assert cost.flops == 5 * WIDTH * (3 * slots + BLOCKS + 1)
    assert cost.reads == slots + BLOCKS + 1
    # all slots of the last block, the residual and its contribution so far
    assert cost.live == (BLOCKS + 2) * WIDTH
    assert counts.count(make(version=2, ways="single")).flops == 2 * WIDTH * (slots + BLOCKS + 1)
    # k = 1: 1, 2, 3, 3, 3 slots, then 3; the sum is added to before blocks 3, 4 and the head
    assert counts.count(make(version=1, window=1)).flops == 2 * WIDTH * (3 * 12 + 3) + 3 * WIDTH
    # a mixer's output is added to k and v in every block, and once more to the block's contribution
    assert counts.count(make(MIXED_BLOCK)).flops == cost.flops + 3 * WIDTH * BLOCKS


def test_narrow_increments_add_up_in_the_dtype_of_the_stream() -> None:
    """As under autocast: contributions are summed in float32, so the start is plain to float32's rounding."""
    stream = make(random=False, window=1).float()
    plain = twoaxis.stream("standard", blocks=BLOCKS, width=WIDTH)
    x = embedding().detach().float()
    functions = toys(stream, torch.float32)
    outs = []
    for each in (stream, plain):
        out, _, state = trace(each, x, [lambda *ways, f=f: f(*ways).bfloat16() for f in functions])
        outs.append(out)
        assert all(t.dtype == torch.float32 for t in each.pack(state))
    close(outs[0], outs[1], 1e-2)  # one rounding of an increment to bfloat16 may go the other way
    assert (outs[0] - outs[1]).abs().mean() <= 1e-3 * outs[1].abs().mean()
