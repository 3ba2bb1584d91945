"""A fixture for tests that show many tables of the map of methods."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from twoaxis.guide import map as methods_map
from twoaxis.model.config import ModelConfig


@pytest.fixture(autouse=True, scope="module")
def measured_once() -> Iterator[None]:
    """Every variant is counted for a shape once, however many tables show it."""
    kept: dict[str, methods_map.Measured] = {}
    measure = methods_map.measure

    @functools.wraps(measure)
    def remembered(name: str, shape: ModelConfig, options: Mapping[str, Any]) -> methods_map.Measured:
        key = f"{name} {options} {shape}"
        return kept.get(key) or kept.setdefault(key, measure(name, shape, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods_map, "measure", remembered)
        yield
