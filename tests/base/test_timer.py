"""Turns, clocks and the arithmetic of rounds."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from twoaxis.base.timer import Rounds, seconds, take_turns


def busy(duration: float) -> None:
    end = time.process_time() + duration
    while time.process_time() < end:
        pass


@pytest.fixture(autouse=True)
def one_thread() -> object:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_round_begins_with_the_next() -> None:
    order: list[str] = []
    rounds: list[int] = []
    collecting: list[bool] = []

    def run(name: str) -> None:
        order.append(name)
        collecting.append(gc.isenabled())

    times = take_turns({name: lambda name=name: run(name) for name in "ab"}, 3, warmup=1, report=rounds.append)
    assert "".join(order) == "ab" + "abbaab"
    assert rounds == [1, 2, 3]
    assert [len(its.values) for its in times.values()] == [3, 3]
    assert not any(collecting)
    assert gc.isenabled()


def test_short_work_is_timed_in_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twoaxis.base.timer.seconds", lambda run, device: 1.0)
    for within, rounds in ((0.0, 2), (2.5, 2), (5.5, 5), (100.0, 8)):
        times = take_turns({name: lambda: None for name in "ab"}, 2, within=within)
        assert [len(its.values) for its in times.values()] == [rounds, rounds]


def test_cpu_time_on_one_thread_and_the_wall_clock_on_several() -> None:
    assert seconds(lambda: time.sleep(0.2)) < 0.1  # other processes do not count, nor does sleep
    assert 0.03 <= seconds(lambda: busy(0.03)) < 0.2
    torch.set_num_threads(2)
    assert seconds(lambda: time.sleep(0.05)) >= 0.05


def test_arithmetic_of_rounds() -> None:
    rounds = Rounds((4.0, 1.0, 3.0, 2.0, 100.0))
    assert rounds.median == 3.0
    assert Rounds((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)).spread == 2.0  # quartiles 2 and 6
    assert Rounds((5.0,)).spread == 0.0
    assert Rounds((2.0, 6.0)).over(Rounds((1.0, 2.0))) == Rounds((2.0, 3.0))


def test_what_ran_is_put_back_after_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        take_turns({"a": fail}, 1)
    assert gc.isenabled()
    for runs, rounds in (({}, 1), ({"a": fail}, 0)):
        with pytest.raises(ValueError, match=f"got {len(runs)} and rounds={rounds}"):
            take_turns(runs, rounds)
