"""Deep Delta Learning: initial values, counts, controls, and the token side of TC and EC."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from twoaxis.depth.deep_delta import DeepDelta


def make(blocks: int = 2, width: int = 8, **options: Any) -> DeepDelta:
    torch.manual_seed(0)
    made = twoaxis.stream("deep_delta", blocks=blocks, width=width, **options).double()
    assert isinstance(made, DeepDelta)
    return made


TOKEN_SIDE = {"value_channels": 3, "compress": "token", "token_taps": 4, "expand": "conv", "expand_taps": 3}


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
