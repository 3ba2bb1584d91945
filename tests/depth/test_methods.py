"""What is particular to single methods and that no equation says: lifetimes, ways, sources, memory, precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close
from tests.support.streams import built, composed, embedding, moved, run, toys
from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.model.config import ModelConfig
from twoaxis.model.variant import make_contender

PLAIN_BLOCK, MIXED_BLOCK = ("attention", "mlp"), ("mixer", "attention", "mlp")

# Attention Residuals and its deltas.


def test_mhar_is_four_heads() -> None:
    """An alias that stands for options gives way to those that are given, wherever a stream is named."""
    assert twoaxis.stream("mhar", blocks=2, width=8).config.heads == 4
    assert twoaxis.stream("MHAR", blocks=2, width=8, heads=2).config.heads == 2
    config = ModelConfig(stream="mhar:eps=0.1")
    assert (config.stream, config.stream_options) == ("attention_residuals", {"heads": 4, "eps": 0.1})
    assert make_contender("mhar").stream_options == {"heads": 4}


def test_the_controls_of_heads_are_one_head() -> None:
    """One as it is, and one whose logits are as large as those of a sum over a quarter of the channels."""
    config = AttentionResiduals.Config(heads=4, scale=2.0)
    assert AttentionResiduals.controls(config) == ({"heads": 1}, {"heads": 1, "scale": 1.0})
    assert AttentionResiduals.controls(AttentionResiduals.Config()) == ()


def delta_walk(blocks: int = 4, **options: Any) -> tuple[twoaxis.Stream, list[list[Tensor]], list[Tensor]]:
    """The sources before each site and the residuals, of increments that are powers of ten."""
    stream = twoaxis.stream("delta_attention_residuals", blocks=blocks, width=2, **options).double()
    x = torch.ones(1, 1, 2, dtype=torch.float64)
    state, sources, residuals = stream.open(x), [], [x]
    for site in stream.sites:
        sources.append([source.x for source in state.value.kept])
        seen = stream.read(state, site)
        state = stream.write(state, site, x * 10.0 ** (site.index + 1), seen, seen)
        residuals.append(residuals[-1] + x * 10.0 ** (site.index + 1))
    assert torch.equal(stream.close(state), residuals[-1])  # the residual is the output, whatever was routed
    return stream, sources, residuals


def test_the_released_difference_is_of_the_state_and_the_last_source() -> None:
    """d_1 = h_1 - d_0 is an increment, d_2 = h_2 - d_1 is one and the embedding, d_3 = h_3 - d_2 ..."""
    stream, sources, h = delta_walk(block_size=2, delta="recursive")
    d = [h[0]]
    for n in (1, 2, 3):
        d.append(h[2 * n] - d[-1])
    assert [s[0, 0, 0].item() for s in sources[7]] == [s[0, 0, 0].item() for s in d] == [1, 110, 11001, 1100110]
    # a source is known one sub-layer after it is complete
    assert [len(stream.sources(site)) for site in stream.sites] == [0, 1, 1, 2, 2, 3, 3, 4]


# Depth attention.


def test_weights_sum_to_one_over_named_sources() -> None:
    stream = built("depth_attention", heads=2, window=3, read_out=True)
    state = stream.open(embedding())
    for site in stream.sites:
        weights = stream.weights(state, site)
        assert weights.shape == (2, 3, 2, len(stream.sources(site)))
        assert (weights.sum(-1) - 1).abs().max() <= 1e-14
        seen = stream.read(state, site)
        state = stream.write(state, site, seen.x, seen, seen)
    assert stream.sources(stream.sites[4]) == ("state before site 2", "state before site 3", "state before site 4")


# Vertical Attention.


def test_zero_vectors_are_harmless_with_an_epsilon() -> None:
    x = embedding().detach()
    x[0, 0] = 0.0
    for kind in ("l2", "rms", "none"):
        leaf = x.clone().requires_grad_()
        out = run(built("vertical_attention", norm=kind), leaf)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        assert torch.isfinite(out).all()
        assert torch.isfinite(grad).all()


def test_norms_run_in_float32_for_narrow_activations() -> None:
    """Squares of a large bfloat16 state are summed in float32: the read keeps unit length to bfloat16's rounding."""
    stream = built("vertical_attention", norm="l2").bfloat16()
    x = (1e15 * embedding().detach()).bfloat16()
    state = stream.open(x)
    assert state.value.kept[0].derived.dtype == torch.float32
    seen = stream.read(state, stream.sites[0]).x
    assert seen.dtype == torch.bfloat16
    assert (seen.double().norm(dim=-1) - 1).abs().max() < 2**-7


# DeepCrossAttention.

dca = partial(built, "deep_cross_attention", blocks=5)


@pytest.mark.slow
def test_the_slope_survives_the_compiler() -> None:
    stream = dca(by=0.0)
    torch.compile(composed(stream), fullgraph=True)(embedding()).square().sum().backward()
    again = dca(by=0.0)
    run(again, embedding()).square().sum().backward()
    for got, want in zip(stream.token.values(), again.token.values(), strict=True):
        close(got.grad, want.grad, 1e-10)


def test_ways_and_sources() -> None:
    stream = dca(MIXED_BLOCK, window=2)
    assert [stream.ways(site) for site in stream.sites[:3]] == [("x",), ("q", "k", "v"), ("x",)]
    assert {dca(("parallel",)).ways(s) for s in dca(("parallel",)).sites} == {("q", "k", "v", "x")}
    assert {dca(ways="single").ways(s) for s in dca().sites} == {("x",)}
    first = {site.block: site for site in stream.layout.sites if site.first}
    assert stream.sources(first[0]) == ("embedding",)
    assert stream.sources(first[2]) == ("embedding", "block 0", "block 1")
    assert stream.sources(first[3]) == ("embedding", "overflow", "block 1", "block 2")
    assert stream.sources(stream.layout.out) == ("embedding", "overflow", "block 3", "block 4")
    assert stream.sources(stream.sites[1]) == ()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_weights_reproduce_the_read_of_equal_channels(version: int) -> None:
    """Vector weights are shown as their mean over channels, which is what acts on a source with equal channels."""
    stream = dca(version=version, window=2, blocks=1)
    x = torch.full((2, 3, 8), 0.7, dtype=torch.float64)
    state = stream.open(x)
    weights = stream.weights(state, stream.sites[0])
    seen = stream.read(state, stream.sites[0])
    assert weights is not None
    assert weights.shape == (2, 3, 3, 1)
    assert seen.k is not None
    close(seen.k.mean(-1), 0.7 * weights[..., 1, 0])


def test_narrow_increments_add_up_in_the_dtype_of_the_stream() -> None:
    """As under autocast: contributions are summed in float32, so the start is plain to float32's rounding."""
    stream = dca(by=0.0, window=1).float()
    plain = twoaxis.stream("standard", blocks=5, width=8)
    x = embedding().detach().float()
    functions = toys(stream, torch.float32)
    outs = []
    for each in (stream, plain):
        out, _, state = trace(each, x, [lambda *ways, f=f: f(*ways).bfloat16() for f in functions])
        outs.append(out)
        assert all(t.dtype == torch.float32 for t in each.pack(state))
    close(outs[0], outs[1], 1e-2)  # one rounding of an increment to bfloat16 may go the other way
    assert (outs[0] - outs[1]).abs().mean() <= 1e-3 * outs[1].abs().mean()


# MUDDFormer.

mudd = partial(built, "muddformer", by=0.5)


def test_round64_always_adds() -> None:
    """Sixteen slots in four ways are 64 already and become 128; the head's 17 slots in one way become 64."""
    stream = mudd(blocks=16, round64=True)
    hidden = {block: weight.shape[1] for block, weight in stream.generator_in.items()}
    assert hidden["14"] == 64
    assert hidden["15"] == 128
    assert hidden["16"] == 64
    assert mudd(blocks=16, expand_last=True).generator_in["16"].shape == (8, 4 * 17)


def test_first_norms() -> None:
    shared, separate = mudd(MIXED_BLOCK), mudd(MIXED_BLOCK, first_norms="separate")
    assert [shared.ways(s) for s in shared.sites[:5]] == [("x",)] * 4 + [("q", "k", "v")]
    assert [separate.ways(s) for s in separate.sites[:3]] == [("x",), ("q", "k", "v"), ("x",)]
    extra = [sum(len(stream.ways(site)) - 1 for site in stream.sites) for stream in (shared, separate)]
    assert extra == [2 * (4 - 1), 2 * 4]
    parallel = mudd(("parallel",), first_norms="separate")
    assert {parallel.ways(site) for site in parallel.sites} == {("q", "k", "v", "x")}
    one = mudd(ways="one", first_norms="separate")
    assert {one.ways(site) for site in one.sites} == {("x",)}
    off = mudd(first_norms="separate", placement="none")
    assert {off.ways(site) for site in off.sites} == {("x",)}
    x = embedding()
    assert torch.equal(run(shared, x), run(separate, x))


# Deep Delta.

TOKEN_SIDE = {"value_channels": 3, "compress": "token", "token_taps": 4, "expand": "conv", "expand_taps": 3}


def test_only_token_mixing_variants_remember_tokens() -> None:
    assert (
        built(
            "deep_delta",
            blocks=2,
        ).memory_windows()
        == ()
    )
    assert built("deep_delta", blocks=2, value_channels=4).memory_windows() == ()
    assert built("deep_delta", blocks=2, value_channels=4, expand="conv").memory_windows() == (4,)
    assert built("deep_delta", blocks=2, value_channels=4, compress="token").memory_windows() == (4,) * 5
    assert built("deep_delta", blocks=2, **TOKEN_SIDE).memory_windows() == (3, 4, 4, 4, 4, 4)


def test_memory_must_be_asked_for_and_fit() -> None:
    stream = built("deep_delta", blocks=2, **TOKEN_SIDE)
    x = torch.randn(1, 2, 8, dtype=torch.float64)
    state = stream.open(x)
    for site in stream.sites:
        seen = stream.read(state, site)
        state = stream.write(state, site, x, seen, seen)
    with pytest.raises(ValueError, match="keep=True"):
        stream.memory(state)
    with pytest.raises(ValueError, match="past has 1 rings, this stream keeps 6"):
        stream.open(x, (twoaxis.Ring(3, 1),))
    with pytest.raises(ValueError, match=r"needs \(batch, time, width\), got 2 dimensions"):
        stream.open(torch.randn(2, 8, dtype=torch.float64))


# Hyper-connections.


@pytest.mark.parametrize("frozen", ["width", "depth", "both"])
def test_frozen_connections_have_no_parameters_and_stay(frozen: str) -> None:
    stream, x = built("hyper_connections", blocks=2, by=0, streams=3, frozen=frozen), embedding()
    names, start = dict(stream.named_parameters()), {name: t.clone() for name, t in stream.named_buffers()}
    assert ("static_alpha" in names) == ("dynamic_alpha_fn" in names) == (frozen == "depth")
    assert ("static_beta" in names) == ("dynamic_beta_fn" in names) == (frozen == "width")
    assert ("norm_weight" in names) == (frozen != "both")
    assert set(start) == {"static_alpha", "static_beta"} - set(names)
    functions = toys(stream)
    plain = 3 * run(twoaxis.stream("standard", blocks=2, width=8), x, functions)
    close(run(stream, x, functions), plain, 1e-14) if frozen == "both" else None
    if names:
        run(stream, x, functions).square().sum().backward()
        torch.optim.SGD(stream.parameters(), lr=0.1).step()
        assert not torch.equal(run(stream, x, functions), plain)
    assert all(torch.equal(t, start[name]) for name, t in stream.named_buffers())
    copied = built("hyper_connections", blocks=2, by=0, streams=3, frozen=frozen)
    copied.load_state_dict(stream.state_dict())
    assert torch.equal(run(copied, x, functions), run(stream, x, functions))


def test_what_is_dynamic_decays_and_nothing_else() -> None:
    static, dynamic = built("hyper_connections").parameter_groups()
    assert static.names == ("static_alpha", "static_beta", "norm_weight", "norm_bias")
    assert (static.decay, dynamic.decay, len(dynamic.names)) == (False, True, 4)
    assert built("hyper_connections", by=0, placement="none").parameter_groups() == ()


def test_no_iterate_is_saved_for_backward() -> None:
    """Neither Sinkhorn's iterates nor a float32 copy of bfloat16 streams."""
    sizes = {}
    for iterations in (2, 50):
        stream = moved(twoaxis.stream("manifold_hyper_connections", blocks=2, width=64, iterations=iterations))
        x, saved = torch.randn(2, 8, 64).bfloat16().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            trace(stream.bfloat16(), x, [torch.tanh] * len(stream.sites))
        sizes[iterations] = sum(t.numel() for t in saved)
        assert not [t for t in saved if t.dtype == torch.float32 and t.shape[:2] == (2, 8) and t.shape[-1] >= 64]
    assert sizes[2] == sizes[50] > 0
