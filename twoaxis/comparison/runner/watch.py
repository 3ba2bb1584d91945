"""The coordinator: shows and judges runs by what stands in their folders, and knows nothing else of them.

compare ━━━━━━━━━━━━━━━━━━  38% 0:04:10 7 of 18 runs  deep_delta, seed 2: loss 3.214  standard, seed 2 ...
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from twoaxis.base.files import file_errors, read_json
from twoaxis.base.interrupt import SIGNALS, Interrupted
from twoaxis.base.progress import Progress
from twoaxis.comparison.runner.launchers import Launcher
from twoaxis.comparison.runner.worker import DISK_REFUSED, FAILED, OUTPUT, PROGRESS, TRIES, Unit, Work

LOOK = 0.5
"""Seconds between two looks at the folders."""


class Failure(NamedTuple):
    """A run that did not come to its end.

    Attributes:
        name: of the run.
        message: why, in words; with the end of what it printed where it crashed.
    """

    name: str
    message: str


def failure(unit: Unit) -> tuple[Failure, int] | None:
    """How a unit failed, as its folder says, and how often it was tried."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = read_json(unit.folder / FAILED) if (unit.folder / FAILED).exists() else {}
        return Failure(unit.name, str(said["message"])), int(said["tries"])
    return None


def tidy(units: Sequence[Unit]) -> None:
    """Remove what only an unfinished unit needs from the folders of finished ones."""
    for unit in units:
        if unit.outcome() is not None:
            _remove(unit.folder, OUTPUT, FAILED, PROGRESS)


def _remove(folder: Path, *names: str) -> None:
    for name in names:
        with file_errors(folder / name, "removed"):
            (folder / name).unlink(missing_ok=True)


class Watch:
    """Follows units as they go on, from their files.

    Args:
        what: name of the work.
        work: what is done.
        unit: of the sizes of its units.
        console: of rich; None is stderr.
        changed: called when units have ended.
    """

    def __init__(
        self,
        what: str,
        work: Work,
        *,
        unit: str = "MFLOP",
        console: Console | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self.console = Console(stderr=True, highlight=False) if console is None else console
        self.what, self.work, self.unit, self.changed = what, work, unit, changed
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
        self, launcher: Launcher, name: str, folder: Path, jobs: int, use: Sequence[str] = (), *, joined: bool = False
    ) -> list[Failure]:
        """Have everything done that has no result; those that failed.

        Ctrl-C, SIGTERM and a closed terminal stop the runs after a checkpoint; a second one stops at once.

        Args:
            launcher: starts the worker.
            name: of the work, for the worker.
            folder: that it works on.
            jobs: runs at once.
            use: Python files that the worker runs first.
            joined: whether another coordinator is at it: what its runs say of themselves stays.

        Raises:
            Interrupted: after a signal.
        """
        total = len(self.units) + len(self.work.later())
        if self.done:
            self.say(f"{self.what}: {len(self.done):,} of {total:,} runs are there already")
        for unit in () if joined else self.units:
            _remove(unit.folder, FAILED, PROGRESS)  # of another attempt
        if not self.finished:
            with contextlib.closing(launcher), on_signals(lambda: self._stop(launcher)):
                launcher.start(name, folder.resolve(), jobs, use)
                size = sum(unit.size for unit in self.units) + sum(self.work.later())
                with Progress(self.what, round(size), self.unit, console=self.console) as bar:
                    bar.done = bar.initial = round(sum(u.size for u in self.units if u.folder in self.done))
                    while (code := launcher.ended()) is None:
                        self._look(bar)
                        time.sleep(LOOK)
                    self._look(bar)
                self._judge(code, launcher.said())
        tidy(self.units)
        missing = [unit for unit in self.units if unit.folder not in self.done]
        return [found[0] for unit in missing if (found := failure(unit)) is not None]

    def _stop(self, launcher: Launcher) -> None:
        self.say("stopping: the runs save where they are (once more to stop at once)")
        launcher.stop()

    def _judge(self, code: int, said: str) -> None:
        """Refuse an end of the worker that leaves runs without a reason."""
        left = [unit for unit in self.units if unit.folder not in self.done]
        if code == DISK_REFUSED and not any(map(failure, left)):
            raise ValueError(f"the system refuses files: {said}. What was finished is kept; start again")
        if code not in (0, DISK_REFUSED):
            raise ValueError(
                f"the process that starts the runs has ended with {code}; start again, finished runs are kept. It "
                f"said: {said}"
            )

    def _look(self, bar: Progress) -> None:
        """Read what has changed."""
        before = len(self.done)
        self.units = list(self.work.units())
        total = len(self.units) + len(self.work.later())
        notes, size = [], 0.0
        for unit in self.units:
            if unit.folder in self.done:
                size += unit.size
                continue
            outcome = unit.outcome()
            if outcome is not None:
                self.done.add(unit.folder)
                size += unit.size
                self.first.pop(unit.folder, None)
                if not self.console.is_terminal or "diverged" in outcome:
                    bar.say(f"{len(self.done)}/{total}  {unit.name}: {outcome}")
                continue
            self._look_for_failure(unit, bar)
            first, part, note = read_progress(unit.folder)
            if part is not None:
                if unit.folder not in self.first:  # it was taken up there: that work is not done now
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
        found = failure(unit)
        if found is None or self.failed.get(unit.folder) == found[1]:
            return
        (_, message), self.failed[unit.folder] = found
        (unit.folder / PROGRESS).unlink(missing_ok=True)
        ended = found[1] >= TRIES
        bar.say(
            f"{unit.name}{' failed' if ended else ''}: {message}" + ("" if ended else "\n  it is taken up once more")
        )


def read_progress(folder: Path) -> tuple[float, float | None, str]:
    """Where a run began, how far it is, and its note; None before it tells."""
    with contextlib.suppress(OSError, ValueError):
        first, part, note = (folder / PROGRESS).read_text(encoding="utf-8").split(" ", 2)
        return float(first), float(part), note
    return 0.0, None, ""


@contextlib.contextmanager
def on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Context manager in which a signal calls `stop` and raises `Interrupted`; a second one interrupts at once."""

    def hear(number: int, frame: Any) -> None:
        raise Interrupted("stopped; the same command goes on from there", number)

    here = threading.current_thread() is threading.main_thread()
    numbers = [n for n in SIGNALS if here and signal.getsignal(n) is not signal.SIG_IGN]  # as under nohup
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        stop()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
