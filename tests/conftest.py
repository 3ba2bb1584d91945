from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # two workers share two cores; more threads each only contend

settings.register_profile(
    "ci", max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
settings.register_profile("deep", max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--goldens",
        type=Path,
        default=Path(__file__).parent / "goldens",
        help="folder of .npz files made by the original code; every file in it must be recognised and pass",
    )


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
