"""What a comparison shows while it runs: a bar with time left and losses, or a line per run where nobody watches.

compare ━━━━━━━━━━━━━━━━━━  38% 0:04:10 7 of 18 runs  deep_delta seed 2 loss 3.214, standard seed 2 ...
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from twoaxis.base.progress import Progress
from twoaxis.comparison.plan import Run
from twoaxis.training.results import Result

UNIT = 1e6
"""Progress is counted in millions of operations: time goes by them, not by runs of different sizes."""


class Live:
    """Shows a comparison on stderr.

    Args:
        out: where to write; None is stderr.
        terminal: whether somebody watches; None asks `out`.
        width: characters of a line.
    """

    def __init__(self, *, out: TextIO | None = None, terminal: bool | None = None, width: int | None = None) -> None:
        self.console = Console(file=out, stderr=out is None, force_terminal=terminal, highlight=False)
        self.terminal = self.console.is_terminal
        self.width = width
        self.bar: Progress | None = None

    def say(self, text: str) -> None:
        """A line of its own."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def showing(self, what: str, runs: Sequence[Run], total: int) -> Iterator[Shown]:
        """Show runs until the block ends.

        Args:
            what: name of the work.
            runs: those that are not finished.
            total: how many there are with the finished ones.
        """
        if len(runs) < total:
            self.say(f"{what}: {total - len(runs):,} of {total:,} runs are there already")
        if not runs:
            yield Shown(self, None, 0, total)
            return
        work = sum(_units(run, run.row.steps) for run in runs)
        with Progress(what, work, "MFLOP", console=self.console) as bar:
            self.bar = bar
            try:
                yield Shown(self, bar, total - len(runs), total)
            finally:
                self.bar = None


class Shown:
    """Runs as they go on.

    Args:
        live: where they are shown.
        bar: their progress.
        finished: runs that are done.
        total: runs there are.
    """

    def __init__(self, live: Live, bar: Progress | None, finished: int, total: int) -> None:
        self.live, self.bar, self.finished, self.total = live, bar, finished, total
        self.steps: dict[Path, int] = {}
        self.losses: dict[Path, tuple[Run, float | None]] = {}

    def step(self, run: Run, step: int, loss: float | None) -> None:
        """A run has come to a step."""
        if self.bar is None:
            return
        before = self.steps.get(run.folder)
        self.steps[run.folder], self.losses[run.folder] = step, (run, loss)
        if before is None and loss is None:  # it was taken up there: that work is not done now
            self.bar.total = max(1, self.bar.total - _units(run, step))
            before = step
        self.bar.advance(_units(run, step) - _units(run, before or 0), self._note())

    def done(self, run: Run, result: Result) -> None:
        """A run has its result."""
        self.finished += 1
        if self.bar is not None:
            left = _units(run, run.row.steps) - _units(run, self.steps.pop(run.folder, 0))
            self.losses.pop(run.folder, None)
            if result.status == "diverged":
                self.bar.total = max(1, self.bar.total - left)
                left = 0
            self.bar.advance(left, self._note())
        loss = "diverged" if result.loss is None else f"loss {result.loss:.4f}"
        if not self.live.terminal:
            self.live.say(f"{self.finished}/{self.total}  {run.name}: {loss} ({result.seconds:.0f} s of training)")
        elif result.status == "diverged":
            self.live.say(f"{run.name}: {result.message}")

    def again(self, run: Run, message: str) -> None:
        """A run ended early and will be taken up once more."""
        self._forget(run)
        self.live.say(f"{run.name}: {message}\n  it is taken up once more")

    def failed(self, run: Run, message: str) -> None:
        """A run is given up."""
        self._forget(run)
        self.live.say(f"{run.name} failed: {message}")

    def _forget(self, run: Run) -> None:
        self.losses.pop(run.folder, None)
        step = self.steps.pop(run.folder, 0)
        if self.bar is not None:
            self.bar.done = max(0, self.bar.done - _units(run, step))

    def _note(self) -> str:
        running = [
            f"{run.label} seed {run.seed}" + ("" if loss is None or not math.isfinite(loss) else f" loss {loss:.3f}")
            for run, loss in self.losses.values()
        ]
        note = f"{self.finished} of {self.total} runs"
        width = self.live.width or _columns()
        for shown in running:
            if len(note) + len(shown) + 60 > width:
                break
            note += f"  {shown}"
        return note


def _units(run: Run, step: int) -> int:
    return round(run.flops * step / run.row.steps / UNIT)


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((120, 24)).columns
