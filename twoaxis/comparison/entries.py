"""The runs of a contender, read from a comparison's folder at any moment.

Entry                     a contender on a data set at a size
  RunRecord               a run of it: its result, if it has ended
    Curve                 its evaluations

OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/       a run each
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.comparison.decisions import loss_sample
from twoaxis.comparison.plan import Plan, Row
from twoaxis.comparison.scaling import Interval
from twoaxis.comparison.statistics import Difference, Sample, mean_of_all, spread_of
from twoaxis.training.results import LOG, MODEL, RESULT, Result, load_log, load_result

if TYPE_CHECKING:
    from twoaxis.model.variant import Contender

SPIKE = 4.0
"""Times the median of a run's gradient norms from which one is a spike."""
LATE = 0.8
"""Part of a run after which evaluations are late ones."""
LARGEST = 1e30
"""Beyond it a number in a file is a mistake, and its square or product no number."""


class Curve(NamedTuple):
    """Held-out loss as a run went on, one entry per evaluation after the training began."""

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

    @property
    def late(self) -> float | None:
        """Mean loss of the evaluations in the last fifth of the run."""
        return mean_of_all([y for x, y in zip(self.tokens, self.loss, strict=True) if x > LATE * self.tokens[-1]])


class RunRecord(NamedTuple):
    """A run that has begun.

    Attributes:
        folder: its place in the comparison's folder; `model` in it, if it was kept.
        result: None while it is not finished.
        curve: its evaluations so far.
        spikes: log records after its first fifth whose gradient norm is far above the usual.
        model: whether its model is there.
    """

    folder: Path
    result: Result | None
    curve: Curve
    spikes: int
    model: bool

    @property
    def diverged(self) -> bool:
        """Whether its loss stopped being a number."""
        return self.result is not None and (self.result.status == "diverged" or self.result.loss is None)

    @property
    def loss(self) -> float | None:
        """Held-out loss at the end; None if it diverged or is not finished."""
        return None if self.result is None or self.diverged else self.result.loss


class Equal(NamedTuple):
    """Losses at one budget of an axis.

    Attributes:
        budget: tokens, operations or seconds.
        loss: the contender's mean.
        difference: to the baseline at the same budget.
        read_at: how far the less finished of the two runs had come, 1 at the end.
        early: whose learning rate had not come down yet: contender, baseline, or nobody's.
        unsure: whether two throughputs decide it that are closer to each other than they were measured.
    """

    budget: float
    loss: float | None
    difference: Difference
    read_at: float
    early: str
    unsure: bool

    @property
    def indicative(self) -> bool:
        """Whether a schedule had not ended, or throughputs are too close."""
        return bool(self.early) or self.unsure


class Worth(NamedTuple):
    """What a contender's loss is worth: as many times the baseline's tokens, and its time.

    Attributes:
        tokens: how many times its tokens the baseline would need for the same loss.
        throughput: the contender's over the baseline's; None where it is not known.
        net: how many times sooner it gets there, by the clock.
        source: what tells: a law over sizes, or the baseline with more tokens.
    """

    tokens: Interval
    throughput: float | None
    net: Interval | None
    source: str


class Power(NamedTuple):
    """What it would take to resolve a true difference in 80% of comparisons.

    Attributes:
        effect: the difference.
        seeds: of a new comparison; None where no number does, as the held-out rows are too few.
        seconds: of training of the contender and the baseline with so many seeds.
    """

    effect: float
    seeds: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A contender on a data set at a size, with its runs and how it compares."""

    row: Row
    """What was planned: budget, counts and learning rate."""
    contender: Contender
    """What was put into the model."""
    baseline: bool
    """Whether the others are compared with it."""
    check: bool
    """Whether it tells about the baseline and gets no verdict."""
    init: str
    """Rescaling of the initial weights: as the paper says, or paired."""
    seeds: tuple[int, ...]
    """Planned."""
    runs: Mapping[int, RunRecord]
    """By seed; those that have begun."""
    difference: Difference | None = None
    """Loss minus the baseline's, as it was matched; None for the baseline."""
    equal: Mapping[str, Equal] = field(default_factory=dict)
    """The same at equal tokens, flops and time."""
    accuracy_difference: Difference | None = None
    """Accuracy minus the baseline's, for tasks."""
    worth: Worth | None = None
    """Its speed-up; None without a law or an exchange rate."""
    worth_note: str = ""
    """Why there is none, or what to think of it."""
    power: Power | None = None
    """What it would take to resolve a difference that is not."""

    @property
    def label(self) -> str:
        """What tables call it."""
        return self.contender.label

    @property
    def results(self) -> dict[int, Result]:
        """Of the runs that finished with a loss, by seed."""
        return {seed: run.result for seed, run in self.runs.items() if run.result is not None and not run.diverged}

    @property
    def diverged(self) -> tuple[int, ...]:
        """Seeds whose loss stopped being a number."""
        return tuple(seed for seed, run in self.runs.items() if run.diverged)

    @property
    def missing(self) -> tuple[int, ...]:
        """Seeds that have not finished."""
        return tuple(seed for seed in self.seeds if seed not in self.runs or self.runs[seed].result is None)

    @property
    def losses(self) -> dict[int, float]:
        """Held-out loss at the end, by seed."""
        return {seed: run.loss for seed, run in self.runs.items() if run.loss is not None}

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
        return mean_of_all([run.result.tokens_per_second for run in self.runs.values() if run.result is not None])

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

    def tokens_to(self, loss: float) -> float | None:
        """Tokens after which its mean loss is no higher than `loss`, by the curves of its finished runs."""
        curves = [dict(zip(curve.tokens, curve.loss, strict=True)) for curve in self.curves.values()]
        places = sorted(set.intersection(*map(set, curves))) if curves else []
        means = tuple(math.fsum(curve[place] for curve in curves) / len(curves) for place in places)
        return Curve(tuple(places), means).reaches(loss)

    @property
    def peak_memory(self) -> int | None:
        """Bytes at the peak of a step."""
        return max((r.peak_memory for r in self.results.values() if r.peak_memory is not None), default=None)

    def scale(self, axis: str) -> float | None:
        """What a token is worth on an axis: one, its operations or its seconds."""
        if axis == "time":
            return 1 / self.tokens_per_second if self.tokens_per_second else None
        return {"tokens": 1.0, "flops": float(self.row.flops_per_token)}[axis]

    def sample(self, part: float = 1.0) -> Sample:
        """Losses by seed at a part of the run; left out where a run has not ended or its curve does not reach."""
        ended = {seed: run for seed, run in self.runs.items() if run.result is not None}
        if part >= 1 - 1e-9:
            return loss_sample({seed: run.result for seed, run in ended.items() if run.result is not None})
        read = {seed: None if run.diverged else run.curve.at(part * self.row.tokens) for seed, run in ended.items()}
        return Sample({seed: loss for seed, loss in read.items() if loss is not None or ended[seed].diverged})

    @property
    def costs(self) -> dict[str, float | None]:
        """Counted and measured."""
        counted = {name: getattr(self.row, name) for name in ("parameters", "flops_per_token", "tokens")}
        return counted | {"tokens_per_second": self.tokens_per_second, "peak_memory": self.peak_memory}

    def to_dict(self, base: Entry) -> dict[str, Any]:
        """For JSON, with the ratios of its costs to the baseline's."""
        equal = {axis: it._asdict() | {"difference": it.difference.to_dict()} for axis, it in self.equal.items()}
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
            "speed_up": self.worth
            and {
                name: value._asdict() if isinstance(value, Interval) else value
                for name, value in self.worth._asdict().items()
            },
            "speed_up_note": self.worth_note,
            "power": self.power and self.power._asdict(),
            "curves": {seed: curve._asdict() for seed, curve in self.curves.items()},
        }


def ratio(mine: float | None, theirs: float | None) -> float | None:
    """Of a contender's cost to the baseline's."""
    return mine / theirs if mine is not None and theirs else None


def read_entries(folder: Path, plan: Plan) -> list[Entry]:
    """The rows of a plan with the runs that have begun."""
    entries, planned = [], plan.runs()
    for row in plan.rows:
        runs = {}
        for run in planned:
            if run.row is row and (home := folder / run.folder).is_dir():
                curve, spikes = load_curve(home)
                runs[run.seed] = RunRecord(run.folder, read_result(home), curve, spikes, (home / MODEL).is_dir())
        contender = plan.contender(row.contender)
        init = str(contender.model.get("init", plan.base.model.get("init", "paper")))
        made = Entry(
            row=row,
            contender=contender,
            baseline=row.contender == plan.baseline_key,
            check=contender.label in plan.checks,
            init=init,
            seeds=plan.seeds,
            runs=runs,
        )
        entries.append(made)
    return entries


def read_result(folder: Path) -> Result | None:
    """The result of a run; None where there is none. Values that cannot be a run's are an error that names the file."""
    result = load_result(folder)
    if result is None:
        return None
    try:
        check_types(result)
        for name, value in dataclasses.asdict(result).items():
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not abs(number) < LARGEST:
                    raise ValueError(f"{name} must be a number below {LARGEST:g}, got {number}")
    except ValueError as error:
        raise ValueError(f"{folder / RESULT} is damaged: {error}. Remove it, and the run is made again") from error
    return result


def load_curve(folder: Path) -> tuple[Curve, int]:
    """The evaluations of a run's log, from the first after training began, and its spikes."""
    found: dict[float, float] = {}
    norms: list[float] = []
    for number, record in enumerate(load_log(folder), start=1):
        names = [name for name in ("held_out_loss", "grad_norm") if record.get(name) is not None]
        for name in ("tokens", *names) if names else ():
            value = record.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
                raise ValueError(f"{folder / LOG}, line {number}: {name} must be a number, got {value!r:.40}")
        if "held_out_loss" in names and record["tokens"] > 0:
            found[float(record["tokens"])] = float(record["held_out_loss"])
        if "grad_norm" in names:
            norms.append(float(record["grad_norm"]))
    places, later = sorted(found), norms[len(norms) // 5 :]
    usual = float(np.median(later)) if later else 0.0
    return Curve(tuple(places), tuple(found[place] for place in places)), sum(n > SPIKE * usual for n in later)
