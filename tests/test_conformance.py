"""Every stream and mixer of the library passes its own conformance kit."""

from __future__ import annotations

import pytest

from twoaxis.depth.registry import stream_names
from twoaxis.sequence.registry import mixer_names
from twoaxis.testing import check_mixer, check_stream

REAL_FAULTS = {
    "short_swa": "with window=1 queries and keys never learn, and the operator has no `dead` that says so",
}
"""Methods that fail for a reason of their own, until it is mended: strict, so that the mending shows."""

MIXERS = [
    pytest.param(name, marks=[pytest.mark.xfail(strict=True, reason=REAL_FAULTS[name])])
    if name in REAL_FAULTS
    else name
    for name in mixer_names()
]


@pytest.mark.parametrize("name", stream_names())
def test_stream_conforms(name: str) -> None:
    check_stream(name).raise_if_failed()


@pytest.mark.parametrize("name", MIXERS)
def test_mixer_conforms(name: str) -> None:
    check_mixer(name).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", stream_names())
def test_stream_conforms_compiled(name: str) -> None:
    check_stream(name, seed=1, compile=True).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXERS)
def test_mixer_conforms_compiled(name: str) -> None:
    check_mixer(name, seed=1, compile=True).raise_if_failed()
