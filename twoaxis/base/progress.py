"""Progress of long work on stderr: a bar on a terminal and in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from rich.console import Console

INTERVAL = 30.0
"""Seconds between two lines where there is no terminal."""


def console_here() -> Console:
    """The console of rich on stderr; a notebook gets plain lines unless it has ipywidgets, which rich's bars need."""
    jupyter = None if find_spec("ipywidgets") else False
    return Console(stderr=True, highlight=False, force_jupyter=jupyter)


class Progress:
    """Context manager that shows how far a piece of work is.

        with Progress("eval", total=10_000, unit="tokens") as bar:
            bar.advance(512, "loss 2.31")

    It ends with one plain line that stays; work that ends in an error has none.

    Args:
        what: name of the work.
        total: units of it; None where nobody knows.
        unit: what they are.
        initial: units that were done before, as when work is resumed; they count for the bar, not for the speed.
        console: of rich; None is stderr.
    """

    def __init__(
        self, what: str, total: int | None, unit: str, *, initial: int = 0, console: Console | None = None
    ) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done, self.initial, self.note = initial, initial, ""
        self.begun = self._printed = time.perf_counter()
        self._first: tuple[float, int] | None = None
        self.console = console_here() if console is None else console
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal or self.console.is_jupyter:
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar
            from rich.table import Column

            # The note comes from the work (labels with brackets in them), so it is no markup.
            columns = (TextColumn("{task.description}"), BarColumn(16), TaskProgressColumn(), TimeRemainingColumn())
            one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # what does not fit in 80 columns is cut
            note = TextColumn("{task.fields[note]}", markup=False, table_column=one_line)
            self._bar = Bar(*columns, note, console=self.console, transient=True, refresh_per_second=10)
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, note="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            work = self.done - self.initial
            # a note may end with a rate of its own: two would not fit into 80 columns
            said = self.seconds <= 0 or f"{self.unit}/s" in self.note
            rate = "" if said else f", {work / self.seconds:,.0f} {self.unit}/s"
            took = f"{self.seconds:.1f} s" if self.seconds < 120 else duration(self.seconds)
            self.say(f"{self.what}: {work:,} {self.unit} in {took}{rate}{self._behind()}")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begun

    def advance(self, units: int, note: str = "") -> None:
        """Count more units as done; `note` is shown behind the bar."""
        self.done += units
        self.note = note
        now, left = time.perf_counter(), self._left()
        if self._first is None and self.done > self.initial:
            self._first = now, self.done - self.initial
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done, total=self.total, note=note)
        elif now - self._printed >= INTERVAL and self.done != self.total:
            self._printed = now
            so_far = f"{self.done:,} {self.unit}"
            if self.total is not None:
                so_far = f"{self.done / self.total:.0%}{'' if left is None else f', about {duration(left)} left'}"
            self.say(f"{self.what}: {so_far}{self._behind()}")

    def _left(self) -> float | None:
        """Seconds that the rest takes at the speed since the first units came; None before there are more of them.

        What comes before the first units (imports, reading weights) is not repeated, and no part of their speed.
        """
        if self._first is None or self.total is None:
            return None
        began, first = self._first
        more = self.done - self.initial - first
        return (time.perf_counter() - began) * (self.total - self.done) / more if more > 0 else None

    def say(self, text: str) -> None:
        """Print a line of its own, above the bar if there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _behind(self) -> str:
        return f"  {self.note}" if self.note else ""


def duration(seconds: float) -> str:
    """A time span as 45s, 3m05s or 2h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
