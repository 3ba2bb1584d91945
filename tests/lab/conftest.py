"""What every test of the lab leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def registries_stay() -> Iterator[None]:
    """Methods that a test registers in this process are gone after its file."""
    from twoaxis.depth.registry import STREAMS
    from twoaxis.sequence.registry import MIXERS

    entries: list[dict[str, Any]] = [STREAMS.entries, MIXERS.entries]  # pyright: ignore[reportAssignmentType]
    before = [dict(each) for each in entries]
    yield
    for each, kept in zip(entries, before, strict=True):
        each.clear()
        each.update(kept)
