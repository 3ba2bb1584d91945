"""A comparison folder as values: the plan, the runs that are there and their held-out curves.

    OUT/compare.json                                                    the plan and its rows
    OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/       a run each

Nothing is computed here. Unfinished, diverged and missing runs are all represented, so that a report can be made at any
moment of a comparison.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import read_json
from twoaxis.training.results import LOG, RUN, Result, load_log, load_result

if TYPE_CHECKING:
    from twoaxis.comparison.plan import Plan, Row
    from twoaxis.model.variant import Contender


class Curve(NamedTuple):
    """Held-out loss as a run went on, one entry per evaluation."""

    tokens: tuple[float, ...]
    loss: tuple[float, ...]

    def at(self, tokens: float) -> float | None:
        """The loss after so many tokens, between two evaluations linear in their logarithm.

        None before the first evaluation and after the last, where nothing is known.
        """
        if not self.tokens or not self.tokens[0] * (1 - 1e-9) <= tokens <= self.tokens[-1] * (1 + 1e-9):
            return None
        for index in range(1, len(self.tokens)):
            left, right = self.tokens[index - 1], self.tokens[index]
            if left <= tokens <= right:
                part = math.log(tokens / left) / math.log(right / left) if right > left else 1.0
                return self.loss[index - 1] + part * (self.loss[index] - self.loss[index - 1])
        return self.loss[0] if tokens < self.tokens[0] * (1 + 1e-9) else self.loss[-1]


class Run(NamedTuple):
    """One run that has begun."""

    seed: int
    result: Result | None
    """None while it is not finished."""
    curve: Curve
    info: dict[str, Any]
    """run.json."""

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being a number."""
        return self.result is not None and (self.result.status == "diverged" or self.result.loss is None)

    @property
    def loss(self) -> float | None:
        """Held-out loss at the end; None if it diverged or is not finished."""
        return None if self.result is None or self.diverged else self.result.loss


class Line(NamedTuple):
    """A contender on a data set at a size, with its runs."""

    row: Row
    contender: Contender
    runs: dict[int, Run]
    """By seed; those that have begun."""

    @property
    def ended(self) -> dict[int, Run]:
        """Runs that finished or diverged."""
        return {seed: run for seed, run in self.runs.items() if run.result is not None}

    @property
    def finished(self) -> dict[int, Run]:
        """Runs that came to their end with a loss."""
        return {seed: run for seed, run in self.runs.items() if run.loss is not None}


class Folder(NamedTuple):
    """A comparison folder."""

    place: Path
    plan: Plan
    lines: tuple[Line, ...]
    """In the order of the plan."""


def load_folder(folder: str | Path) -> Folder:
    """Read a comparison, finished or not."""
    from twoaxis.comparison.plan import PLAN, Plan

    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the --out of twoaxis compare")
    plan = Plan.load(folder)
    if plan is None:
        raise ValueError(f"{folder} has no {PLAN}; give the --out of twoaxis compare")
    runs: dict[tuple[str, str, str], dict[int, Run]] = {}
    for planned in plan.runs():
        run = _load_run(folder / planned.folder, planned.seed)
        if run is not None:
            row = planned.row
            runs.setdefault((row.data, row.size, row.contender), {})[planned.seed] = run
    lines = tuple(
        Line(row, plan.contender(row.contender), runs.get((row.data, row.size, row.contender), {})) for row in plan.rows
    )
    return Folder(folder, plan, lines)


def _load_run(folder: Path, seed: int) -> Run | None:
    """A run folder, or None where nothing has begun."""
    if not folder.is_dir():
        return None
    info = read_json(folder / RUN) if (folder / RUN).exists() else {}
    curve = load_curve(folder) if (folder / LOG).exists() else Curve((), ())
    return Run(seed, load_result(folder), curve, info if isinstance(info, dict) else {})


def load_curve(folder: str | Path) -> Curve:
    """The evaluations of a run's log, from the first after training began."""
    found: dict[float, float] = {}
    for record in load_log(folder):
        loss = record.get("held_out_loss")
        if loss is not None and record.get("tokens") and math.isfinite(loss):
            found[float(record["tokens"])] = float(loss)
    places = sorted(found)
    return Curve(tuple(places), tuple(found[place] for place in places))
