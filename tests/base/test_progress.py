"""The progress bar: on a terminal a bar, a closing line everywhere, nothing false after an error."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from twoaxis.base import progress
from twoaxis.base.progress import Progress, duration


def watched(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, highlight=False), out


def test_a_terminal_sees_the_share_and_the_note() -> None:
    console, out = watched(terminal=True)
    with Progress("eval", 200, "tokens", console=console) as bar:
        bar.advance(50, "loss [2.5]")
        bar._bar.refresh()
        assert "25%" in out.getvalue()
        assert "loss [2.5]" in out.getvalue()  # brackets are no markup
        bar.say("a line of its own")
        bar.advance(150)
    assert "a line of its own" in out.getvalue()
    assert "eval: 200 tokens in " in out.getvalue()


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_gets_a_bar_only_with_the_widgets_that_it_needs(
    widgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: name if widgets else None)
    assert progress.console_here().is_jupyter is widgets


def test_one_rate_in_the_closing_line_and_none_after_an_error() -> None:
    console, out = watched(terminal=False)
    with pytest.raises(ZeroDivisionError), Progress("eval", 10, "tokens", console=console) as bar:
        bar.advance(1 // 0)
    assert out.getvalue() == ""
    with Progress("train", 10, "tokens", console=console) as bar:
        bar.advance(10, "loss 3  7 tokens/s")
    assert out.getvalue().count("tokens/s") == 1


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = watched(terminal=False)
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with Progress("train", 200, "tokens", initial=100, console=console) as bar:
        now[0] += 20
        bar.advance(10, "loss 3")
        assert out.getvalue() == ""
        now[0] += 20
        bar.advance(10, "loss 2")
        assert out.getvalue() == "train: 60%, about 2m40s left  loss 2\n"
        now[0] += 10
        bar.advance(80)
    assert out.getvalue().endswith("\ntrain: 100 tokens in 50.0 s, 2 tokens/s\n")


def test_no_time_is_foretold_before_units_tell_their_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    console, out = watched(terminal=False)
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with Progress("compare", 1_000_000, "MFLOP", console=console) as bar:
        for units in (0, 1_000, 1_000):  # nothing for a minute; then each thousand takes 40 s
            now[0] += 40 if units else 60
            bar.advance(units)
        now[0] += 1
        bar.advance(998_000)
    assert out.getvalue().splitlines() == [
        *("compare: 0%", "compare: 0%", "compare: 0%, about 11h05m left"),
        "compare: 1,000,000 MFLOP in 2m21s, 7,092 MFLOP/s",
    ]


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59, 185, 7620)] == ["0s", "59s", "3m05s", "2h07m"]
