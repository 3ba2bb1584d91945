"""The runs of a comparison, read from its folder at any moment, finished or not.

OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/       a run each
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twoaxis.comparison.plan import Plan
from twoaxis.comparison.statistics import mean_of_all
from twoaxis.training.folder import LOG, MODEL, load_log
from twoaxis.training.result import LARGEST, Result, load_result

SPIKE = 4.0
"""Times the median of a run's gradient norms from which one is a spike."""
LATE = 0.8
"""Part of a run after which evaluations are late ones."""


class Curve(NamedTuple):
    """Loss as a run went on: held-out, one entry per evaluation after the training began and all on the same rows, or
    of training, per log."""

    tokens: tuple[float, ...]
    loss: tuple[float, ...]

    def at(self, tokens: float) -> float | None:
        """The loss after so many tokens, between two evaluations linear in their logarithm.

        None before the first evaluation and after the last, where nothing is known.
        """
        if not self.tokens or not self.tokens[0] * (1 - 1e-9) <= tokens <= self.tokens[-1] * (1 + 1e-9):
            return None
        return float(np.interp(math.log(tokens), np.log(self.tokens), self.loss))

    def reaches(self, loss: float) -> float | None:
        """Tokens after which the loss is no higher than `loss` for the first time; None where it never is."""
        below = next((place for place, value in enumerate(self.loss) if value <= loss), None)
        if not below:  # never, or before the first evaluation tells
            return None
        x, y = np.log(self.tokens[below - 1 : below + 1]), self.loss[below - 1 : below + 1]
        return math.exp(float(np.interp(-loss, (-y[0], -y[1]), x)))

    def on_rows(self, rows: Sequence[float | None], count: int) -> Curve:
        """The curve with its end on the first `count` of the `rows`, as the evaluations before it.

        The last evaluation takes more rows than the others, and those are harder or easier by more than methods differ.
        """
        first = [row for row in rows[:count] if row is not None]
        if not self.tokens or len(rows) <= count or not first:
            return self
        return self._replace(loss=(*self.loss[:-1], math.fsum(first) / len(first)))

    @property
    def late(self) -> float | None:
        """Mean loss of the evaluations in the last fifth of the run."""
        return mean_of_all([y for x, y in zip(self.tokens, self.loss, strict=True) if x > LATE * self.tokens[-1]])


def together(curves: Iterable[Curve]) -> dict[float, list[float]]:
    """The losses of several curves by the tokens at which all of them have one."""
    known = [dict(zip(curve.tokens, curve.loss, strict=True)) for curve in curves]
    places = sorted(set.intersection(*map(set, known))) if known else []
    return {place: [curve[place] for curve in known] for place in places}


class RunRecord(NamedTuple):
    """A run that has begun."""

    folder: Path  # its place in the comparison's folder
    result: Result | None  # None while it is not finished
    curve: Curve  # its evaluations so far
    training: Curve  # its training loss so far, mean of the steps between two records
    spikes: int  # log records after its first fifth whose gradient norm is far above the usual
    model: bool  # whether its model was kept

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being a number."""
        return self.result is not None and (self.result.status == "diverged" or self.result.loss is None)


def read_runs(folder: Path, plan: Plan) -> dict[Path, dict[int, RunRecord]]:
    """The runs of a plan that have begun, by the folder of their row and by seed."""
    found: dict[Path, dict[int, RunRecord]] = {row.folder: {} for row in plan.rows}
    for run in plan.runs():
        if (home := folder / run.folder).is_dir():
            (curve, training, spikes), result = read_log(home), load_result(home)
            if result is not None and curve.tokens and curve.tokens[-1] == result.tokens:
                curve = curve.on_rows(result.row_losses or (), plan.base.eval_examples)
            record = RunRecord(run.folder, result, curve, training, spikes, (home / MODEL).is_dir())
            found[run.row.folder] |= dict.fromkeys(plan.seeds if plan.is_seedless(run.row) else (run.seed,), record)
    return found


def read_log(folder: Path) -> tuple[Curve, Curve, int]:
    """The evaluations of a run's log, from the first after training began, its training loss, and its spikes."""
    held_out, training, norms = dict[float, float](), dict[float, float](), list[float]()
    for number, record in enumerate(load_log(folder), start=1):
        known = {name: record[name] for name in ("held_out_loss", "loss", "grad_norm") if record.get(name) is not None}
        for name, value in ({"tokens": record.get("tokens")} | known if known else {}).items():
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
                raise ValueError(f"{folder / LOG}, line {number}: {name} must be a number, got {value!r:.40}")
        for name, losses in (("held_out_loss", held_out), ("loss", training)):
            if name in known and record["tokens"] > 0:
                losses[float(record["tokens"])] = float(known[name])
        norms += [float(known["grad_norm"])] if "grad_norm" in known else []
    later = norms[len(norms) // 5 :]
    usual = float(np.median(later)) if later else 0.0
    curves = [Curve(tuple(sorted(of)), tuple(of[place] for place in sorted(of))) for of in (held_out, training)]
    return curves[0], curves[1], sum(norm > SPIKE * usual for norm in later)
