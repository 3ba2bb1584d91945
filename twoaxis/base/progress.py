"""A progress bar of one line on stderr, and one plain line at the end where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO


class Progress:
    """Shows how far a piece of work is.

        with Progress("eval", total=10_000, unit="tokens") as bar:
            bar.advance(512, "loss 2.31")

    On a terminal it redraws one line ten times a second and replaces it by the closing line. Elsewhere it prints the
    closing line only. Work that ends in an error has no closing line.

    Args:
        what: name of the work.
        total: units of it.
        unit: what they are.
        start: units that were done before, as when work is taken up again; they count for the bar, not for the speed.
        out: where to write; None is stderr.
        clock: seconds, for tests.
        terminal: whether somebody watches; None asks `out`.
    """

    WIDTH = 24

    def __init__(
        self,
        what: str,
        total: int,
        unit: str,
        *,
        start: int = 0,
        out: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
        terminal: bool | None = None,
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.out = sys.stderr if out is None else out
        self.clock = clock
        self.terminal = self.out.isatty() if terminal is None else terminal
        self.done, self.start, self.note = start, start, ""
        self.begun = self.drawn = clock()
        self.long = 0  # characters on the line

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._line("")
        if error is None:
            seconds, made = self.seconds, self.done - self.start
            rate = f", {made / seconds:,.0f} {self.unit}/s" if seconds > 0 else ""
            note = f"  {self.note}" if self.note else ""
            self.out.write(f"{self.what}: {made:,} {self.unit} in {seconds:.1f} s{rate}{note}\n")
            self.out.flush()

    @property
    def seconds(self) -> float:
        """Time so far."""
        return self.clock() - self.begun

    def advance(self, units: int, note: str = "") -> None:
        """Some more units are done; `note` is shown behind the bar."""
        self.done += units
        self.note = note
        if self.clock() - self.drawn >= 0.1 or self.done >= self.total:
            self._draw()

    def _draw(self) -> None:
        self.drawn = self.clock()
        part = min(1.0, self.done / self.total) if self.total else 1.0
        filled = round(part * self.WIDTH)
        left = ""
        if self.start < self.done < self.total:
            left = f"  {_duration(self.seconds * (self.total - self.done) / (self.done - self.start))} left"
        note = f"  {self.note}" if self.note else ""
        self._line(f"{self.what} [{'#' * filled}{'.' * (self.WIDTH - filled)}] {part:4.0%}{left}{note}")

    def _line(self, text: str) -> None:
        """Replace the line on the terminal."""
        if self.terminal:
            self.out.write("\r" + text.ljust(self.long) + ("" if text else "\r"))
            self.out.flush()
            self.long = len(text)


def _duration(seconds: float) -> str:
    """As 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
