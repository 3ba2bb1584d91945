from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.forks import Forked


@pytest.fixture(autouse=True, scope="module")
def workers_are_forked() -> Iterator[None]:
    """Workers that this process starts are forked from it; commands in processes of their own start real ones."""
    from twoaxis.comparison.runner import launchers

    like = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "subprocess", like)
        yield


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that a test writes have none: they take seconds and are drawn in test_figures.py, and once for a module
    in test_report.py."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are processes of their own, which import everything themselves."""
    monkeypatch.setattr("twoaxis.comparison.runner.launchers.subprocess", subprocess)
