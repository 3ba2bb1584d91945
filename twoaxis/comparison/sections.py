"""How the contenders of a table compare: differences, at equal budgets, in speed, and what could have been resolved.

Section                   a data set at a size
  Entry                   a contender there: its runs, and what follows from them

Losses are compared as they were matched and, whatever was matched, at equal tokens, equal operations and equal time:
the longer of two curves is read where the shorter one ends. A curve read before its end belongs to a learning rate that
had not come down yet and looks worse than a run of that length would, so such a number is indicative only, and no
verdict is given that this alone could have brought about. Equal time is as good as the throughputs: where two of them
differ by less than they were measured to, it gives no verdict either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.comparison.contenders import BUDGET
from twoaxis.comparison.decisions import loss_sample
from twoaxis.comparison.plan import PLAN, Plan, Row
from twoaxis.comparison.run_folders import Curve, RunRecord, together
from twoaxis.comparison.scaling import NEEDS_SIZES, Interval, NoLaw, Point, Scaling, speed_up_interval
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


class Entry:
    """A contender on a data set at a size, with its runs and how it compares.

    Args:
        section: where it stands.
        row: what was planned: budget, counts and learning rate.
        runs: by seed; those that have begun.
    """

    def __init__(self, section: Section, row: Row, runs: Mapping[int, RunRecord]) -> None:
        plan = section.plan
        self.section, self.row, self.runs, self.key = section, row, runs, row.contender
        self.contender = plan.contender(self.key)  # what was put into the model
        self.label = self.contender.label  # what tables call it
        where = f", {row.data}, {row.size}" if len(plan.data) * len(plan.sizes) > 1 else ""
        self.name = f"{self.label}{where}"  # for messages, as `Plan.name_of` has it
        self.baseline = self.label == plan.baseline  # whether the others are compared with it
        self.check = self.label in plan.checks  # whether it tells about the baseline and gets no verdict
        # rescaling of the initial weights: as the paper says, or paired
        self.init = str(({"init": "paper"} | plan.base.model | self.contender.model)["init"])
        # by seed: results, those of diverged runs among them; of the runs that finished with a loss; and their losses
        self.ended = {seed: run.result for seed, run in runs.items() if run.result is not None}
        self.results = {seed: result for seed, result in self.ended.items() if not runs[seed].diverged}
        self.losses = {seed: result.loss for seed, result in self.results.items() if result.loss is not None}
        self.curves = {seed: runs[seed].curve for seed in self.results}
        self.diverged = tuple(seed for seed, run in runs.items() if run.diverged)  # their loss stopped being a number
        self.spread = spread_of(list(self.losses.values())) if len(self.losses) > 1 else None  # over seeds
        self.spikes = sum(run.spikes for run in runs.values())
        curves = [curve for curve in self.curves.values() if curve.tokens]
        self.late = mean_of_all([curve.late for curve in curves])  # over late evaluations
        self.end = mean_of_all([curve.loss[-1] for curve in curves])  # on the rows that curves are about
        # throughput as it was measured in turns before the runs, else that of all runs that ended
        of_runs = mean_of_all([result.tokens_per_second for result in self.ended.values()])
        self.tokens_per_second = row.tokens_per_second if section.interleaved else of_runs
        peaks = [result.peak_memory for result in self.results.values() if result.peak_memory is not None]
        self.costs: dict[str, float | None] = {
            **{name: getattr(row, name) for name in ("parameters", "flops_per_token", "tokens")},
            "tokens_per_second": self.tokens_per_second,
            "peak_memory": max(peaks, default=None),
        }
        # What its section finds.
        self.seeds = plan.seeds  # planned; with `until` as many as its looks ask for
        self.difference: Difference | None = None  # loss minus the baseline's, as it was matched; None for the baseline
        self.accuracy_difference: Difference | None = None  # accuracy minus the baseline's, for tasks
        self.equal: dict[str, Equal] = {}  # the difference in loss at equal tokens, flops and time, as far as known

    @property
    def missing(self) -> tuple[int, ...]:
        """Seeds that have not finished."""
        return tuple(seed for seed in self.seeds if seed not in self.ended)

    @property
    def verdict(self) -> str:
        """`resolved (better)`, `resolved (worse)`, `equivalent`, `not resolved`, `baseline` or `check`."""
        if self.difference is None or self.check:
            return "check" if self.check else "baseline"
        return self.difference.verdict

    def mean(self, name: str) -> float | None:
        """Mean over finished runs of a field of their results; None where one has none."""
        return mean_of_all([getattr(result, name) for result in self.results.values()])

    def tokens_to(self, loss: float) -> float | None:
        """Tokens after which its mean loss is no higher than `loss`, by the curves of its finished runs."""
        losses = together(self.curves.values())
        return Curve(tuple(losses), tuple(math.fsum(each) / len(each) for each in losses.values())).reaches(loss)

    def sample(self, part: float | None = None) -> Sample:
        """Losses by seed; left out where a run has not ended or its curve does not reach.

        Args:
            part: of the run, read on its curve, the end too; None is the loss at the end on all rows.
        """
        if part is None:
            return loss_sample(self.ended)
        curves = {seed: self.runs[seed].curve.at(part * self.row.tokens) for seed in self.results}
        return Sample({seed: loss for seed, loss in curves.items() if loss is not None} | dict.fromkeys(self.diverged))

    def times(self, name: str) -> float | None:
        """How many times the baseline's one of its costs is."""
        mine, theirs = self.costs[name], self.section.baseline.costs[name]
        return mine / theirs if mine is not None and theirs else None

    def scale(self, axis: str) -> float | None:
        """What a token is worth on an axis: one, its operations or its seconds."""
        if axis == "time":
            return 1 / self.tokens_per_second if self.tokens_per_second else None
        return {"tokens": 1.0, "flops": float(self.row.flops_per_token)}[axis]

    @property
    def throughput_unsure(self) -> bool:
        """Whether it is off the baseline's by less than their ratio varies: between rounds of measuring, or seeds."""
        times, spread, base = self.times("tokens_per_second"), self.row.speed_spread, self.section.baseline
        if not self.section.interleaved:
            pairs = [(self.results[seed], base.results[seed]) for seed in self.results if seed in base.results]
            ratios = [mine.tokens_per_second / theirs.tokens_per_second for mine, theirs in pairs]
            spread = spread_of(ratios) if len(ratios) > 1 else math.inf
        return times is None or abs(times - 1) < spread

    @cached_property
    def power(self) -> Power | None:
        """Seeds and seconds for a difference of the margin, or of half of what could be resolved here."""
        found, base, margin = self.difference, self.section.baseline, self.section.plan.margin
        if self.check or found is None or found.resolved or not found.detectable:
            return None
        effect = found.detectable / 2 if margin is None else margin
        seeds = seeds_for(found, effect, len(self.section.contenders))
        runs = [it.row.tokens / speed for it in (self, base) if (speed := it.tokens_per_second)]
        return Power(effect, seeds, None if seeds is None or len(runs) < 2 else seeds * math.fsum(runs))

    @property
    def worth(self) -> Worth | None:
        """Its speed-up; None without a law or an exchange rate."""
        return self._worth[0]

    @property
    def worth_note(self) -> str:
        """Why there is no speed-up, or what to think of it."""
        return self._worth[1]

    @cached_property
    def _worth(self) -> tuple[Worth | None, str]:
        section, base, found = self.section, self.section.baseline, self.difference
        scaling, rate = section.scaling, section.exchange
        if self.check or (scaling.law is None and rate is None):
            return None, "" if self.check else scaling.note
        if not self.row.tokens:
            return None, "it was not trained"
        source = "law" if scaling.law is not None else "more tokens"
        if self.baseline:
            one = Interval(1.0, None, None)
            return Worth(one, 1.0, one, source), ""
        speed, spent = self.times("tokens_per_second"), self.row.tokens / base.row.tokens
        if scaling.law is not None:
            try:
                net = speed_up_interval(scaling, base.points, self.points)
            except NoLaw as error:
                return None, str(error)
            if not math.isfinite(net.value) or speed is None:
                return None, net.note
            # the time of a token is in the speed-up; what is left without it is a matter of tokens
            return Worth(net.times(spent / speed), speed, net, source), net.note
        assert rate is not None
        fall, factor = rate
        if found is None or found.mean is None:
            return None, "no pair of runs has finished"
        # A gain in loss is worth so many times the tokens, if the baseline's loss goes on falling like this.
        ends = (None, None) if found.low is None or found.high is None else (found.high, found.low)
        low, high = (None if end is None else factor ** (-end / fall) for end in ends)
        note = f"the baseline falls by {fall:.3g} with {factor:g} times the tokens"
        tokens = Interval(factor ** (-found.mean / fall), low, high, note)
        return Worth(tokens, speed, None if speed is None else tokens.times(speed / spent), source), note

    @property
    def points(self) -> dict[int, Point]:
        """What a speed-up needs, by seed; throughput is each run's own unless it was measured in turns."""
        rate = self.row.tokens_per_second if self.section.interleaved else None
        return {
            seed: Point(self.losses[seed], self.row.tokens, result.tokens_per_second if rate is None else rate)
            for seed, result in self.results.items()
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the ratios of its costs to the baseline's."""
        alike = ("label", "baseline", "check", "init", "losses", "verdict", "spread", "late", "spikes")
        return plain(
            {
                "key": self.key,
                **{name: getattr(self, name) for name in alike},
                **{name: self.mean(name) for name in ("loss", "bits_per_byte", "accuracy")},
                **self.costs,
                **{name: getattr(self.row, name) for name in ("steps", "lr", "lr_edge", "lr_losses")},
                "finished": list(self.results),
                **{name: getattr(self, name) for name in ("diverged", "missing")},
                "ratios": {name: self.times(name) for name in self.costs},
                **{name: getattr(self, name) for name in ("difference", "accuracy_difference")},
                "equal": {axis: it._asdict() | {"indicative": it.indicative} for axis, it in self.equal.items()},
                "speed_up": self.worth,
                "speed_up_note": self.worth_note,
                **{name: getattr(self, name) for name in ("power", "curves")},
            }
        )


def plain(value: Any) -> Any:
    """Named tuples, mappings and lists within each other as JSON has them."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class Section:
    """A data set at a size.

    Args:
        plan: what was asked for.
        data: name of the data set.
        size: name of the size.
        runs: those that have begun, by the folder of their row and by seed.
    """

    def __init__(self, plan: Plan, data: str, size: str, runs: Mapping[Path, Mapping[int, RunRecord]]) -> None:
        self.plan, self.data, self.size = plan, data, size
        rows = [row for row in plan.rows if (row.data, row.size) == (data, size)]
        if plan.baseline_key not in {row.contender for row in rows}:
            raise ValueError(f"{PLAN}: rows of {data}, {size} have no {plan.baseline!r}, which is the baseline")
        # Whether throughput was measured in turns before the runs; otherwise it is what the runs had: throughputs of
        # some contenders, measured apart from the others', are none to compare by.
        self.interleaved = all(row.tokens_per_second is not None for row in rows)
        self.entries = tuple(Entry(self, row, runs[row.folder]) for row in rows)
        self.baseline = next(entry for entry in self.entries if entry.baseline)
        self.checks = tuple(entry for entry in self.entries if entry.check)  # it with another recipe or more tokens
        self.contenders = tuple(entry for entry in self.entries if not entry.baseline and not entry.check)
        # of contenders on a source, the last one that has low-rank additions in place of a method
        self.low_rank = next((entry for entry in reversed(self.contenders) if "lora" in entry.contender.model), None)
        # losses of tables of counts, of text: unigram and bigram, and the tokens that were counted
        self.ngrams: Mapping[str, float] = plan.about.get("ngrams", {}).get(data, {}).get(size, {})
        chances = [result.chance for entry in self.entries for result in entry.ended.values()]
        self.chance = next((chance for chance in chances if chance is not None), None)  # what guessing scores, in tasks
        self.scaling = Scaling(note=NEEDS_SIZES)  # the law of the data set, which the other sizes decide too
        self.rules: dict[str, Any] = {"seeds": plan.seeds, "looks": plan.looks, "margin": plan.margin}
        self._compare()

    def _compare(self) -> None:
        """Hold the entries against the baseline."""
        plan, losses, right = self.plan, self.baseline.sample(), _accuracies(self.baseline)
        for group in (self.contenders, self.checks):  # each of them shares an error
            found = judge(losses, {entry.key: entry.sample() for entry in group}, **self.rules)
            for entry in group:
                entry.difference = found[entry.key]
        step = 1 / plan.base.judged_examples  # each example has one answer or more
        rules = self.rules | {"margin": None, "lower_is_better": False, "step": step}
        accuracies = judge(right, {entry.key: _accuracies(entry) for entry in self.contenders}, **rules)
        for entry in self.contenders:
            entry.accuracy_difference = None if entry.mean("accuracy") is None else accuracies[entry.key]
        for axis in AXES:
            self._compare_at_equal(axis)
        if plan.until:
            wanted = {entry.key: entry.difference.wanted for entry in self.contenders if entry.difference}
            most = max(wanted.values(), default=plan.looks[0].seeds)
            for entry in self.entries:
                entry.seeds = plan.seeds[: wanted.get(entry.key, most)]

    @cached_property
    def beyond(self) -> dict[str, Difference]:
        """By key, the loss of every method on a source minus that of low-rank additions; none without these."""
        methods = {entry.key: entry.sample() for entry in self.contenders if "lora" not in entry.contender.model}
        return {} if self.low_rank is None else judge(self.low_rank.sample(), methods, **self.rules)

    def _compare_at_equal(self, axis: str) -> None:
        """At equal tokens, operations or time; the longer of two runs is read where the other ends."""
        base, read = self.baseline, dict[str, tuple[float, float, float]]()
        ours, theirs = dict[str, Sample](), dict[str, Sample]()
        for entry in self.contenders:
            mine, other = (it.row.tokens * (it.scale(axis) or 0.0) for it in (entry, base))
            if not (budget := min(mine, other)):  # one of them was not trained, or its throughput is not known
                continue
            # What was matched is equal up to the rounding to whole steps: both runs are taken at their ends.
            parts = (1.0, 1.0) if axis == self.plan.match else (budget / mine, budget / other)
            # Where one of them is read before its end both are read on their curves, whose rows are fewer and the same.
            places = (None, None) if min(parts) >= 1 - 1e-9 else parts
            ours[entry.key], theirs[entry.key] = entry.sample(places[0]), base.sample(places[1])
            read[entry.key] = (budget, *parts)
        found = judge(theirs, ours, **self.rules)
        for entry in (entry for entry in self.contenders if entry.key in found):
            difference, (budget, *parts) = found[entry.key], read[entry.key]
            if difference.mean is None:  # no curve reaches there
                continue
            early = "contender" if _early(entry, parts[0]) else "baseline" if _early(base, parts[1]) else ""
            unsure = axis == "time" and axis != self.plan.match and entry.throughput_unsure
            doubts = [EARLY] if difference.verdict == {"contender": WORSE, "baseline": BETTER}.get(early) else []
            doubts += [UNSURE] if unsure and difference.resolved else []
            if doubts:
                difference = difference._replace(verdict=OPEN, note="; ".join(filter(None, (difference.note, *doubts))))
            loss = mean_of_all([loss for loss in ours[entry.key].values.values() if loss is not None])
            entry.equal[axis] = Equal(budget, loss, difference, min(parts), early, unsure)

    @cached_property
    def exchange(self) -> tuple[float, float] | None:
        """By how much the baseline's loss falls with how many times the tokens; None where it was not run, or falls by
        less than two standard errors."""
        base = self.baseline
        for entry in self.checks:
            apart = [base.losses[seed] - loss for seed, loss in entry.losses.items() if seed in base.losses]
            factor = entry.row.tokens / base.row.tokens
            if BUDGET in entry.contender.train and len(apart) > 1 and factor > 1:
                fall, error = math.fsum(apart) / len(apart), spread_of(apart) / math.sqrt(len(apart))
                return (fall, factor) if fall > 2 * error else None
        return None

    @property
    def unsteadiness(self) -> Entry | None:
        """The check with another recipe and the same tokens whose loss is farthest from the baseline's."""
        moved = [e for e in self.checks if BUDGET not in e.contender.train and e.difference and e.difference.mean]
        return max(moved, key=lambda e: abs(e.difference.mean or 0.0) if e.difference else 0.0, default=None)

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
        labels = {entry.key: entry.label for entry in self.entries}
        return {
            **{name: getattr(self, name) for name in ("data", "size", "chance")},
            "baseline": self.baseline.label,
            "ngrams": dict(self.ngrams),
            "throughput": "measured in turns before the runs" if self.interleaved else "of the runs themselves",
            "beyond_low_rank": plain({labels[key]: found for key, found in self.beyond.items()}),
            "contenders": [entry.to_dict() for entry in self.entries],
        }


def _early(entry: Entry, part: float) -> bool:
    """Whether a run is read before its learning rate came down; a constant one never does."""
    schedule = entry.contender.train.get("schedule", entry.section.plan.base.schedule)
    return part < 1 - 1e-9 and schedule != "constant"


def _accuracies(entry: Entry) -> Sample:
    return Sample(dict.fromkeys(entry.diverged) | {seed: result.accuracy for seed, result in entry.results.items()})
