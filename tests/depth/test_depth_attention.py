"""Depth attention: what is carried, what is shown, what is refused. Its numbers: tests/verify/test_definitions.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import twoaxis
from twoaxis.depth.depth_attention import DepthAttention


def make(blocks: int = 3, width: int = 8, **options: Any) -> DepthAttention:
    made = twoaxis.stream("depth_attention", blocks=blocks, width=width, heads=options.pop("heads", 2), **options)
    assert isinstance(made, DepthAttention)
    made = made.double()
    with torch.no_grad():
        made.output.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(1))
    return made


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, r"heads \(3\) must divide the width \(8\)"),
        ({"heads": 4, "kv_heads": 3}, r"kv_heads \(3\) must divide heads \(4\)"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        twoaxis.stream("depth_attention", blocks=2, width=8, **options)
