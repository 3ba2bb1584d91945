"""Every stream and mixer of the library passes its own conformance kit."""

from __future__ import annotations

import pytest

from twoaxis.depth.registry import stream_names
from twoaxis.sequence.registry import mixer_names
from twoaxis.verify import check_mixer, check_stream


@pytest.mark.parametrize("name", stream_names())
def test_stream_conforms(name: str) -> None:
    check_stream(name).raise_if_failed()


@pytest.mark.parametrize("name", mixer_names())
def test_mixer_conforms(name: str) -> None:
    check_mixer(name).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", stream_names())
def test_stream_conforms_compiled(name: str) -> None:
    check_stream(name, seed=1, compile=True).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("name", mixer_names())
def test_mixer_conforms_compiled(name: str) -> None:
    check_mixer(name, seed=1, compile=True).raise_if_failed()
