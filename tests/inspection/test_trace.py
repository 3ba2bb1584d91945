"""`twoaxis.trace`: the numbers it records, and that the model does not notice."""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from tests.support.decoders import SMALL, build, sample_tokens
from twoaxis.depth.stream import Seen, State
from twoaxis.depth.walk import apply_sublayer, without_aux
from twoaxis.inspection.trace import Look, Trace, find_stream
from twoaxis.model.decoder import Decoder

STREAMS = ("standard", "attention_residuals", "deep_delta", "hyper_connections", "muddformer", "lime")
"""Without and with weights, with quantities, streams, ways, and changed keys and values: a trace knows no method."""
ALONE = [pytest.param(dataclasses.replace(SMALL, stream=name), id=name) for name in STREAMS]
BLENDED = [
    pytest.param(dataclasses.replace(SMALL, stream=name, blend=True), id=f"blend of {name}") for name in STREAMS[2:5]
]
"""A blend records its method's numbers beside its own."""
MIXED = [pytest.param(dataclasses.replace(SMALL, mixer=name), id=name) for name in ("short_swa", "canon")]


def open_gates(model: Decoder) -> Decoder:
    if isinstance(model.stream, twoaxis.Blend):
        with torch.no_grad():
            model.stream.gate.uniform_(0.2, 0.8, generator=torch.Generator().manual_seed(3))
    return model


def by_hand(model: Decoder, tokens: Tensor) -> list[tuple[Any, State, Seen, Tensor | None, Seen | None]]:
    """The trunk's lines, with what each site sees."""
    stream, found = model.stream, []
    info = model.info(tokens)
    state = stream.open(model.embed(tokens))
    for site in stream.sites:
        seen = stream.read(state, site)
        norm = model.site_norm(site)
        c = without_aux(seen) if norm is None else norm(seen)
        sublayer = model.sublayer(site)
        c, y = apply_sublayer(c, lambda given, sublayer=sublayer: sublayer(given, info))
        found.append((site, state, seen, y, c))
        state = stream.write(state, site, y, seen, c)
    found.append((stream.layout.out, state, stream.read(state, stream.layout.out), None, None))
    return found


@pytest.mark.parametrize("config", [*ALONE, *MIXED, *BLENDED])
@torch.no_grad()
def test_numbers_of_every_method_and_unchanged_outputs(config: twoaxis.ModelConfig) -> None:
    model, tokens = open_gates(build(config, 1, perturb=0.1)), sample_tokens(0)
    before = model(tokens)
    with twoaxis.trace(model) as seen:
        assert torch.equal(model(tokens), before)
    assert torch.equal(model(tokens), before)
    assert len(seen.passes) == 1
    expected = by_hand(model, tokens)
    assert [look.site for look in seen] == [site for site, *_ in expected]
    for look, (site, state, read, y, c) in zip(seen, expected, strict=True):
        x = read.x
        torch.testing.assert_close(look.norm, (x * x).sum(-1) ** 0.5, rtol=1e-13, atol=0)
        if y is None:
            assert look.increment is None
            assert look.cosine is None
        else:
            assert look.increment is not None
            torch.testing.assert_close(look.increment, (y * y).sum(-1) ** 0.5, rtol=1e-13, atol=0)
            lengths = (x * x).sum(-1).sqrt() * (y * y).sum(-1).sqrt()
            torch.testing.assert_close(look.cosine, (x * y).sum(-1) / lengths.clamp_min(1e-300), rtol=0, atol=1e-12)
        weights = model.stream.weights(state, site)
        assert look.sources == model.stream.sources(site)
        assert len(set(look.sources)) == len(look.sources)
        if weights is None:
            assert look.weights is None
            assert look.effective is None
        else:
            assert look.weights is not None
            assert look.weights.shape == (*tokens.shape, weights.shape[-2], len(look.sources))
            assert torch.equal(look.weights, weights.expand(look.weights.shape))
            p = look.weights.abs() / look.weights.abs().sum(-1, keepdim=True)
            entropy = -(p * p.clamp_min(1e-300).log()).sum(-1)
            torch.testing.assert_close(look.effective, entropy.exp(), rtol=1e-10, atol=0)
        probes = model.stream.quantities(state, site, y, read, c)
        assert set(look.probes) == set(probes)
        for name, probe in probes.items():
            assert torch.equal(look.probes[name].value, probe.value)
            lead = probe.value.shape[: probe.value.dim() - len(probe.axes)]
            assert lead in ((), tokens.shape)


@pytest.mark.parametrize("config", ALONE)
def test_gradients_are_the_same_and_nothing_stays_on_the_model(config: twoaxis.ModelConfig) -> None:
    model, tokens = build(config, 2, perturb=0.1), sample_tokens(1)
    names = {name: set(module.__dict__) for name, module in model.named_modules()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def gradients() -> list[Tensor]:
        found = torch.autograd.grad(model(tokens).square().mean(), list(model.parameters()), allow_unused=True)
        return [torch.zeros(()) if g is None else g for g in found]

    plain = gradients()
    with twoaxis.trace(model) as seen:
        traced = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, traced, strict=True))
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == names
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    for look in seen:
        tensors = [look.weights, look.norm, look.increment, look.cosine, *(p.value for p in look.probes.values())]
        assert not any(t.requires_grad for t in tensors if t is not None)


def test_generation_is_one_pass_per_chunk_and_mixers_remember() -> None:
    config = dataclasses.replace(
        SMALL, stream="deep_delta", mixer="short_swa", mixer_options={"window": 3, "start": "normal"}
    )
    model = build(config, 5, perturb=0.1)
    tokens = sample_tokens(6)
    plain = model.generate(tokens, 4)
    with twoaxis.trace(model) as seen:
        assert torch.equal(model.generate(tokens, 4), plain)
    assert [p[0].norm.shape for p in seen.passes] == [(2, 12), (2, 1), (2, 1), (2, 1), (2, 1)]
    with twoaxis.trace(model) as whole:
        model(plain)
    for index, look in enumerate(whole):
        pieces = [p[index] for p in seen.passes]
        torch.testing.assert_close(torch.cat([p.norm for p in pieces], 1), look.norm, rtol=1e-10, atol=0)
        if look.site.kind == "mixer":
            values = [p.inner[0].probes["attention"].value for p in pieces]
            torch.testing.assert_close(
                torch.cat(values, 1), look.inner[0].probes["attention"].value, rtol=0, atol=1e-12
            )


def test_tokens_can_be_chosen() -> None:
    model, tokens = (
        build(dataclasses.replace(SMALL, stream="manifold_hyper_connections", mixer="canon"), 6),
        sample_tokens(7),
    )
    looks: list[tuple[Look, ...]] = []
    for asked in (None, [0, 5, -1], slice(2, None, 4)):
        with twoaxis.trace(model, tokens=asked) as seen:
            model(tokens)
        looks.append(seen.looks)
    for every, some, sliced in zip(*looks, strict=True):
        assert every.weights is not None
        assert some.weights is not None
        assert torch.equal(some.weights, every.weights[:, [0, 5, 11]])
        assert torch.equal(sliced.norm, every.norm[:, 2::4])
        for name, probe in every.probes.items():
            assert torch.equal(some.probes[name].value, probe.value[:, [0, 5, 11]])
        for a, b in zip(every.inner, some.inner, strict=True):
            assert torch.equal(a.probes["taps"].value, b.probes["taps"].value)  # the same for all tokens
    with (
        pytest.raises(ValueError, match="token 12 is asked for, the pass has 12 tokens"),
        twoaxis.trace(model, tokens=[12]),
    ):
        model(tokens)


def test_checkpointed_blocks_are_recorded_once() -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    text = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    text |= {"model_type": "llama", "num_hidden_layers": 2}
    model = twoaxis.TwoAxisForCausalLM(twoaxis.TwoAxisConfig(text_config=text)).train()
    model.activation_checkpointing_enable()
    tokens = sample_tokens(8)
    with twoaxis.trace(model) as seen:
        model(tokens, labels=tokens).loss.backward()
    assert len(seen.passes) == 1
    assert len(seen.looks) == 5


def test_composed_sublayers_and_inputs_without_time() -> None:
    stream = twoaxis.stream("hyper_connections", blocks=2, width=8)
    run = twoaxis.compose(stream, [(site.kind, None, nn.Linear(8, 8)) for site in stream.sites])
    x = torch.randn(5, 8)
    plain = run(x)
    with twoaxis.trace(run, tokens=[1, 3]) as seen:
        assert torch.equal(run(x), plain)
    assert seen[0].weights is not None
    assert seen[0].weights.shape == (2, 1, 4)
    assert seen[0].norm.tolist() == pytest.approx(x[[1, 3]].norm(dim=-1).tolist())


def test_no_state_outlives_the_block_and_traces_nest() -> None:
    model, tokens = build(dataclasses.replace(SMALL, stream="attention_residuals"), 7), sample_tokens(9)
    states: list[weakref.ref[Tensor]] = []
    original = model.stream._open

    def watched(x: Tensor, tokens: Any) -> Any:
        states.append(weakref.ref(x))
        return original(x, tokens)

    model.stream._open = watched  # type: ignore[method-assign]
    with torch.no_grad(), twoaxis.trace(model) as outer:
        model(tokens)
        with twoaxis.trace(model) as inner:
            model(tokens)
        model(tokens)
    gc.collect()
    assert [ref() for ref in states] == [None, None, None]
    assert len(outer.passes) == 3
    assert len(inner.passes) == 1
    assert torch.equal(outer.passes[1][2].norm, inner[2].norm)
    assert "write" not in model.stream.__dict__
    numbers = sum(t.numel() for look in inner for t in (look.norm, look.weights) if t is not None)
    assert numbers < tokens.numel() * 40  # against 16 channels times 7 sources


def test_an_error_in_the_model_leaves_it_clean_and_keeps_no_half_pass() -> None:
    model, tokens = build(dataclasses.replace(SMALL, stream="deep_delta"), 8), sample_tokens(10)
    hook = model.sublayer(model.stream.sites[3]).register_forward_pre_hook(lambda *_: 1 / 0)
    traces: list[Trace] = []

    def run() -> None:
        with twoaxis.trace(model) as seen:
            traces.append(seen)
            model(tokens)

    with pytest.raises(ZeroDivisionError):
        run()
    hook.remove()
    assert traces[0].passes == []
    assert not {"open", "read", "write"} & set(model.stream.__dict__)
    with pytest.raises(ValueError, match="nothing was recorded"):
        traces[0][0]
    with twoaxis.trace(model) as seen:
        model(tokens)
    assert len(seen) == len(seen.looks) == 7
    assert repr(seen) == "Trace(1 passes of 7 sites)"


def test_what_cannot_be_traced_is_refused() -> None:
    with pytest.raises(ValueError, match="one residual stream, Linear has 0"), twoaxis.trace(nn.Linear(2, 2)):
        pass
    model = build(SMALL, 0)
    with pytest.raises(ValueError, match="ModuleList has 2"), twoaxis.trace(nn.ModuleList([model, build(SMALL, 1)])):
        pass
    with pytest.raises(ValueError, match=r"before torch\.compile"), twoaxis.trace(torch.compile(model)):  # type: ignore[arg-type]
        pass
    with pytest.raises(ValueError, match="needs a model, got str"), twoaxis.trace("model"):  # type: ignore[arg-type]
        pass
    blend = twoaxis.stream("deep_delta", blocks=2, width=8, blend=True)
    assert find_stream(nn.Sequential(blend)) is blend


def test_interleaved_passes_are_refused() -> None:
    stream = twoaxis.stream("standard", blocks=1, width=4)
    x, (site, other) = torch.randn(1, 2, 4), stream.sites
    with twoaxis.trace(stream):
        first = stream.open(x)
        seen = stream.read(first, site)
        first = stream.write(first, site, x, seen, seen)
        stream.open(x)
        with pytest.raises(ValueError, match="passes interleave: site 1 came after 0 sites"):
            stream.write(first, other, x, stream.read(first, other), seen)


def test_half_precision_is_recorded_in_float32() -> None:
    model, tokens = Decoder(dataclasses.replace(SMALL, stream="attention_residuals")).bfloat16(), sample_tokens(11)
    with torch.no_grad(), twoaxis.trace(model) as seen:
        model(tokens)
    assert seen[2].norm.dtype == torch.float32
    assert seen[2].weights is not None
    assert math.isclose(seen[2].weights[0, 0].sum().item(), 1.0, abs_tol=1e-5)
