"""Every stream and every mixer starts as the source: by neutral parameters, or behind closed gates."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import twoaxis
from tests.pretrained.helpers import MIXER_SPELLINGS, STREAM_SPELLINGS, convert, tokens
from tests.support.foreign import llama, pretrained, qwen3, smollm3
from tests.support.numbers import far
from twoaxis.depth.blend import Blend
from twoaxis.pretrained.choose_start import EXACT, read_method
from twoaxis.pretrained.untrainable import CLOSED, stuck

_kept: dict[torch.dtype, Any] = {}


def source(dtype: torch.dtype) -> Any:
    if dtype not in _kept:
        _kept[dtype] = pretrained(llama(), dtype)
    return _kept[dtype]


@torch.no_grad()
def check(theirs: Any, ours: Any, neutral: str) -> None:
    """Against the plain stream, to the bit where the class says so."""
    found, expected = ours(tokens()).logits, theirs(tokens()).logits
    assert far(found, expected) <= 1e-6
    assert neutral not in ("bitwise", "blend") or torch.equal(found, expected)


@pytest.mark.parametrize("spelling", STREAM_SPELLINGS)
def test_streams_start_as_the_source(spelling: str) -> None:
    theirs = source(torch.float64)
    ours, start = convert(theirs, spelling)
    assert start.neutral in (*EXACT, "blend")
    assert isinstance(ours.stream, Blend) == (start.neutral == "blend")
    check(theirs, ours, start.neutral)


@pytest.mark.parametrize("spelling", MIXER_SPELLINGS)
def test_mixers_start_as_the_source(spelling: str) -> None:
    theirs = source(torch.float64)
    ours, start = convert(theirs, mixer=spelling)
    assert next(ours.local_operators(), None) is not None
    check(theirs, ours, start.neutral)


@pytest.mark.parametrize(
    ("stream", "mixer", "more"),
    [
        ("muddformer", "short_swa:window=3", {"mixer_blocks": [0, 2]}),
        ("attention_residuals:block_size=2", "short_conv:where=qkv", {}),
        ("deep_delta:value_channels=2,compress=token", "canon", {"placement": "1-2"}),
        ("hyper_connections", "short_conv", {"placement": "attention+out"}),
        ("denseformer:blend=true", None, {"placement": "3"}),
    ],
)
def test_both_axes_placement_and_other_families(stream: str, mixer: str | None, more: dict[str, Any]) -> None:
    windows = qwen3(head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    theirs = pretrained(smollm3() if "placement" in more else windows, torch.float64)
    ours, start = convert(theirs, stream, mixer, **more)
    check(theirs, ours, start.neutral)


def test_exact_forms_are_chosen_and_said_unless_the_user_chose() -> None:
    theirs = source(torch.float32)
    for spelling, option, taken in (
        ("attention_residuals:block_size=2", "read", "sum"),
        ("hyper_connections:streams=2", "readout", "mean"),
        ("manifold_hyper_connections", "readout", "mean"),
    ):
        ours, start = convert(theirs, spelling)
        assert ours.config.stream_options[option] == taken
        assert not ours.config.blend
        assert len(start.notes) == 1
        assert f"{option}={taken} is taken" in start.notes[0]
        given = "average" if option == "read" else "sum"
        joint = "," if ":" in spelling else ":"
        ours, start = convert(theirs, f"{spelling}{joint}{option}={given}")
        assert ours.config.stream_options[option] == given
        assert ours.config.blend
        assert "starts through Blend: its neutral class is 'scale'" in start.notes[0]
        with pytest.raises(ValueError, match=r"no exact neutral start \(its class is 'scale'\) and Blend is refused"):
            convert(theirs, f"{spelling}{joint}{option}={given}", blend=False)
    with pytest.raises(ValueError, match="its class is 'none'"):
        convert(theirs, "deep_delta", blend=False)
    assert convert(theirs, "denseformer", blend=False)[1].neutral == "bitwise"


def test_a_mixer_without_a_neutral_start_is_given_one_or_refused() -> None:
    theirs = source(torch.float32)
    ours, start = convert(theirs, mixer="short_conv:where=qkv,kernel=3")
    assert ours.config.mixer_options == {"where": "qkv", "kernel": 3, "residual": True}
    assert start.notes == ("short_conv:residual=true is taken: without it the mixer has no neutral start",)
    with pytest.raises(ValueError, match="has no neutral parameters: the model would not start as its source"):
        convert(theirs, mixer="short_conv:where=qkv,residual=false")


def test_spellings() -> None:
    methods, blend = read_method("denseformer:dilation=2,placement=3,blend=true", "canon:mixer_blocks=[0,1]")
    assert methods.stream_options == {"dilation": 2}
    assert (methods.placement, blend, methods.mixer_blocks) == ("3", True, (0, 1))
    assert read_method("denseformer:blend=false")[1] is False
    twice: list[dict[str, Any]] = [{"placement": "0"}, {"blend": False}]
    for given in twice:
        with pytest.raises(ValueError, match=f"{next(iter(given))} is given twice: .* beside it"):
            read_method("denseformer:placement=1-2,blend=true", **given)
    with pytest.raises(ValueError, match="blend must be True or False, got 'maybe'"):
        read_method("denseformer:blend=maybe")
    with pytest.raises(ValueError, match=r"unknown stream 'densformer' \(did you mean 'denseformer'\?\)"):
        convert(source(torch.float32), "densformer")
    with pytest.raises(ValueError, match=r"denseformer has no option 'model\.hidden_size'"):
        convert(source(torch.float32), "denseformer:model.hidden_size=64")


def test_the_seed_decides_what_starts_at_random_and_nothing_else() -> None:
    theirs = source(torch.float32)
    state = torch.random.get_rng_state()
    a, b = (twoaxis.retrofit(theirs, mixer="short_swa", seed=s, tokens=8).model.state_dict() for s in (1, 2))
    again = twoaxis.retrofit(theirs, mixer="short_swa", seed=1, tokens=8).model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(again[name], a[name]) for name in a)
    different = {name.rsplit(".", 2)[-2] for name in a if not torch.equal(a[name], b[name])}
    assert different == {"query", "key", "value"}


def test_paths_that_stay_closed_are_found() -> None:
    theirs = source(torch.float32)
    assert stuck(convert(theirs, "muddformer", "canon")[0]) == {}
    # the first site reads the embedding, whatever the method: its gate has nothing to choose between
    assert stuck(convert(theirs, "deep_delta")[0]) == {"stream.gate[0]": CLOSED}
    # the gate's gradient is (method - plain), the method's is the gate: both zero, for ever
    told = stuck(convert(theirs, "denseformer", blend=True)[0])
    names = {f"stream.method.alpha.{block}" for block in range(1, 5)}
    assert told == dict.fromkeys({"stream.gate", *names}, CLOSED)
    told = stuck(convert(theirs, "deep_cross_attention:relu=literal", "short_swa:window=1")[0])
    assert told["stream.token.0"].startswith("w is zero")
    assert (
        told["backbone.model.layers.0.twoaxis_mixer.local.key.weight"] == "with a window of one the softmax is constant"
    )


@torch.no_grad()  # as a user may have called it, who only wants the model
def test_every_named_stuck_parameter_is_one_of_the_model() -> None:
    made = twoaxis.retrofit(source(torch.float32), stream="attention_residuals", tokens=8)
    assert set(made.record.stuck) == {"stream.query[0]", "stream.norm_weight[0]"}
    assert {name.partition("[")[0] for name in made.record.stuck} <= set(made.record.new)


def test_half_precision_keeps_what_a_stream_wants_wide() -> None:
    theirs = source(torch.float32)
    made = twoaxis.retrofit(theirs, stream="denseformer", mixer="canon:set=A", dtype="bfloat16", tokens=8)
    kinds = {name: p.dtype for name, p in made.model.named_parameters()}
    assert {d for n, d in kinds.items() if n.startswith("stream.")} == {torch.float32}
    assert {d for n, d in kinds.items() if not n.startswith("stream.")} == {torch.bfloat16}
    assert made.record.dtype == "bfloat16"
    assert made.record.measured["source"]["largest"] == 0.0
    sizes = {torch.float32: 4, torch.bfloat16: 2}
    total = sum(p.numel() * sizes[p.dtype] for p in made.model.parameters())
    assert made.record.added_bytes == total - 2 * made.record.source_parameters


def test_a_model_at_hand_is_left_alone() -> None:
    theirs = pretrained(llama(), torch.float32)
    kinds, before = [type(m) for m in theirs.modules()], theirs(tokens()).logits
    made = twoaxis.retrofit(theirs, stream="denseformer", tokens=8).model
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 1.0
    assert [type(m) for m in theirs.modules()] == kinds
    assert torch.equal(theirs(tokens()).logits, before)


def test_the_record_counts() -> None:
    theirs = source(torch.float32)
    made = twoaxis.retrofit(theirs, stream="muddformer", tokens=24)
    ours = {name: p.numel() for name, p in made.model.named_parameters()}
    new = sum(ours[name] for name in made.record.new)
    # q, k and v each have a scale of 32 channels where the source has one for all of them
    ways = sum("twoaxis_norm_" in name for name in ours)
    assert ways > 0
    assert made.record.added_parameters == new + 32 * ways
    assert made.record.added_parameters == sum(ours.values()) - sum(p.numel() for p in theirs.parameters())
    assert made.record.measured["text"]["tokens"] == made.record.measured["source"]["tokens"] == 24
    assert dataclasses.asdict(made.record)["source"]["family"] == "llama"
