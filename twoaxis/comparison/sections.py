"""How the contenders of a table compare: differences, at equal budgets, in speed, and what could have been told.

Losses are compared as they were matched and, whatever was matched, at equal tokens, equal operations and equal time:
the longer of two curves is read where the shorter one ends. A curve read before its end belongs to a learning rate that
had not come down yet and looks worse than a run of that length would, so such a number is indicative only, and no
verdict is given that this alone could have brought about. Equal time is as good as the throughputs: where two of them
differ by less than they were measured to, it gives no verdict either.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from twoaxis.comparison.contenders import BUDGET
from twoaxis.comparison.entries import Entry, Equal, Power, Worth, ratio
from twoaxis.comparison.plan import PLAN, Plan
from twoaxis.comparison.scaling import Interval, NoLaw, Point, Scaling, speed_up_interval
from twoaxis.comparison.statistics import (
    BETTER,
    OPEN,
    WORSE,
    Difference,
    Sample,
    judge,
    mean_of_all,
    seeds_for,
    spread_of,
)

AXES = ("tokens", "flops", "time")
"""What losses are compared at."""
SIDES = ("contender", "baseline")
EARLY = "one schedule had not ended, which alone could make this difference"
"""Why a difference at a budget that was not matched is not resolved."""
UNSURE = "throughputs differ by less than they were measured to"
"""Why a difference at equal time is not resolved."""


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
        """All but the baseline and its checks."""
        return tuple(entry for entry in self.entries if not entry.baseline and not entry.check)

    @property
    def checks(self) -> tuple[Entry, ...]:
        """The baseline with another recipe or more tokens."""
        return tuple(entry for entry in self.entries if entry.check)

    @property
    def unsteadiness(self) -> Entry | None:
        """The check with another recipe and the same tokens whose loss is farthest from the baseline's."""
        moved = [e for e in self.checks if BUDGET not in e.contender.train and e.difference and e.difference.mean]
        return max(moved, key=lambda e: abs(e.difference.mean or 0.0) if e.difference else 0.0, default=None)

    @property
    def ngrams(self) -> Mapping[str, float]:
        """Losses of tables of counts, of text: unigram and bigram, and the tokens that were counted."""
        return self.plan.about.get("ngrams", {}).get(self.data, {}).get(self.size, {})

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
            "ngrams": dict(self.ngrams),
            "throughput": "measured in turns before the runs" if self.interleaved else "of the runs themselves",
            "contenders": [entry.to_dict(self.baseline) for entry in self.entries],
        }


def make_section(plan: Plan, data: str, size: str, entries: list[Entry], scaling: Scaling) -> Section:
    """One data set at one size."""
    if any(entry.row.tokens_per_second is None for entry in entries):
        # throughputs of some contenders only, measured apart from the others' runs, are none to compare by
        bare = [dataclasses.replace(entry.row, tokens_per_second=None) for entry in entries]
        entries = [dataclasses.replace(entry, row=row) for entry, row in zip(entries, bare, strict=True)]
    base = next((entry for entry in entries if entry.baseline), None)
    if base is None:
        raise ValueError(f"{PLAN}: rows of {data}, {size} have no {plan.baseline!r}, which is the baseline")
    judged = {entry.row.contender: entry for entry in entries if entry is not base and not entry.check}
    checks = {entry.row.contender: entry for entry in entries if entry.check}
    design: dict[str, Any] = {"seeds": plan.seeds, "looks": plan.looks}
    rules: dict[str, Any] = design | {"margin": plan.margin}

    def held_against(group: Mapping[str, Entry]) -> dict[str, Difference]:
        samples = {key: entry.sample() for key, entry in group.items()}
        return judge(base.sample(), samples, **rules)

    losses = held_against(judged) | held_against(checks)
    right = judge(
        _accuracies(base),
        {key: _accuracies(entry) for key, entry in judged.items()},
        lower_is_better=False,
        step=1 / plan.base.judged_examples,  # each example has one answer or more
        **design,
    )
    equal = _equal(judged, base, plan, rules)
    wanted = {key: found.wanted if plan.until else len(plan.seeds) for key, found in losses.items()}
    wanted[base.row.contender] = max([wanted[key] for key in judged], default=plan.looks[0].seeds)
    rate = _exchange(base, checks.values())
    made = []
    for entry in entries:
        key = entry.row.contender
        count = wanted[base.row.contender] if entry.check else wanted[key]
        entry = dataclasses.replace(entry, seeds=plan.seeds[:count])
        if not entry.check:
            worth, note = _worth(entry, base, losses.get(key), scaling, rate)
            entry = dataclasses.replace(entry, worth=worth, worth_note=note)
        if key in losses:
            entry = dataclasses.replace(entry, difference=losses[key])
        if key in judged:
            entry = dataclasses.replace(
                entry,
                equal=equal[key],
                accuracy_difference=None if entry.mean("accuracy") is None else right[key],
                power=None if losses[key].resolved else _power(entry, base, losses[key], len(judged), plan.margin),
            )
        made.append(entry)
    return Section(plan=plan, data=data, size=size, entries=tuple(made), scaling=scaling)


def _accuracies(entry: Entry) -> Sample:
    right = {seed: result.accuracy for seed, result in entry.results.items()}
    return Sample(dict.fromkeys(entry.diverged) | right)


def _power(entry: Entry, base: Entry, found: Difference, family: int, margin: float | None) -> Power | None:
    """Seeds and seconds for a difference of the margin, or of half of what could be resolved here."""
    if not found.detectable:
        return None
    effect = found.detectable / 2 if margin is None else margin
    seeds = seeds_for(found, effect, family)
    means = [mean for it in (entry, base) if (mean := it.mean("seconds")) is not None]
    return Power(effect, seeds, None if seeds is None or len(means) < 2 else seeds * math.fsum(means))


def _equal(group: Mapping[str, Entry], base: Entry, plan: Plan, rules: dict[str, Any]) -> dict[str, dict[str, Equal]]:
    """Losses at equal tokens, operations and time; the longer run is read where the shorter one ends."""
    found: dict[str, dict[str, Equal]] = {key: {} for key in group}
    for axis in AXES:
        scales = {key: scale for key, entry in group.items() if (scale := entry.scale(axis)) is not None}
        theirs = base.scale(axis)
        if theirs is None:
            continue
        parts: dict[str, tuple[float, float]] = {}
        for key, mine in scales.items():
            ends = group[key].row.tokens * mine, base.row.tokens * theirs
            # What was matched is equal up to the rounding to whole steps: both runs are taken at their ends.
            parts[key] = (1.0, 1.0) if axis == plan.match else (min(ends) / ends[0], min(ends) / ends[1])
        ours = {key: group[key].sample(part[0]) for key, part in parts.items()}
        apart = judge({key: base.sample(part[1]) for key, part in parts.items()}, ours, **rules)
        for key, difference in apart.items():
            sides = zip(SIDES, (group[key], base), parts[key], strict=True)
            early = next((side for side, it, part in sides if _early(it, part, plan)), "")
            unsure = axis == "time" and axis != plan.match and _too_close(group[key], base)
            notes = [difference.note]
            if difference.verdict == {"contender": WORSE, "baseline": BETTER}.get(early):
                notes.append(EARLY)
            if unsure and difference.resolved:
                notes.append(UNSURE)
            if len(notes) > 1:
                difference = difference._replace(verdict=OPEN, note="; ".join(filter(None, notes)))
            loss = mean_of_all([loss for loss in ours[key].values.values() if loss is not None])
            budget = min(group[key].row.tokens * scales[key], base.row.tokens * theirs)
            found[key][axis] = Equal(budget, loss, difference, min(parts[key]), early, unsure)
    return found


def _early(entry: Entry, part: float, plan: Plan) -> bool:
    """Whether a run is read before its learning rate came down; a constant one never does."""
    return part < 1 - 1e-9 and entry.contender.train.get("schedule", plan.base.schedule) != "constant"


def _too_close(entry: Entry, base: Entry) -> bool:
    """Whether throughputs differ by less than their ratio varies: between rounds of measuring, or between seeds."""
    mine, theirs = entry.tokens_per_second, base.tokens_per_second
    if mine is None or theirs is None:
        return True
    spread = entry.row.speed_spread
    if entry.row.tokens_per_second is None:
        seeds = [seed for seed in entry.results if seed in base.results]
        ratios = [entry.results[seed].tokens_per_second / base.results[seed].tokens_per_second for seed in seeds]
        spread = spread_of(ratios) if len(ratios) > 1 else math.inf
    return abs(mine / theirs - 1) < spread


class Exchange(NamedTuple):
    """The baseline's fall in loss with more tokens.

    Attributes:
        nats: by which the loss falls.
        factor: times the tokens.
        error: of the fall, a standard error over seeds.
    """

    nats: float
    factor: float
    error: float

    def tokens(self, gain: float) -> float:
        """How many times the tokens a gain in loss is worth, if the loss goes on falling like this."""
        return self.factor ** (gain / self.nats)


def _exchange(base: Entry, checks: Iterable[Entry]) -> Exchange | None:
    """From the baseline with more tokens; None without one whose loss falls clearly."""
    for entry in checks:
        if BUDGET in entry.contender.train:
            apart = [base.losses[seed] - loss for seed, loss in entry.losses.items() if seed in base.losses]
            factor = entry.row.tokens / base.row.tokens
            if len(apart) > 1 and factor > 1:
                fall, error = math.fsum(apart) / len(apart), spread_of(apart) / math.sqrt(len(apart))
                return Exchange(fall, factor, error) if fall > 2 * error else None
    return None


def _worth(
    entry: Entry, base: Entry, found: Difference | None, scaling: Scaling, rate: Exchange | None
) -> tuple[Worth | None, str]:
    """The speed-up in tokens and in time and a note, or None and why."""
    mine, theirs = entry.tokens_per_second, base.tokens_per_second
    speed = ratio(mine, theirs)
    one = Interval(1.0, None, None)
    if scaling.law is None and rate is None:
        return None, scaling.note
    source = "law" if scaling.law is not None else "more tokens"
    if entry.baseline:
        return Worth(one, 1.0, one, source), ""
    if scaling.law is not None:
        try:
            net = speed_up_interval(scaling, _points(base), _points(entry))
        except NoLaw as error:
            return None, str(error)
        if not math.isfinite(net.value) or speed is None:
            return None, net.note
        # the time of a token is in the speed-up; what is left without it is a matter of tokens
        return Worth(_times(net, entry.row.tokens / base.row.tokens / speed), speed, net, source), net.note
    assert rate is not None
    if found is None or found.mean is None:
        return None, "no pair of runs has finished"
    ends = (found.high, found.low) if found.low is not None and found.high is not None else (None, None)
    value, low, high = (None if gain is None else rate.tokens(-gain) for gain in (found.mean, *ends))
    assert value is not None
    tokens = Interval(value, low, high, f"the baseline falls by {rate.nats:.3g} with {rate.factor:g} times the tokens")
    spent = base.row.tokens / entry.row.tokens
    return Worth(tokens, speed, None if speed is None else _times(tokens, speed * spent), source), tokens.note


def _times(value: Interval, factor: float) -> Interval:
    """An interval of a multiple."""
    low, high = (None if end is None else end * factor for end in (value.low, value.high))
    return Interval(value.value * factor, low, high, value.note)


def _points(entry: Entry) -> dict[int, Point]:
    """What a speed-up needs, by seed; throughput is each run's own unless it was measured in turns."""
    rate = entry.row.tokens_per_second
    return {
        seed: Point(entry.losses[seed], entry.row.tokens, result.tokens_per_second if rate is None else rate)
        for seed, result in entry.results.items()
    }
