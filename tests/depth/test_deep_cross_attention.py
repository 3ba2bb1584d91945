"""DeepCrossAttention: GRN versions, ways, k-DCA, the ReLU's slope, placement. Golden files: tests/test_goldens.py."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close
from tests.support.streams import built, composed, embedding, run, toys

WIDTH, BLOCKS = 8, 5
PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")
make = partial(built, "deep_cross_attention", blocks=BLOCKS)


@pytest.mark.parametrize("relu", ["trainable", "literal"])
def test_w_learns_only_with_a_slope_at_zero(relu: str) -> None:
    """The published ReLU gives w a gradient of exactly zero at its start; the clamp does not."""
    stream = make(by=0.0, relu=relu)
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
    stream = make(by=0.0)
    torch.compile(composed(stream), fullgraph=True)(embedding()).square().sum().backward()
    compiled = [w.grad for w in stream.token.values()]
    again = make(by=0.0)
    run(again, embedding()).square().sum().backward()
    for got, want in zip(compiled, (w.grad for w in again.token.values()), strict=True):
        assert got is not None
        assert want is not None
        close(got, want, 1e-10)


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


def test_narrow_increments_add_up_in_the_dtype_of_the_stream() -> None:
    """As under autocast: contributions are summed in float32, so the start is plain to float32's rounding."""
    stream = make(by=0.0, window=1).float()
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
