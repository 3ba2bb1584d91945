"""Effective sources, lengths, cosines and shares of regimes, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.base.method import NamedRange, Quantity
from twoaxis.inspection.measure import cosine, effective_sources, norm, shares


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_effective_sources_by_hand() -> None:
    assert effective_sources(tensor(0.25, 0.25, 0.25, 0.25)).item() == pytest.approx(4.0, abs=1e-12)
    assert effective_sources(tensor(0.0, 1.0, 0.0)).item() == 1.0
    # p = (1/2, 1/4, 1/4): entropy 1.5 log 2, so 2^1.5
    assert effective_sources(tensor(2.0, -1.0, 1.0)).item() == pytest.approx(2**1.5, abs=1e-12)
    # p = (0.9, 0.1)
    expected = math.exp(-0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    assert effective_sources(tensor(0.9, 0.1)).item() == pytest.approx(expected, abs=1e-12)
    assert effective_sources(tensor(0.0, 0.0)).item() == 0.0
    assert effective_sources(tensor(math.nan, 1.0)).isnan()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.01, 100))
def test_effective_sources_lie_between_one_and_all_and_ignore_scale(weights: list[float], factor: float) -> None:
    w = tensor(*weights)
    if w.abs().sum() < 1e-100:
        return
    count = effective_sources(w).item()
    assert 1 - 1e-9 <= count <= len(weights) + 1e-9
    assert effective_sources(-factor * w).item() == pytest.approx(count, rel=1e-9)


def test_lengths_and_cosines() -> None:
    x, y = tensor(3.0, 4.0), tensor(-4.0, 3.0)
    assert norm(x).item() == 5.0
    assert cosine(x, y).item() == 0.0
    assert cosine(x, -2 * x).item() == pytest.approx(-1.0, abs=1e-15)
    assert cosine(x, x + y).item() == pytest.approx(math.sqrt(0.5), abs=1e-15)
    assert cosine(x, 0 * x).item() == 0.0
    assert norm(torch.full((4,), 100.0, dtype=torch.bfloat16)).dtype == torch.float32
    assert norm(torch.full((2,), 300.0, dtype=torch.float16)).item() == pytest.approx(300 * math.sqrt(2), rel=1e-6)


def test_shares_count_each_number_once() -> None:
    regimes = (NamedRange("low", 0.0, 0.5), NamedRange("middle", 0.5, 1.0), NamedRange("high", 1.0, 2.0))
    assert shares(tensor(0.0, 0.5, 0.99, 1.0, 2.0), regimes) == [0.2, 0.4, 0.4]
    assert sum(shares(torch.rand(1000, dtype=torch.float64) * 2, regimes)) == pytest.approx(1.0)


def test_a_probe_knows_whether_it_differs_between_tokens() -> None:
    assert Quantity(torch.zeros(2, 3)).per_token
    assert not Quantity(torch.zeros(())).per_token
    assert not Quantity(torch.zeros(4, 4), ("to", "from")).per_token
    assert Quantity(torch.zeros(1, 5, 4, 4), ("to", "from")).per_token
