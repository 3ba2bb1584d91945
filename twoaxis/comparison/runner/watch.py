"""The coordinator: shows and judges runs by what stands in their folders, and knows nothing else of them.

compare ━━━━━━━━━━━━━━━━━━  38% 0:04:10 7 of 18 runs  deep_delta, seed 2: loss 3.214  standard, seed 2 ...
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from twoaxis.base.files import file_errors
from twoaxis.base.interrupt import StopSignal
from twoaxis.base.progress import Progress, console_here
from twoaxis.comparison.runner.launchers import Launcher
from twoaxis.comparison.runner.worker import DISK_REFUSED, FAILED, OUTPUT, PROGRESS, TRIES, Unit, Work, read_failure

LOOK = 0.5
"""Seconds between two looks at the folders."""


def _remove(unit: Unit, *names: str) -> None:
    for name in names:
        with file_errors(unit.folder / name, "removed"):
            (unit.folder / name).unlink(missing_ok=True)


class Watch:
    """Follows the units of a comparison as they go on, from their files.

    Args:
        work: what is done.
        console: of rich; None is stderr.
        changed: called when units have ended.
    """

    def __init__(
        self, work: Work, *, console: Console | None = None, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.console = console_here() if console is None else console
        self.work, self.changed = work, changed
        self.units: list[Unit] = list(work.units())
        self.done = {unit.folder for unit in self.units if unit.outcome() is not None}
        self.failed: dict[Path, int] = {}
        self.first: dict[Path, float] = {}

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return len(self.done) == len(self.units) and not self.work.later()

    def run(
        self,
        launcher: Launcher,
        name: str,
        folder: Path,
        jobs: int,
        use: Sequence[str] = (),
        *,
        processes: int = 1,
        joined: bool = False,
    ) -> dict[str, str]:
        """Have everything done that has no result; why runs failed, by their names.

        Ctrl-C, SIGTERM and a closed terminal stop the runs after a checkpoint; a second one stops at once.

        Args:
            launcher: starts the worker.
            name: of the work, for the worker.
            folder: that it works on.
            jobs: runs at once.
            use: Python files that the worker runs first.
            processes: of a run.
            joined: whether another coordinator is at it: what its runs say of themselves stays.

        Raises:
            Interrupted: after a signal.
        """
        total = len(self.units) + len(self.work.later())
        if self.done:
            self.say(f"compare: {len(self.done):,} of {total:,} runs are there already")
        for unit in () if joined else self.units:
            _remove(unit, FAILED, PROGRESS)  # of another attempt
        if not self.finished:
            with contextlib.closing(launcher), StopSignal().listening():
                try:
                    self._follow(launcher, name, folder.resolve(), jobs, use, processes)
                except KeyboardInterrupt:
                    self.say("stopping: the runs save where they are (once more to stop at once)")
                    launcher.stop()
                    raise
        for unit in self.units:
            if unit.outcome() is not None:
                _remove(unit, OUTPUT, FAILED, PROGRESS)  # what only an unfinished one needs
        return self._failures()

    def _failures(self) -> dict[str, str]:
        found = {unit.name: read_failure(unit.folder) for unit in self.units if unit.folder not in self.done}
        return {name: failure.message for name, failure in found.items() if failure.tries}

    def _follow(self, launcher: Launcher, *started: Any) -> None:
        """Start the worker and look at the folders until it ends, which must not leave runs without a reason."""
        launcher.start(*started)
        size = sum(unit.size for unit in self.units) + sum(self.work.later())
        with Progress("compare", round(size), "MFLOP", console=self.console) as bar:
            bar.done = bar.initial = round(sum(u.size for u in self.units if u.folder in self.done))
            while (code := launcher.ended()) is None:
                self._look(bar)
                time.sleep(LOOK)
            self._look(bar)
        if code == DISK_REFUSED and not self._failures():
            raise ValueError(f"the system refuses files: {launcher.said}. What was finished is kept; start again")
        if code not in (0, DISK_REFUSED):
            raise ValueError(
                f"the process that starts the runs has ended with {code}; start again, finished runs are kept. It "
                f"said: {launcher.said}"
            )

    def _look(self, bar: Progress) -> None:
        """Read what has changed."""
        before = len(self.done)
        self.units = list(self.work.units())
        total = len(self.units) + len(self.work.later())
        notes, size = [], 0.0
        for unit in self.units:
            outcome = None if unit.folder in self.done else unit.outcome()
            if outcome is not None:
                self.done.add(unit.folder)
                self.first.pop(unit.folder, None)
                if not self.console.is_terminal or "diverged" in outcome:
                    bar.say(f"{len(self.done)}/{total}  {unit.name}: {outcome}")
            if unit.folder in self.done:
                size += unit.size
                continue
            self._look_for_failure(unit, bar)
            first, part, note = read_progress(unit.folder)
            if part is not None:
                if unit.folder not in self.first:  # it was resumed there: that work is not done now
                    self.first[unit.folder] = first
                    bar.initial += round(first * unit.size)
                size += part * unit.size
                notes.append(f"{unit.name}: {note}" if note else unit.name)
        if len(self.done) > before:
            self.changed()
        note = f"{len(self.done)} of {total} runs"
        for text in notes:
            if len(note) + len(text) + 60 > self.console.width:
                break
            note += f"  {text}"
        bar.total = max(1, round(sum(unit.size for unit in self.units) + sum(self.work.later())))
        bar.advance(round(size) - bar.done, note)

    def _look_for_failure(self, unit: Unit, bar: Progress) -> None:
        message, tries = read_failure(unit.folder)
        if tries and self.failed.get(unit.folder) != tries:
            self.failed[unit.folder] = tries
            (unit.folder / PROGRESS).unlink(missing_ok=True)
            failed, more = (" failed", "") if tries >= TRIES else ("", "\n  it is tried once more")
            bar.say(f"{unit.name}{failed}: {message}{more}")


def read_progress(folder: Path) -> tuple[float, float | None, str]:
    """Where a run began, how far it is, and its note; None before it tells."""
    with contextlib.suppress(OSError, ValueError):
        first, part, note = (folder / PROGRESS).read_text(encoding="utf-8").split(" ", 2)
        return float(first), float(part), note
    return 0.0, None, ""
