"""How the contenders of a table compare: differences, at equal budgets, in speed, and what could have been resolved.

Losses are compared as they were matched and, whatever was matched, at equal tokens, equal operations and equal time:
the longer of two curves is read where the shorter one ends. A curve read before its end belongs to a learning rate that
had not come down yet and looks worse than a run of that length would, so such a number is indicative only, and no
verdict is given that this alone could have brought about. Equal time is as good as the throughputs: where two of them
differ by less than they were measured to, it gives no verdict either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
EARLY = "one schedule had not ended, which alone could make this difference"
"""Why a difference at a budget that was not matched is not resolved."""
UNSURE = "throughputs differ by less than they were measured to"
"""Why a difference at equal time is not resolved."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Section:
    """A data set at a size."""

    plan: Plan  # what was asked for
    data: str  # name of the data set
    size: str  # name of the size
    entries: tuple[Entry, ...]  # in the order of the plan
    scaling: Scaling  # the law of the data set
    home: str | None = None  # see `Comparison.home`

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
    def low_rank(self) -> Entry | None:
        """Of contenders on a source, the last one that has low-rank additions in place of a method."""
        return next((entry for entry in reversed(self.contenders) if "lora" in entry.contender.model), None)

    @cached_property
    def beyond(self) -> dict[str, Difference]:
        """By label, the loss of every method on a source minus that of low-rank additions; none without these."""
        methods = {entry.label: entry.sample() for entry in self.contenders if "lora" not in entry.contender.model}
        return {} if self.low_rank is None else judge(self.low_rank.sample(), methods, **_rules(self.plan))

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
        found = (result.chance for entry in self.entries for result in entry.ended.values())
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
            **{name: getattr(self, name) for name in ("data", "size", "chance")},
            "baseline": self.baseline.label,
            "ngrams": dict(self.ngrams),
            "throughput": "measured in turns before the runs" if self.interleaved else "of the runs themselves",
            "beyond_low_rank": {label: found.to_dict() for label, found in self.beyond.items()},
            "contenders": [entry.to_dict(self.baseline) for entry in self.entries],
        }


def _rules(plan: Plan) -> dict[str, Any]:
    """How losses are judged."""
    return {"seeds": plan.seeds, "looks": plan.looks, "margin": plan.margin}


def make_section(plan: Plan, data: str, size: str, entries: list[Entry], scaling: Scaling) -> Section:
    """One data set at one size."""
    if any(entry.row.tokens_per_second is None for entry in entries):
        # throughputs of some contenders only, measured apart from the others' runs, are none to compare by
        entries = [replace(entry, row=replace(entry.row, tokens_per_second=None)) for entry in entries]
    base = next((entry for entry in entries if entry.baseline), None)
    if base is None:
        raise ValueError(f"{PLAN}: rows of {data}, {size} have no {plan.baseline!r}, which is the baseline")
    judged = {entry.row.contender: entry for entry in entries if entry is not base and not entry.check}
    checks = {entry.row.contender: entry for entry in entries if entry.check}
    losses: dict[str, Difference] = {}
    for group in (judged, checks):  # each of them shares an error
        losses |= judge(base.sample(), {key: it.sample() for key, it in group.items()}, **_rules(plan))
    right = judge(
        _accuracies(base),
        {key: _accuracies(entry) for key, entry in judged.items()},
        lower_is_better=False,
        step=1 / plan.base.judged_examples,  # each example has one answer or more
        seeds=plan.seeds,
        looks=plan.looks,
    )
    wanted = {key: losses[key].wanted if plan.until else len(plan.seeds) for key in judged}
    most = max(wanted.values(), default=plan.looks[0].seeds)
    equal, rate = _equal(judged, base, plan), _exchange(base, checks.values())
    made = []
    for entry in entries:
        key = entry.row.contender
        more: dict[str, Any] = {"seeds": plan.seeds[: wanted.get(key, most)], "difference": losses.get(key)}
        if not entry.check:
            more["worth"], more["worth_note"] = _worth(entry, base, losses.get(key), scaling, rate)
        if key in judged:
            more |= {
                "equal": equal[key],
                "accuracy_difference": right[key] if entry.mean("accuracy") is not None else None,
            }
            more["power"] = _power(entry, base, losses[key], len(judged), plan.margin)
        made.append(replace(entry, **more))
    return Section(plan=plan, data=data, size=size, entries=tuple(made), scaling=scaling)


def _accuracies(entry: Entry) -> Sample:
    return Sample(dict.fromkeys(entry.diverged) | {seed: result.accuracy for seed, result in entry.results.items()})


def _power(entry: Entry, base: Entry, found: Difference, family: int, margin: float | None) -> Power | None:
    """Seeds and seconds for a difference of the margin, or of half of what could be resolved here."""
    if found.resolved or not found.detectable:
        return None
    effect = found.detectable / 2 if margin is None else margin
    seeds = seeds_for(found, effect, family)
    runs = [it.row.tokens / speed for it in (entry, base) if (speed := it.tokens_per_second)]
    return Power(effect, seeds, None if seeds is None or len(runs) < 2 else seeds * math.fsum(runs))


def _equal(group: Mapping[str, Entry], base: Entry, plan: Plan) -> dict[str, dict[str, Equal]]:
    """Losses at equal tokens, operations and time; the longer run is read where the shorter one ends."""
    found: dict[str, dict[str, Equal]] = {key: {} for key in group}
    for axis in AXES:
        budgets: dict[str, float] = {}
        parts: dict[str, tuple[float, float]] = {}  # of the contender's run and of the baseline's
        ours, theirs = dict[str, Sample](), dict[str, Sample]()
        for key, entry in group.items():
            scales = entry.scale(axis), base.scale(axis)
            ends = entry.row.tokens * (scales[0] or 0.0), base.row.tokens * (scales[1] or 0.0)
            if not (budget := min(ends)):  # one of them was not trained, or its throughput is not known
                continue
            # What was matched is equal up to the rounding to whole steps: both runs are taken at their ends.
            budgets[key] = budget
            parts[key] = (1.0, 1.0) if axis == plan.match else (budget / ends[0], budget / ends[1])
            # Where one of them is read before its end both are read on their curves, whose rows are fewer and the same.
            whole = min(parts[key]) >= 1 - 1e-9
            pairs = zip((entry, base), parts[key], strict=True)
            ours[key], theirs[key] = (it.sample(None if whole else part) for it, part in pairs)
        for key, difference in judge(theirs, ours, **_rules(plan)).items():
            sides = (("contender", group[key], parts[key][0]), ("baseline", base, parts[key][1]))
            early = next((side for side, it, part in sides if _early(it, part, plan)), "")
            unsure = axis == "time" and axis != plan.match and _too_close(group[key], base)
            doubts = [EARLY] if difference.verdict == {"contender": WORSE, "baseline": BETTER}.get(early) else []
            doubts += [UNSURE] if unsure and difference.resolved else []
            if doubts:
                difference = difference._replace(verdict=OPEN, note="; ".join(filter(None, (difference.note, *doubts))))
            loss = mean_of_all([loss for loss in ours[key].values.values() if loss is not None])
            found[key][axis] = Equal(budgets[key], loss, difference, min(parts[key]), early, unsure)
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


def _exchange(base: Entry, checks: Iterable[Entry]) -> tuple[float, float] | None:
    """By how much the baseline's loss falls with how many times the tokens; None where it was not run, or falls by
    less than two standard errors."""
    for entry in checks:
        if BUDGET in entry.contender.train:
            apart = [base.losses[seed] - loss for seed, loss in entry.losses.items() if seed in base.losses]
            factor = entry.row.tokens / base.row.tokens
            if len(apart) > 1 and factor > 1:
                fall, error = math.fsum(apart) / len(apart), spread_of(apart) / math.sqrt(len(apart))
                return (fall, factor) if fall > 2 * error else None
    return None


def _worth(
    entry: Entry, base: Entry, found: Difference | None, scaling: Scaling, rate: tuple[float, float] | None
) -> tuple[Worth | None, str]:
    """The speed-up in tokens and in time and a note, or None and why."""
    speed = ratio(entry.tokens_per_second, base.tokens_per_second)
    if scaling.law is None and rate is None:
        return None, scaling.note
    if not entry.row.tokens:
        return None, "it was not trained"
    source = "law" if scaling.law is not None else "more tokens"
    if entry.baseline:
        one = Interval(1.0, None, None)
        return Worth(one, 1.0, one, source), ""
    if scaling.law is not None:
        try:
            net = speed_up_interval(scaling, _points(base), _points(entry))
        except NoLaw as error:
            return None, str(error)
        if not math.isfinite(net.value) or speed is None:
            return None, net.note
        # the time of a token is in the speed-up; what is left without it is a matter of tokens
        return Worth(net.times(entry.row.tokens / base.row.tokens / speed), speed, net, source), net.note
    assert rate is not None
    fall, factor = rate
    if found is None or found.mean is None:
        return None, "no pair of runs has finished"
    # A gain in loss is worth so many times the tokens, if the baseline's loss goes on falling like this.
    ends = (None, None) if found.low is None or found.high is None else (found.high, found.low)
    low, high = (None if end is None else factor ** (-end / fall) for end in ends)
    note = f"the baseline falls by {fall:.3g} with {factor:g} times the tokens"
    tokens = Interval(factor ** (-found.mean / fall), low, high, note)
    net = None if speed is None else tokens.times(speed * base.row.tokens / entry.row.tokens)
    return Worth(tokens, speed, net, source), note


def _points(entry: Entry) -> dict[int, Point]:
    """What a speed-up needs, by seed; throughput is each run's own unless it was measured in turns."""
    rate = entry.row.tokens_per_second
    return {
        seed: Point(entry.losses[seed], entry.row.tokens, result.tokens_per_second if rate is None else rate)
        for seed, result in entry.results.items()
    }
