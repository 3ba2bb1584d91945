"""Deep Delta Learning: initial values, counts, controls, and the token side of TC and EC."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from twoaxis.depth.counts import count
from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.stream import Layout


def make(blocks: int = 2, width: int = 8, **options: Any) -> DeepDelta:
    torch.manual_seed(0)
    made = twoaxis.stream("deep_delta", blocks=blocks, width=width, **options).double()
    assert isinstance(made, DeepDelta)
    return made


TOKEN_SIDE = {"value_channels": 3, "compress": "token", "token_taps": 4, "expand": "conv", "expand_taps": 3}


@pytest.mark.parametrize(
    ("width", "blocks", "options", "published"),
    [
        (768, 12, {}, 36_912),
        (768, 12, {"value_channels": 4, "compress": "token"}, 252_076),
        (768, 12, {"value_channels": 4, "compress": "token", "expand": "conv"}, 264_364),
        (768, 12, {"value_channels": 4}, 132_268),
        (768, 12, {"value_channels": 4, "expand": "conv"}, 144_556),
        (1024, 24, {}, 98_400),
        (1024, 24, {"value_channels": 4, "compress": "token"}, 655_700),
        (1024, 24, {"value_channels": 4, "compress": "token", "expand": "conv"}, 672_084),
        (1024, 24, {"value_channels": 4}, 348_500),
        (1024, 24, {"value_channels": 4, "expand": "conv"}, 364_884),
    ],
)
def test_published_counts(width: int, blocks: int, options: dict[str, Any], published: int) -> None:
    with torch.device("meta"):
        stream = DeepDelta(DeepDelta.Config(**options), Layout.make(blocks, width))
    assert count(stream).parameters == sum(p.numel() for p in stream.parameters()) == published


def test_initial_values() -> None:
    stream = make(blocks=4, width=256, value_channels=4, expand="conv")
    assert stream.gate_bias.abs().max() == 0
    assert stream.gate_weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert stream.value_bias.abs().max() <= 1 / 16
    assert stream.compress_weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert (stream.compress_read - 0.25).abs().max() == 0
    x = torch.randn(1, 5, 256, dtype=torch.float64)
    assert torch.equal(stream.open(x).value.h, x.unsqueeze(-2).expand(-1, -1, 4, -1))
    assert make(gate_start=0.5).gate_bias[0].item() == pytest.approx(torch.logit(torch.tensor(0.25)).item())


def test_only_token_mixing_variants_remember_tokens() -> None:
    assert make().memory_windows() == ()
    assert make(value_channels=4).memory_windows() == ()
    assert make(value_channels=4, expand="conv").memory_windows() == (4,)
    assert make(value_channels=4, compress="token").memory_windows() == (4,) * 5
    assert make(**TOKEN_SIDE).memory_windows() == (3, 4, 4, 4, 4, 4)


def test_memory_must_be_asked_for_and_fit() -> None:
    stream = make(**TOKEN_SIDE)
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expand": "conv"}, "expand='conv' needs value_channels > 1, got value_channels=1"),
        ({"gate_start": 2.5}, "gate_start must be at most 2, got 2.5"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("deep_delta", blocks=2, width=8, **options)
