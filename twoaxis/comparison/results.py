"""What a comparison found, read from its folder at any moment.

    OUT/compare.json                                                    the plan and its rows
    OUT/runs/<data>/<size>/<contender key>/lr-<rate>/seed-<seed>/       a run each

    Comparison                  one folder
      Section                   one data set at one size
        Entry                   one contender: its runs, differences, costs, speed-up

Losses are compared as they were matched and, whatever was matched, at equal tokens, equal operations and equal time:
the longer of two curves is read where the shorter one ends. A curve read before its end belongs to a learning rate that
had not come down yet and looks worse than a run of that length would, so such a number is indicative only, and no
verdict is given that this alone could have brought about.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from twoaxis.base.options import check_types
from twoaxis.comparison.plan import PLAN, Plan, Row
from twoaxis.comparison.scaling import (
    NEEDS_SIZES,
    Interval,
    NoLaw,
    Point,
    Scaling,
    find_law,
    speed_up_interval,
)
from twoaxis.comparison.statistics import (
    BETTER,
    LEVEL,
    OPEN,
    WORSE,
    Difference,
    Sample,
    difference,
    judge,
    mean_of_all,
    seeds_needed,
)
from twoaxis.show.document import Document, Saved, Showable
from twoaxis.training.results import LOG, MODEL, RESULT, Result, load_log, load_result

if TYPE_CHECKING:
    from twoaxis.model.variant import Contender

FORMAT = 1
"""Version of table.json."""
REPORT = "report"
"""Folder of the report in that of the comparison."""
AXES = ("tokens", "flops", "time")
"""What losses are compared at."""
SIDES = ("contender", "baseline")
EARLY = "one schedule had not ended, which alone could make this difference"
"""Why a difference at a budget that was not matched is not resolved."""
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


class RunRecord(NamedTuple):
    """A run that has begun.

    Attributes:
        folder: its place in the comparison's folder; `model` in it, if it was kept.
        result: None while it is not finished.
        curve: its evaluations so far.
        model: whether its model is there.
    """

    folder: Path
    result: Result | None
    curve: Curve
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
    """

    budget: float
    loss: float | None
    difference: Difference
    read_at: float
    early: str

    @property
    def indicative(self) -> bool:
        """Whether a schedule had not ended."""
        return bool(self.early)


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """A contender on a data set at a size, with its runs and how it compares."""

    row: Row
    """What was planned: budget, counts and learning rate."""
    contender: Contender
    """What was put into the model."""
    baseline: bool
    """Whether the others are compared with it."""
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
    speed_up: Interval | None = None
    """In wall-clock time; None without a law."""
    speed_up_note: str = ""
    """Why there is none, or what to think of it."""
    seeds_needed: int | None = None
    """How many seeds would resolve a difference of this size, if it is not resolved."""

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
        """`resolved (better)`, `resolved (worse)`, `not resolved`, or `baseline`."""
        return "baseline" if self.difference is None else self.difference.verdict

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
            rows = {seed: result.row_losses for seed, result in self.results.items() if result.row_losses}
            return Sample({seed: run.loss for seed, run in ended.items()}, rows)
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
            **{name: getattr(self, name) for name in ("label", "baseline", "init", "losses", "verdict")},
            **{name: self.mean(name) for name in ("loss", "bits_per_byte", "accuracy")},
            **self.costs,
            **{name: getattr(self.row, name) for name in ("steps", "lr", "lr_edge", "lr_losses")},
            "finished": list(self.results),
            "diverged": list(self.diverged),
            "missing": list(self.missing),
            "ratios": {name: ratio(value, base.costs[name]) for name, value in self.costs.items()},
            "difference": self.difference and self.difference.to_dict(),
            "accuracy_difference": self.accuracy_difference and self.accuracy_difference.to_dict(),
            "equal": {axis: values | {"indicative": bool(values["early"])} for axis, values in equal.items()},
            "speed_up": self.speed_up and self.speed_up._asdict(),
            "speed_up_note": self.speed_up_note,
            "seeds_needed": self.seeds_needed,
            "curves": {seed: curve._asdict() for seed, curve in self.curves.items()},
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """A data set at a size."""

    plan: Plan
    """What was asked for."""
    data: str
    """Name of the data set."""
    size: str
    """Name of the size."""
    entries: tuple[Entry, ...]
    """In the order of the plan."""
    scaling: Scaling
    """The law of the data set."""
    home: str | None = None
    """See `Comparison.home`."""

    @property
    def baseline(self) -> Entry:
        """What the others are compared with."""
        return next(entry for entry in self.entries if entry.baseline)

    @property
    def contenders(self) -> tuple[Entry, ...]:
        """All but the baseline."""
        return tuple(entry for entry in self.entries if not entry.baseline)

    @property
    def interleaved(self) -> bool:
        """Whether throughput was measured in turns before the runs; otherwise it is what the runs had."""
        return all(entry.row.tokens_per_second is not None for entry in self.entries)

    @property
    def chance(self) -> float | None:
        """What guessing scores, for tasks."""
        found = [run.result.chance for entry in self.entries for run in entry.runs.values() if run.result is not None]
        return next((chance for chance in found if chance is not None), None)

    @property
    def losses(self) -> dict[str, dict[int, float]]:
        """Held-out losses at the end, by label and seed."""
        return {entry.label: entry.losses for entry in self.entries}

    @property
    def verdicts(self) -> dict[str, str]:
        """By label; see `Entry.difference` for the numbers."""
        return {entry.label: entry.verdict for entry in self.contenders}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "data": self.data,
            "size": self.size,
            "chance": self.chance,
            "baseline": self.baseline.label,
            "throughput": "measured in turns before the runs" if self.interleaved else "of the runs themselves",
            "contenders": [entry.to_dict(self.baseline) for entry in self.entries],
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison(Showable):
    """What a comparison found: what `twoaxis.compare` and `twoaxis.report` return."""

    data_file = "table.json"
    folder: Path
    """Of the comparison."""
    plan: Plan
    """What was asked for, and what it was run on."""
    sections: tuple[Section, ...]
    """One for each data set and size."""
    laws: Mapping[str, Scaling]
    """By data set."""
    failed: tuple[str, ...] = ()
    """Runs that could not be made, and why."""
    home: str | None = None
    """How the folder is reached from where the report stands, for links to models; None makes none."""

    @staticmethod
    def load(folder: str | Path, *, l_inf: float | None = None, alpha: float | None = None) -> Comparison:
        """Read a comparison, finished or not.

        Args:
            folder: the --out of `twoaxis compare`.
            l_inf: irreducible loss, for the effective speed-up. None fits it, which takes three sizes.
            alpha: exponent of the scaling law; with `l_inf` no size is fitted.
        """
        if alpha is not None and l_inf is None:
            raise ValueError(f"--alpha {alpha:g} needs --l-inf too: a law is given whole, or fitted")
        folder = Path(folder)
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the --out of twoaxis compare")
        plan = Plan.load(folder)
        if plan is None:
            raise ValueError(f"{folder} has no {PLAN}; give the --out of twoaxis compare")
        entries = _entries(folder, plan)
        laws = {name: _law(plan, name, entries, l_inf, alpha) for name in dict.fromkeys(e.row.data for e in entries)}
        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((entry.row.data, entry.row.size), []).append(entry)
        sections = tuple(_section(plan, *place, group, laws[place[0]]) for place, group in groups.items())
        return Comparison(folder=folder, plan=plan, sections=sections, laws=laws)

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.resolve().name

    @property
    def exit_code(self) -> int:
        """1 if a run could not be made."""
        return 1 if self.failed else 0

    @property
    def losses(self) -> dict[str, dict[int, float]]:
        """Held-out losses at the end, by label and seed, of a comparison on one data set at one size."""
        return self._only.losses

    @property
    def verdicts(self) -> dict[str, str]:
        """By label, of a comparison on one data set at one size."""
        return self._only.verdicts

    @property
    def _only(self) -> Section:
        if len(self.sections) != 1:
            names = "; ".join(f"{section.data}, {section.size}" for section in self.sections)
            raise ValueError(f"there are {len(self.sections)} sections ({names}): ask one of .sections")
        return self.sections[0]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Of all sections."""
        return tuple(entry for section in self.sections for entry in section.entries)

    @property
    def missing(self) -> int:
        """Number of runs that have not finished."""
        return sum(len(entry.missing) for entry in self.entries)

    @property
    def shared_rate(self) -> bool:
        """Whether all contenders had the one learning rate."""
        return len({entry.row.lr for entry in self.entries}) == 1 and len(self.plan.lrs) < 2

    @property
    def inits(self) -> tuple[str, ...]:
        """How initial weights were scaled."""
        return tuple(dict.fromkeys(entry.init for entry in self.entries))

    def document(self) -> Document:
        """The report."""
        from twoaxis.comparison.report import document

        return document(self)

    def rows(self) -> list[dict[str, Any]]:
        """A row for every contender of every section: the values of its cells by the heads of the tables."""
        from twoaxis.comparison.report import rows

        return rows(self)

    def save(self, folder: str | Path | None = None, stem: str = "report") -> Saved:
        """Write the report; None is its place in the comparison's folder. Figures of an earlier one make room."""
        place = self.folder / REPORT if folder is None else Path(folder)
        home = Path(os.path.relpath(self.folder.resolve(), place.resolve())).as_posix()
        saved = super(Comparison, dataclasses.replace(self, home=home)).save(place, stem)
        for figure in {*place.glob(f"{stem}-*.svg"), *place.glob(f"{stem}-*.png")} - set(saved.files):
            figure.unlink(missing_ok=True)
        return saved

    def to_dict(self) -> dict[str, Any]:
        """Everything for JSON: what the report shows and what it is computed from."""
        about = self.plan.about
        return {
            "format": FORMAT,
            "name": self.name,
            "match": self.plan.match,
            "seeds": list(self.plan.seeds),
            "level": LEVEL,
            "correction": "Bonferroni over the contenders of a table",
            "lr": list(self.plan.lrs),
            "lr_seeds": list(self.plan.lr_seeds) if len(self.plan.lrs) > 1 else [],
            "shared_lr": self.shared_rate,
            "init": list(self.inits),
            "hardware": about.get("hardware_line", ""),
            "versions": {name: str(version) for name, version in about.get("versions", {}).items()},
            "commands": list(about.get("commands", ())),
            "missing_runs": self.missing,
            "failed": list(self.failed),
            "laws": {data: scaling.to_dict() for data, scaling in self.laws.items()},
            "tables": [section.to_dict() for section in self.sections],
        }


def ratio(mine: float | None, theirs: float | None) -> float | None:
    """Of a contender's cost to the baseline's."""
    return mine / theirs if mine is not None and theirs else None


# Reading.


def _entries(folder: Path, plan: Plan) -> list[Entry]:
    """The rows of a plan with the runs that have begun."""
    entries, planned = [], plan.runs()
    for row in plan.rows:
        runs = {}
        for run in planned:
            if run.row is row and (home := folder / run.folder).is_dir():
                runs[run.seed] = RunRecord(run.folder, read_result(home), load_curve(home), (home / MODEL).is_dir())
        contender, baseline = plan.contender(row.contender), row.contender == plan.baseline_key
        init = str(contender.model.get("init", plan.base.model.get("init", "paper")))
        entries.append(Entry(row=row, contender=contender, baseline=baseline, init=init, seeds=plan.seeds, runs=runs))
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


def load_curve(folder: Path) -> Curve:
    """The evaluations of a run's log, from the first after training began."""
    found: dict[float, float] = {}
    for number, record in enumerate(load_log(folder), start=1):
        if record.get("held_out_loss") is None:
            continue
        for name in ("tokens", "held_out_loss"):
            value = record.get(name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < LARGEST:
                raise ValueError(f"{folder / LOG}, line {number}: {name} must be a number, got {value!r:.40}")
        if record["tokens"] > 0:
            found[float(record["tokens"])] = float(record["held_out_loss"])
    places = sorted(found)
    return Curve(tuple(places), tuple(found[place] for place in places))


# Comparing.


def _law(plan: Plan, data: str, entries: Sequence[Entry], l_inf: float | None, alpha: float | None) -> Scaling:
    """The law of the baseline over the sizes of a data set, given or fitted."""
    if alpha is None and len(plan.sizes) == 1:
        return Scaling(note=NEEDS_SIZES)
    lines = [entry for entry in entries if entry.row.data == data and entry.baseline and entry.losses]
    compute = {entry.row.size: float(entry.row.tokens) * entry.row.flops_per_token for entry in lines}
    return find_law(compute, {entry.row.size: entry.losses for entry in lines}, l_inf=l_inf, alpha=alpha)


def _section(plan: Plan, data: str, size: str, entries: list[Entry], scaling: Scaling) -> Section:
    """One data set at one size."""
    if any(entry.row.tokens_per_second is None for entry in entries):
        # throughputs of some contenders only, measured apart from the others' runs, are none to compare by
        bare = [dataclasses.replace(entry.row, tokens_per_second=None) for entry in entries]
        entries = [dataclasses.replace(entry, row=row) for entry, row in zip(entries, bare, strict=True)]
    base = next((entry for entry in entries if entry.baseline), None)
    if base is None:
        raise ValueError(f"{PLAN}: rows of {data}, {size} have no {plan.baseline!r}, which is the baseline")
    others = {entry.row.contender: entry for entry in entries if entry is not base}
    losses = judge(base.sample(), {key: entry.sample() for key, entry in others.items()}, seeds=plan.seeds)
    right = judge(
        _accuracies(base),
        {key: _accuracies(entry) for key, entry in others.items()},
        seeds=plan.seeds,
        lower_is_better=False,
        step=1 / plan.base.eval_examples,  # each example has one answer or more
    )
    judged = []
    for entry in entries:
        worth, note = _speed_up(entry, base, scaling)
        if entry is not base:
            mine = losses[entry.row.contender]
            entry = dataclasses.replace(
                entry,
                difference=mine,
                equal=_equal(entry, base, plan, len(others)),
                accuracy_difference=None if entry.mean("accuracy") is None else right[entry.row.contender],
                seeds_needed=None if mine.resolved else seeds_needed(mine, len(others)),
            )
        judged.append(dataclasses.replace(entry, speed_up=worth, speed_up_note=note))
    return Section(plan=plan, data=data, size=size, entries=tuple(judged), scaling=scaling)


def _accuracies(entry: Entry) -> Sample:
    right = {seed: result.accuracy for seed, result in entry.results.items()}
    return Sample(dict.fromkeys(entry.diverged) | right)


def _equal(entry: Entry, base: Entry, plan: Plan, family: int) -> dict[str, Equal]:
    """Losses at equal tokens, operations and time; the longer run is read where the shorter one ends."""
    found = {}
    for axis in AXES:
        mine, theirs = entry.scale(axis), base.scale(axis)
        if mine is None or theirs is None:
            continue
        ends = entry.row.tokens * mine, base.row.tokens * theirs
        budget = min(ends)
        # What was matched is equal up to the rounding to whole steps: both runs are taken at their ends.
        parts = (1.0, 1.0) if axis == plan.match else (budget / ends[0], budget / ends[1])
        sides = zip(SIDES, (entry, base), parts, strict=True)
        early = next((side for side, it, part in sides if _early(it, part, plan)), "")
        ours, others = entry.sample(parts[0]), base.sample(parts[1])
        apart = difference(others, ours, plan.seeds, family=family)
        if apart.verdict == {"contender": WORSE, "baseline": BETTER}.get(early):
            apart = apart._replace(verdict=OPEN, note="; ".join(filter(None, (apart.note, EARLY))))
        loss = mean_of_all([loss for loss in ours.values.values() if loss is not None])
        found[axis] = Equal(budget=budget, loss=loss, difference=apart, read_at=min(parts), early=early)
    return found


def _early(entry: Entry, part: float, plan: Plan) -> bool:
    """Whether a run is read before its learning rate came down; a constant one never does."""
    return part < 1 - 1e-9 and entry.contender.train.get("schedule", plan.base.schedule) != "constant"


def _speed_up(entry: Entry, base: Entry, scaling: Scaling) -> tuple[Interval | None, str]:
    """The effective speed-up and a note, or None and why."""
    if scaling.law is None:
        return None, scaling.note
    if entry is base:
        return Interval(1.0, None, None), ""
    try:
        worth = speed_up_interval(scaling, _points(base), _points(entry))
    except NoLaw as error:
        return None, str(error)
    return (worth if math.isfinite(worth.value) else None), worth.note


def _points(entry: Entry) -> dict[int, Point]:
    """What a speed-up needs, by seed; throughput is each run's own unless it was measured in turns."""
    rate = entry.row.tokens_per_second
    return {
        seed: Point(entry.losses[seed], entry.row.tokens, result.tokens_per_second if rate is None else rate)
        for seed, result in entry.results.items()
    }
