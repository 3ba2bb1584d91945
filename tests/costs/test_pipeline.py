"""Predicted transfers against the paper's equations; `tests.parallel` has what processes really send."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.costs.helpers import FIRST, SHAPE, Fields, label
from twoaxis.costs.trace import meta_model
from twoaxis.model.config import ModelConfig
from twoaxis.model.stages import plan


@given(stages=st.integers(2, 6), virtual=st.integers(1, 4))
def test_the_papers_equations(stages: int, virtual: int) -> None:
    """Equations 7 and 8 count blocks; the state has the embedding too, and no stage is sent what it made itself."""
    chunks, vector = stages * virtual, 8 * 2
    fields: Any = {"hidden_size": 8, "num_hidden_layers": chunks, "num_attention_heads": 2}
    config = ModelConfig(**fields, stream="attention_residuals:block_size=2")
    found = plan(meta_model(config, "bfloat16"), stages, virtual)
    assert found.whole == (chunks * (chunks - 1) // 2 + chunks - 1) * vector
    paper = stages * (stages - 1) // 2 + (virtual - 1) * stages**2
    assert found.cached == (paper - (virtual - 1) * stages + stages - 1) * vector
    assert [b.receiver for b in found.boundaries] == [chunk % stages for chunk in range(1, chunks)]


@given(stages=st.sampled_from([2, 3, 4, 6]))
def test_streams_of_one_form_send_the_same_everywhere(stages: int) -> None:
    for fields, vectors in (({}, 1), ({"stream": "hyper_connections"}, 4)):
        found = plan(meta_model(dataclasses.replace(SHAPE, num_hidden_layers=12, **fields), "bfloat16"), stages)
        assert {b.whole for b in found.boundaries} == {vectors * 16 * 2}
        assert found.cached == found.whole


@pytest.mark.parametrize("fields", FIRST, ids=label)
def test_caching_never_costs_and_needs_virtual_stages(fields: Fields) -> None:
    trunk = meta_model(dataclasses.replace(SHAPE, num_hidden_layers=8, **fields), "bfloat16")
    once, twice = plan(trunk, 4), plan(trunk, 2, 2)
    assert once.cached == once.whole
    assert twice.cached <= twice.whole == once.whole
    assert sum(twice.held) == twice.cached
