from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.durations import Durations

# Started in the background, a shell has these ignored, and what is tested about them would not happen.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

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
    parser.addoption(
        "--record-durations",
        action="store_true",
        help="print the CPU seconds of the slowest files and write the table by which files are ordered",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations(bool(config.getoption("--record-durations"))), "twoaxis-durations")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What the imports left behind is never garbage, and looking through it takes most of a collection's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def registries_stay() -> Iterator[None]:
    """Methods that a test registers in this process are gone after its file."""
    from tests.support.commands import registries_restored

    with registries_restored():
        yield
