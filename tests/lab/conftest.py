"""What every test of the lab leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def registries_stay() -> Iterator[None]:
    """Methods that a test registers in this process are gone after its file."""
    from twoaxis.depth.registry import STREAMS
    from twoaxis.sequence.registry import MIXERS

    before = [(registry, dict(registry.entries)) for registry in (STREAMS, MIXERS)]
    yield
    for registry, entries in before:
        registry.entries.clear()
        registry.entries.update(entries)
