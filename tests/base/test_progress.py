"""The progress bar: one line on a terminal, a closing line everywhere, nothing false after an error."""

from __future__ import annotations

import io

import pytest

from twoaxis.base.progress import Progress, _duration


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def bar(terminal: bool, total: int = 200) -> tuple[Progress, io.StringIO, Clock]:
    out, clock = io.StringIO(), Clock()
    return Progress("eval", total, "tokens", out=out, clock=clock, terminal=terminal), out, clock


def test_a_terminal_sees_the_share_the_time_left_and_the_note() -> None:
    progress, out, clock = bar(terminal=True)
    with progress:
        clock.now += 30
        progress.advance(50, "loss 2.5000")
        lines = out.getvalue().split("\r")
        assert lines[-1] == "eval [######..................]  25%  1m30s left  loss 2.5000"
        clock.now += 0.05
        progress.advance(50)
        assert out.getvalue().split("\r") == lines  # too soon to draw again
        clock.now += 29.95
        progress.advance(100, "x")
        assert out.getvalue().split("\r")[-1].rstrip() == "eval [########################] 100%  x"
    assert out.getvalue().endswith("\reval: 200 tokens in 60.0 s, 3 tokens/s  x\n")


def test_a_longer_line_leaves_nothing_behind() -> None:
    progress, out, clock = bar(terminal=True)
    with progress:
        clock.now += 1
        progress.advance(1, "a long note")
        long = len(out.getvalue().split("\r")[-1])
        clock.now += 1
        progress.advance(1, "b")
        assert len(out.getvalue().split("\r")[-1]) == long


def test_a_file_gets_the_closing_line_only() -> None:
    progress, out, clock = bar(terminal=False)
    with progress:
        clock.now += 2
        progress.advance(200)
        assert out.getvalue() == ""
    assert out.getvalue() == "eval: 200 tokens in 2.0 s, 100 tokens/s\n"


def test_an_error_has_no_closing_line() -> None:
    for terminal in (True, False):
        progress, out, _ = bar(terminal)
        with pytest.raises(ValueError, match="broken"), progress:
            raise ValueError("broken")
        assert "tokens in" not in out.getvalue()


def test_no_work_and_no_time() -> None:
    progress, out, _ = bar(terminal=True, total=0)
    with progress:
        pass
    assert "100%" in out.getvalue()
    assert out.getvalue().endswith("\reval: 0 tokens in 0.0 s\n")


def test_durations() -> None:
    assert [_duration(s) for s in (0.4, 59.4, 59.6, 185, 3599.7, 7620)] == [
        "0s",
        "59s",
        "1m00s",
        "3m05s",
        "1h00m",
        "2h07m",
    ]
