"""The numbers of a comparison: what the tables, the plots and the page show.

    Summary                     one folder
      Table                     one data set at one size
        Entry                   one contender: losses, differences, costs, speed-up

`summarise(folder)` makes it at any moment of a comparison. Losses are compared as they were matched and, whatever was
matched, at equal tokens, equal operations and equal time: the longer of two curves is read where the shorter one ends.
A curve read before its end belongs to a learning rate that had not come down yet and looks worse than a run of that
length would, so such a number is indicative only, and no verdict is given that this alone could have brought about.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.comparison.reading import Curve, Folder, Line, load_folder
from twoaxis.comparison.scaling import (
    NEEDS_SIZES,
    Interval,
    Law,
    NoLaw,
    Point,
    exponent_interval,
    fit_sizes,
    given,
    speed_up_interval,
)
from twoaxis.comparison.statistics import BETTER, OPEN, WORSE, Difference, compare, difference, seeds_needed

if TYPE_CHECKING:
    from twoaxis.comparison.plan import Plan

AXES = ("tokens", "flops", "time")
"""What losses are compared at."""
SIDES = ("contender", "baseline")
EARLY = "one schedule had not ended, which alone could make this difference"
"""Why a difference at a budget that was not matched is not resolved."""


class Equal(NamedTuple):
    """Losses at one budget of an axis."""

    budget: float
    """Tokens, operations or seconds, the mean over seeds."""
    loss: float | None
    """The contender's mean."""
    difference: Difference
    """To the baseline at the same budget."""
    part: float
    """How far the less finished of the two runs had come, 1 at the end."""
    early: str
    """Whose learning rate had not come down yet: contender, baseline, or nobody's."""

    @property
    def indicative(self) -> bool:
        """Whether a schedule had not ended."""
        return bool(self.early)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A contender in a table."""

    key: str
    """Stands for everything that can change its numbers."""
    label: str
    """What tables call it."""
    baseline: bool
    """Whether the others are compared with it."""
    init: str
    """Rescaling of the initial weights: as the paper says, or paired."""
    finished: tuple[int, ...]
    """Seeds that came to their end."""
    diverged: tuple[int, ...]
    """Seeds whose loss stopped being a number."""
    missing: tuple[int, ...]
    """Seeds that have not finished."""
    losses: dict[int, float]
    """Held-out loss at the end, by seed."""
    loss: float | None
    """Their mean."""
    difference: Difference | None
    """Loss minus the baseline's, as it was matched; None for the baseline."""
    equal: dict[str, Equal]
    """The same at equal tokens, flops and time."""
    bits_per_byte: float | None
    """Mean, where tokens stand for text."""
    accuracy: float | None
    """Mean part of right answers, for tasks."""
    accuracy_difference: Difference | None
    """Accuracy minus the baseline's."""
    parameters: int
    """Numbers learned."""
    flops_per_token: float
    """Training operations."""
    steps: int
    """Optimiser steps."""
    tokens: int
    """Training tokens."""
    tokens_per_second: float | None
    """Throughput."""
    peak_memory: int | None
    """Bytes at the peak of a step."""
    lr: float | None
    """Learning rate; None where it is not chosen yet."""
    lr_edge: bool
    """Whether it lies at the end of the rates tried."""
    lr_losses: dict[str, float | None]
    """Mean loss by rate, where several were tried."""
    speed_up: Interval | None
    """In wall-clock time; None without a law."""
    speed_up_note: str
    """Why there is none, or what to think of it."""
    seeds_needed: int | None
    """How many seeds would resolve a difference of this size, if it is not resolved."""
    curves: dict[int, Curve] = field(default_factory=dict)
    """Held-out loss by seed."""

    @property
    def verdict(self) -> str:
        """`resolved (better)`, `resolved (worse)`, `not resolved`, or `baseline`."""
        return "baseline" if self.difference is None else self.difference.verdict

    def scale(self, axis: str) -> float | None:
        """What a token is worth on an axis: one, its operations or its seconds."""
        if axis == "time":
            return 1 / self.tokens_per_second if self.tokens_per_second else None
        return {"tokens": 1.0, "flops": float(self.flops_per_token)}[axis]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A data set at a size."""

    data: str
    """Name of the data set."""
    size: str
    """Name of the size."""
    chance: float | None
    """What guessing scores, for tasks."""
    entries: tuple[Entry, ...]
    """In the order of the plan."""
    interleaved: bool
    """Whether throughput was measured in turns before the runs; otherwise it is what the runs had."""

    @property
    def baseline(self) -> Entry:
        """What the others are compared with."""
        return next(entry for entry in self.entries if entry.baseline)

    @property
    def contenders(self) -> tuple[Entry, ...]:
        """All but the baseline."""
        return tuple(entry for entry in self.entries if not entry.baseline)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The law of a data set."""

    law: Law | None
    """None without one."""
    note: str
    """Where it comes from, or why there is none."""
    exponent: Interval | None = None
    """Alpha with an interval over seeds, where it was fitted."""
    compute: dict[str, float] = field(default_factory=dict)
    """The baseline's training operations by size."""
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    """The baseline's losses by size and seed."""
    l_inf: float | None = None
    """As it was given."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Everything a report says."""

    name: str
    """Of the folder."""
    tables: tuple[Table, ...]
    """One for each data set and size."""
    laws: dict[str, Fit]
    """By data set."""
    match: str
    """tokens, flops or time."""
    seeds: tuple[int, ...]
    """Planned."""
    rates: tuple[float, ...]
    """Learning rates tried."""
    rate_seeds: tuple[int, ...]
    """Seeds on which they were tried."""
    hardware: str
    """One line."""
    versions: dict[str, str]
    """Of Python and the packages."""
    commands: tuple[str, ...]
    """That made the comparison."""

    @property
    def shared_rate(self) -> bool:
        """Whether all contenders had the one learning rate."""
        return len({entry.lr for table in self.tables for entry in table.entries}) == 1 and len(self.rates) < 2

    @property
    def inits(self) -> tuple[str, ...]:
        """How initial weights were scaled."""
        return tuple(dict.fromkeys(entry.init for table in self.tables for entry in table.entries))

    @property
    def missing(self) -> int:
        """Runs that have not finished."""
        return sum(len(entry.missing) for table in self.tables for entry in table.entries)


def summarise(folder: str | Path, *, l_inf: float | None = None, alpha: float | None = None) -> Summary:
    """Read a comparison folder into its numbers.

    Args:
        folder: the --out of `twoaxis compare`.
        l_inf: irreducible loss, for the effective speed-up. None fits it, which takes three sizes.
        alpha: exponent of the scaling law; with `l_inf` no size is fitted.
    """
    if alpha is not None and l_inf is None:
        raise ValueError(f"--alpha {alpha:g} needs --l-inf too: a law is given whole, or fitted")
    read = load_folder(folder)
    plan, about = read.plan, read.plan.about
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in read.lines:
        groups.setdefault((line.row.data, line.row.size), []).append(line)
    laws = {data: _law(read, data, l_inf, alpha) for data in dict.fromkeys(line.row.data for line in read.lines)}
    commands = about.get("commands") or ()
    return Summary(
        name=read.place.resolve().name,
        tables=tuple(_table(read, data, size, lines, laws[data]) for (data, size), lines in groups.items()),
        laws=laws,
        match=plan.match,
        seeds=plan.seeds,
        rates=plan.lrs,
        rate_seeds=plan.lr_seeds if len(plan.lrs) > 1 else (),
        hardware=str(about.get("hardware_line") or ""),
        versions={str(name): str(value) for name, value in (about.get("versions") or {}).items()},
        commands=tuple(str(command) for command in ([commands] if isinstance(commands, str) else commands)),
    )


def _law(read: Folder, data: str, l_inf: float | None, alpha: float | None) -> Fit:
    """The law of the baseline over the sizes of a data set, given or fitted."""
    if l_inf is not None and alpha is not None:
        law = given(l_inf, alpha)
        return Fit(law=law, note=law.note)
    key = read.plan.baseline_key
    lines = [line for line in read.lines if line.row.data == data and line.row.contender == key and line.finished]
    losses = {line.row.size: {seed: _number(run.loss) for seed, run in line.finished.items()} for line in lines}
    compute = {line.row.size: float(line.row.tokens) * line.row.flops_per_token for line in lines}
    if len(read.plan.sizes) == 1:
        return Fit(law=None, note=NEEDS_SIZES)
    try:
        law = fit_sizes(compute, losses, l_inf=l_inf)
        exponent = exponent_interval(compute, losses, l_inf=l_inf)
    except NoLaw as error:
        return Fit(law=None, note=f"{NEEDS_SIZES}: {error}", compute=compute, losses=losses)
    return Fit(law=law, note=law.note, exponent=exponent, compute=compute, losses=losses, l_inf=l_inf)


def _table(read: Folder, data: str, size: str, lines: list[Line], law: Fit) -> Table:
    """One data set at one size."""
    plan = read.plan
    base = next(line for line in lines if line.row.contender == plan.baseline_key)
    family = len(lines) - 1
    losses = compare(
        _losses(base), {line.row.contender: _losses(line) for line in lines if line is not base}, seeds=plan.seeds
    )
    interleaved = _interleaved(lines)
    right = compare(
        _accuracies(base),
        {line.row.contender: _accuracies(line) for line in lines if line is not base},
        seeds=plan.seeds,
        lower_is_better=False,
        step=1 / plan.base.eval_examples,  # each example has one answer or more
    )
    chances = [run.result.chance for line in lines for run in line.ended.values() if run.result is not None]
    entries = []
    for line in lines:
        key = line.row.contender
        mine = None if line is base else losses[key]
        means = [run.result for run in line.finished.values() if run.result is not None]
        accuracy = _mean([result.accuracy for result in means])
        worth, note = _speed_up(line, base, interleaved, law)
        entries.append(
            Entry(
                key=key,
                label=line.contender.label,
                baseline=line is base,
                init=str(line.contender.model.get("init", plan.base.model.get("init", "paper"))),
                finished=tuple(line.finished),
                diverged=tuple(seed for seed, run in line.runs.items() if run.diverged),
                missing=tuple(seed for seed in plan.seeds if seed not in line.ended),
                losses={seed: _number(run.loss) for seed, run in line.finished.items()},
                loss=_mean([run.loss for run in line.finished.values()]),
                difference=mine,
                equal={} if line is base else _equal(line, base, interleaved, plan, family),
                bits_per_byte=_mean([result.bits_per_byte for result in means]),
                accuracy=accuracy,
                accuracy_difference=None if line is base or accuracy is None else right[key],
                parameters=line.row.parameters,
                flops_per_token=float(line.row.flops_per_token),
                steps=line.row.steps,
                tokens=line.row.tokens,
                tokens_per_second=_throughput(line, interleaved),
                peak_memory=max((r.peak_memory for r in means if r.peak_memory is not None), default=None),
                lr=line.row.lr,
                lr_edge=line.row.lr_edge,
                lr_losses=dict(line.row.lr_losses),
                speed_up=worth,
                speed_up_note=note,
                seeds_needed=None if mine is None or mine.resolved else seeds_needed(mine, family),
                curves={seed: run.curve for seed, run in line.finished.items()},
            )
        )
    chance = next((chance for chance in chances if chance is not None), None)
    return Table(data=data, size=size, chance=chance, entries=tuple(entries), interleaved=interleaved)


def _losses(line: Line) -> dict[int, float | None]:
    """Final losses by seed, None where a run diverged; unfinished ones are left out."""
    return {seed: run.loss for seed, run in line.ended.items()}


def _accuracies(line: Line) -> dict[int, float | None]:
    return {
        seed: None if run.diverged or run.result is None else run.result.accuracy for seed, run in line.ended.items()
    }


def _interleaved(lines: list[Line]) -> bool:
    """Throughput measured in turns is free of what else the machine did, but only if all contenders have it."""
    return all(line.row.tokens_per_second is not None for line in lines)


def _throughput(line: Line, interleaved: bool) -> float | None:
    if interleaved:
        return line.row.tokens_per_second
    return _mean([run.result.tokens_per_second for run in line.ended.values() if run.result is not None])


def _scale(line: Line, axis: str, interleaved: bool) -> float | None:
    """What a token is worth on an axis; time is tokens over the throughput of the table."""
    if axis == "time":
        rate = _throughput(line, interleaved)
        return 1 / rate if rate else None
    return {"tokens": 1.0, "flops": float(line.row.flops_per_token)}[axis]


def _equal(line: Line, base: Line, interleaved: bool, plan: Plan, family: int) -> dict[str, Equal]:
    """Losses at equal tokens, operations and time; the longer run is read where the shorter one ends."""
    found = {}
    for axis in AXES:
        mine, theirs = _scale(line, axis, interleaved), _scale(base, axis, interleaved)
        if mine is None or theirs is None:
            continue
        ends = line.row.tokens * mine, base.row.tokens * theirs
        budget = min(ends)
        # What was matched is equal up to the rounding to whole steps: both runs are taken at their ends.
        parts = (1.0, 1.0) if axis == plan.match else (budget / ends[0], budget / ends[1])
        early = next(
            (who for who, it, part in zip(SIDES, (line, base), parts, strict=True) if _early(it, part, plan)), ""
        )
        ours, others = _losses_at(line, parts[0]), _losses_at(base, parts[1])
        apart = difference(others, ours, plan.seeds, family=family)
        if apart.verdict == {"contender": WORSE, "baseline": BETTER}.get(early):
            apart = apart._replace(verdict=OPEN, note="; ".join(filter(None, (apart.note, EARLY))))
        found[axis] = Equal(
            budget=budget,
            loss=_mean([loss for loss in ours.values() if loss is not None]),
            difference=apart,
            part=min(parts),
            early=early,
        )
    return found


def _early(line: Line, part: float, plan: Plan) -> bool:
    """Whether a run is read before its learning rate came down; a constant one never does."""
    return part < 1 - 1e-9 and line.contender.train.get("schedule", plan.base.schedule) != "constant"


def _losses_at(line: Line, part: float) -> dict[int, float | None]:
    """Losses by seed at a part of the run; None where a run diverged, left out where the curve does not reach."""
    if part >= 1 - 1e-9:
        return _losses(line)
    found: dict[int, float | None] = {}
    for seed, run in line.ended.items():
        loss = None if run.diverged else run.curve.at(part * line.row.tokens)
        if run.diverged or loss is not None:
            found[seed] = loss
    return found


def _speed_up(line: Line, base: Line, interleaved: bool, fit: Fit) -> tuple[Interval | None, str]:
    """The effective speed-up and a note, or None and why."""
    if fit.law is None:
        return None, fit.note
    if line is base:
        return Interval(1.0, None, None), ""
    ours, others = _points(line, interleaved), _points(base, interleaved)
    fitted = fit.law.scale is not None
    try:
        worth = speed_up_interval(
            fit.law,
            others,
            ours,
            sizes=fit.losses if fitted else None,
            sizes_compute=fit.compute if fitted else None,
            l_inf=fit.l_inf,
        )
    except NoLaw as error:
        return None, str(error)
    if not math.isfinite(worth.value):
        return None, worth.note
    return worth, worth.note


def ratio(mine: float | None, theirs: float | None) -> float | None:
    """Of a contender's cost to the baseline's."""
    return mine / theirs if mine is not None and theirs else None


def _points(line: Line, interleaved: bool) -> dict[int, Point]:
    """What a speed-up needs, by seed; throughput is each run's own unless it was measured in turns."""
    found = {}
    for seed, run in line.finished.items():
        assert run.result is not None
        rate = line.row.tokens_per_second if interleaved else run.result.tokens_per_second
        found[seed] = Point(_number(run.loss), line.row.tokens, _number(rate))
    return found


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _number(value: float | None) -> float:
    assert value is not None
    return value
