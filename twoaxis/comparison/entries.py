"""The runs of a contender, read from a comparison's folder at any moment.

Entry                     a contender on a data set at a size
  RunRecord               a run of it: its result, if it has ended
    Curve                 its evaluations

OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/       a run each
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twoaxis.comparison.decisions import loss_sample
from twoaxis.comparison.plan import Plan, Row
from twoaxis.comparison.scaling import Interval
from twoaxis.comparison.statistics import Difference, Sample, mean_of_all, spread_of
from twoaxis.training.results import LARGEST, LOG, MODEL, Result, load_log, load_result

if TYPE_CHECKING:
    from twoaxis.model.variant import Contender

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


class Equal(NamedTuple):
    """Losses at one budget of an axis."""

    budget: float  # tokens, operations or seconds
    loss: float | None  # the contender's mean
    difference: Difference  # to the baseline at the same budget
    read_at: float  # how far the less finished of the two runs had come, 1 at the end
    early: str  # whose learning rate had not come down yet: contender, baseline, or nobody's
    unsure: bool  # whether two throughputs decide it that are closer to each other than they were measured

    @property
    def indicative(self) -> bool:
        """Whether a schedule had not ended, or throughputs are too close."""
        return bool(self.early) or self.unsure


class Worth(NamedTuple):
    """What a contender's loss is worth: as many times the baseline's tokens, and its time."""

    tokens: Interval  # how many times its tokens the baseline would need for the same loss
    throughput: float | None  # the contender's over the baseline's; None where it is not known
    net: Interval | None  # how many times sooner it gets there, by the clock
    source: str  # what tells: a law over sizes, or the baseline with more tokens


class Power(NamedTuple):
    """What it would take to resolve a true difference in 80% of comparisons."""

    effect: float  # the difference
    seeds: int | None  # of a new comparison; None where no number does, as the held-out rows are too few
    seconds: float | None  # of training of contender and baseline with so many seeds, at their throughput


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A contender on a data set at a size, with its runs and how it compares."""

    row: Row  # what was planned: budget, counts and learning rate
    contender: Contender  # what was put into the model
    baseline: bool  # whether the others are compared with it
    check: bool  # whether it tells about the baseline and gets no verdict
    init: str  # rescaling of the initial weights: as the paper says, or paired
    seeds: tuple[int, ...]  # planned
    runs: Mapping[int, RunRecord]  # by seed; those that have begun
    difference: Difference | None = None  # loss minus the baseline's, as it was matched; None for the baseline
    equal: Mapping[str, Equal] = field(default_factory=dict)  # the same at equal tokens, flops and time
    accuracy_difference: Difference | None = None  # accuracy minus the baseline's, for tasks
    worth: Worth | None = None  # its speed-up; None without a law or an exchange rate
    worth_note: str = ""  # why there is none, or what to think of it
    power: Power | None = None  # what it would take to resolve a difference that is not

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.contender.label

    @property
    def ended(self) -> dict[int, Result]:
        """Results by seed, those of diverged runs among them."""
        return {seed: run.result for seed, run in self.runs.items() if run.result is not None}

    @property
    def results(self) -> dict[int, Result]:
        """Of the runs that finished with a loss, by seed."""
        return {seed: result for seed, result in self.ended.items() if not self.runs[seed].diverged}

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds whose loss stopped being a number."""
        return tuple(seed for seed, run in self.runs.items() if run.diverged)

    @property
    def missing(self) -> tuple[int, ...]:
        """Seeds that have not finished."""
        return tuple(seed for seed in self.seeds if seed not in self.ended)

    @property
    def losses(self) -> dict[int, float]:
        """Held-out loss at the end, by seed."""
        return {seed: result.loss for seed, result in self.results.items() if result.loss is not None}

    @property
    def curves(self) -> dict[int, Curve]:
        """Held-out loss of finished runs as they went on, by seed."""
        return {seed: self.runs[seed].curve for seed in self.results}

    @property
    def verdict(self) -> str:
        """`resolved (better)`, `resolved (worse)`, `equivalent`, `not resolved`, `baseline` or `check`."""
        if self.difference is None or self.check:
            return "check" if self.check else "baseline"
        return self.difference.verdict

    def mean(self, name: str) -> float | None:
        """Mean over finished runs of a field of their results; None where one has none."""
        return mean_of_all([getattr(result, name) for result in self.results.values()])

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput as it was measured before the runs, else that of all runs that ended."""
        if self.row.tokens_per_second is not None:
            return self.row.tokens_per_second
        return mean_of_all([result.tokens_per_second for result in self.ended.values()])

    @property
    def spikes(self) -> int:
        """Of all runs."""
        return sum(run.spikes for run in self.runs.values())

    @property
    def spread(self) -> float | None:
        """Standard deviation of its losses over seeds."""
        return spread_of(list(self.losses.values())) if len(self.losses) > 1 else None

    @property
    def late(self) -> float | None:
        """Mean over the late evaluations of finished runs."""
        return mean_of_all([curve.late for curve in self.curves.values() if curve.tokens])

    @property
    def end(self) -> float | None:
        """Mean of the last entries of its curves, on the rows that these are about."""
        return mean_of_all([curve.loss[-1] for curve in self.curves.values() if curve.loss])

    def tokens_to(self, loss: float) -> float | None:
        """Tokens after which its mean loss is no higher than `loss`, by the curves of its finished runs."""
        losses = together(self.curves.values())
        return Curve(tuple(losses), tuple(math.fsum(each) / len(each) for each in losses.values())).reaches(loss)

    @property
    def peak_memory(self) -> int | None:
        """Bytes at the peak of a step."""
        return max((r.peak_memory for r in self.results.values() if r.peak_memory is not None), default=None)

    def scale(self, axis: str) -> float | None:
        """What a token is worth on an axis: one, its operations or its seconds."""
        if axis == "time":
            return 1 / self.tokens_per_second if self.tokens_per_second else None
        return {"tokens": 1.0, "flops": float(self.row.flops_per_token)}[axis]

    def sample(self, part: float | None = None) -> Sample:
        """Losses by seed; left out where a run has not ended or its curve does not reach.

        Args:
            part: of the run, read on its curve, the end too; None is the loss at the end on all rows.
        """
        if part is None:
            return loss_sample(self.ended)
        curves = {seed: self.runs[seed].curve.at(part * self.row.tokens) for seed in self.results}
        return Sample({seed: loss for seed, loss in curves.items() if loss is not None} | dict.fromkeys(self.diverged))

    @property
    def costs(self) -> dict[str, float | None]:
        """Counted and measured."""
        counted = {name: getattr(self.row, name) for name in ("parameters", "flops_per_token", "tokens")}
        return counted | {"tokens_per_second": self.tokens_per_second, "peak_memory": self.peak_memory}

    def to_dict(self, base: Entry) -> dict[str, Any]:
        """For JSON, with the ratios of its costs to the baseline's."""
        equal = {axis: it._asdict() | {"difference": it.difference.to_dict()} for axis, it in self.equal.items()}
        worth = {} if self.worth is None else self.worth._asdict()
        return {
            "key": self.row.contender,
            **{name: getattr(self, name) for name in ("label", "baseline", "check", "init", "losses", "verdict")},
            **{name: getattr(self, name) for name in ("spread", "late", "spikes")},
            **{name: self.mean(name) for name in ("loss", "bits_per_byte", "accuracy")},
            **self.costs,
            **{name: getattr(self.row, name) for name in ("steps", "lr", "lr_edge", "lr_losses")},
            "finished": list(self.results),
            "diverged": list(self.diverged),
            "missing": list(self.missing),
            "ratios": {name: ratio(value, base.costs[name]) for name, value in self.costs.items()},
            "difference": self.difference and self.difference.to_dict(),
            "accuracy_difference": self.accuracy_difference and self.accuracy_difference.to_dict(),
            "equal": {axis: values | {"indicative": self.equal[axis].indicative} for axis, values in equal.items()},
            "speed_up": {name: it._asdict() if isinstance(it, Interval) else it for name, it in worth.items()} or None,
            "speed_up_note": self.worth_note,
            "power": self.power and self.power._asdict(),
            "curves": {seed: curve._asdict() for seed, curve in self.curves.items()},
        }


def ratio(mine: float | None, theirs: float | None) -> float | None:
    """Of a contender's cost to the baseline's."""
    return mine / theirs if mine is not None and theirs else None


def read_entries(folder: Path, plan: Plan) -> list[Entry]:
    """The rows of a plan with the runs that have begun."""
    runs: dict[Path, dict[int, RunRecord]] = {row.folder: {} for row in plan.rows}
    for run in plan.runs():
        if (home := folder / run.folder).is_dir():
            (curve, training, spikes), result = load_curves(home), load_result(home)
            if result is not None and curve.tokens and curve.tokens[-1] == result.tokens:
                curve = curve.on_rows(result.row_losses or (), plan.base.eval_examples)
            record = RunRecord(run.folder, result, curve, training, spikes, (home / MODEL).is_dir())
            runs[run.row.folder] |= dict.fromkeys(plan.seeds if plan.is_seedless(run.row) else (run.seed,), record)
    entries = []
    for row in plan.rows:
        contender = plan.contender(row.contender)
        made = Entry(
            row=row,
            contender=contender,
            baseline=row.contender == plan.baseline_key,
            check=contender.label in plan.checks,
            init=str(contender.model.get("init", plan.base.model.get("init", "paper"))),
            seeds=plan.seeds,
            runs=runs[row.folder],
        )
        entries.append(made)
    return entries


def load_curves(folder: Path) -> tuple[Curve, Curve, int]:
    """The evaluations of a run's log, from the first after training began, its training loss, and its spikes."""
    found: dict[str, dict[float, float]] = {"held_out_loss": {}, "loss": {}}
    norms: list[float] = []
    for number, record in enumerate(load_log(folder), start=1):
        names = [name for name in (*found, "grad_norm") if record.get(name) is not None]
        for name in ("tokens", *names) if names else ():
            value = record.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
                raise ValueError(f"{folder / LOG}, line {number}: {name} must be a number, got {value!r:.40}")
        for name in found.keys() & names:
            if record["tokens"] > 0:
                found[name][float(record["tokens"])] = float(record[name])
        if "grad_norm" in names:
            norms.append(float(record["grad_norm"]))
    held_out, training = (Curve(tuple(sorted(of)), tuple(of[place] for place in sorted(of))) for of in found.values())
    later = norms[len(norms) // 5 :]
    usual = float(np.median(later)) if later else 0.0
    return held_out, training, sum(n > SPIKE * usual for n in later)
