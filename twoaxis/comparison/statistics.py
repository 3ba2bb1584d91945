"""Is a contender different from the baseline, or is it the seeds?

Runs are paired: contender and baseline of one seed share the data order and the initial weights of what they have in
common, so the unit is the difference within a seed, and seeds are what vary.

    seed    baseline  contender  difference
    0       4.231     4.208      -0.023        mean m of n differences, variance s²
    1       4.219     4.201      -0.018
    2       4.240     4.219      -0.021        m ± hypot(t · sqrt(v / n), u · r)

- v is s² for one or two contenders, with n - 1 degrees of freedom for t. Of three or more it is moderated: a variance
  of few seeds is often far too small by chance, and then something is resolved that is not there. With s0² the
  geometric mean over the table, corrected for the bias of a logarithm, v = max(s², (s² + s0²) / 2), with 2 (n - 1)
  degrees of freedom. A noisy contender keeps its noise, a calm one may not be calmer than half of what is usual here.
- r is the standard error over held-out rows: other held-out text would move the difference by as much, and more seeds
  do not make it smaller. Rows are many, so its quantile u has their degrees of freedom and not those of the seeds,
  which would make an interval that rows dominate up to three times too wide.
- t and u are taken at the level 1 - alpha / k of k contenders (Bonferroni), so that all intervals together hold in 95%
  of comparisons whatever the correlation that the shared baseline brings. A difference is resolved exactly when its
  interval leaves zero out: the table and the verdict cannot disagree. p is the alpha at which it would just touch zero.
- Seeds that come in several looks, of which each could resolve something, share alpha: see `planned_looks` and
  `added_looks`. An interval is then the intersection of those of all looks.

How often this is wrong, and how often right, is simulated in benchmarks/verdicts.py; the table stands in
docs/explanation/statistics.md.
Everything here is a function of numbers: nothing is read, nothing is planned. Quantiles are scipy's (extra `lab`).
"""

from __future__ import annotations

import bisect
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from twoaxis.base.machine import needs

BETTER, WORSE, OPEN, EQUIVALENT = "resolved (better)", "resolved (worse)", "not resolved", "equivalent"
"""The verdicts; the last one for an interval inside a margin that was given."""

LEVEL = 0.95
"""Of all intervals."""
POWER = 0.8
"""Probability with which a true difference shall be resolved, where powers are given."""
FIRST_LOOK = 4
"""Seeds of the first planned look."""


class Sample(NamedTuple):
    """A measure of a contender's runs."""

    values: Mapping[int, float | None]  # by seed; None where the run diverged, nothing where it was not made
    rows: Mapping[int, Sequence[float | None]] = {}  # by seed, the same of every held-out row, where it was kept


class Look(NamedTuple):
    """A moment at which verdicts are given."""

    seeds: int  # how many, from the first planned one on
    share: float  # of alpha that it spends


def planned_looks(most: int) -> tuple[Look, ...]:
    """Looks that were planned: at 4 seeds, then at twice as many each time, the last at `most`.

    Each spends half of what is left of alpha and the last one all of it, so that all of them together err as rarely as
    one: 4, 8 and 16 seeds spend a half, a quarter and a quarter.
    """
    counts = []
    while (count := FIRST_LOOK * 2 ** len(counts)) < most:
        counts.append(count)
    spent = [Look(count, 0.5 ** (number + 1)) for number, count in enumerate(counts)]
    return (*spent, Look(most, 0.5 ** len(counts)))


def added_looks(counts: Sequence[int]) -> tuple[Look, ...]:
    """Looks that nobody planned: seeds were added after the whole of alpha was spent on the first ones.

    The second look spends a half of alpha, the third a quarter and so on: however often seeds are added, something is
    resolved wrongly in at most 10% of comparisons.
    """
    return tuple(Look(count, 0.5**number) for number, count in enumerate(counts))


class Difference(NamedTuple):
    """A contender's measure minus the baseline's, over the seeds both have."""

    seeds: tuple[int, ...]  # with both values, at the last look
    mean: float | None = None  # of the differences; None without a pair
    spread: float | None = None  # standard deviation of the differences; None with fewer than two pairs
    error: float | None = None  # standard error of the mean, from seeds (moderated) and held-out rows
    freedom: int = 0  # degrees of freedom of the seeds' part of it
    low: float | None = None  # lower end of the simultaneous interval
    high: float | None = None  # upper end of it
    p: float | None = None  # probability of so large a difference by chance, for this contender alone
    corrected_p: float | None = None  # of all contenders and looks: below 0.05 exactly if the interval leaves zero out
    detectable: float | None = None  # the true difference that would have been resolved with a probability of 80%
    verdict: str = OPEN  # `resolved (better)`, `resolved (worse)`, `equivalent` or `not resolved`
    note: str = ""  # why there is no interval, what is missing, which runs diverged
    diverged: tuple[int, ...] = ()  # seeds at which the contender diverged
    missing: tuple[int, ...] = ()  # seeds at which the contender or the baseline has not finished
    row_error: float | None = None  # of the mean, over held-out rows alone; None where losses of rows are not known
    rows: int = 0  # how many they are
    wanted: int = 0  # seeds that its looks ask for, until one of them resolves it

    @property
    def resolved(self) -> bool:
        """Whether the sign of the difference is settled."""
        return self.verdict in (BETTER, WORSE)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._asdict().items()}


def judge(
    baseline: Sample | Mapping[str, Sample],
    contenders: Mapping[str, Sample],
    *,
    seeds: tuple[int, ...] | None = None,
    looks: Sequence[Look] = (),
    lower_is_better: bool = True,
    step: float = 0.0,
    level: float = LEVEL,
    margin: float | None = None,
) -> dict[str, Difference]:
    """Hold every contender against the baseline.

    Args:
        baseline: its measure; or for each contender the one it is held against.
        contenders: theirs, by name. All of them count for the correction, also those that have not finished, so that a
            verdict does not weaken when the others arrive.
        seeds: those planned; None is all that occur.
        looks: at how many of them verdicts are given; none is one, at all of them.
        lower_is_better: as for a loss; an accuracy is the other way round.
        step: smallest step of the measure, such as one in the number of answers for an accuracy. The spread is taken to
            be at least what rounding to this step brings, so that equal rounded values do not pass for certainty.
        level: probability that all intervals hold.
        margin: a difference smaller than this does not matter.
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    against = dict.fromkeys(contenders, baseline) if isinstance(baseline, Sample) else dict(baseline)
    if seeds is None:
        seeds = tuple(sorted({s for each in (*against.values(), *contenders.values()) for s in each.values}))
    looks = looks or (Look(len(seeds), 1.0),)
    found: dict[str, Difference] = {}
    for number, look in enumerate(looks):
        pairs = {name: _pair(against[name], it, seeds[: look.seeds], step) for name, it in contenders.items()}
        unsettled = [name for name in contenders if number == 0 or not found[name].resolved]
        if number and any(pairs[name].missing for name in unsettled):
            break  # a look counts when all runs it is about have ended
        following = looks[min(number + 1, len(looks) - 1)].seeds
        alpha = (1 - level) * look.share / max(1, len(contenders))
        variances, freedoms = moderate(
            np.array([it.variance for it in pairs.values()]), np.array([len(it.values) - 1 for it in pairs.values()])
        )
        for place, (name, pair) in enumerate(pairs.items()):
            if number and pair.missing:
                continue  # resolved before, and left alone since
            before = found.get(name)
            made = _interval(pair, float(variances[place]), int(freedoms[place]), alpha, (1 - level) / alpha)
            made = _verdict(_narrow(before, made), pair, lower_is_better, margin)
            wanted = look.seeds if made.resolved or pair.missing else following
            found[name] = made._replace(wanted=before.wanted if before is not None and before.resolved else wanted)
    return found


class Pair(NamedTuple):
    """Differences by seed of a contender to the baseline at a look."""

    values: dict[int, float]
    variance: float  # of the values; not a number with fewer than two
    diverged: tuple[int, ...]
    fallen: tuple[int, ...]  # seeds at which the baseline diverged
    missing: tuple[int, ...]
    row_error: float | None
    rows: int
    planned: int


def _pair(baseline: Sample, contender: Sample, seeds: Sequence[int], step: float) -> Pair:
    ours, others = contender.values, baseline.values
    values = {
        seed: mine - theirs
        for seed in seeds
        if (mine := ours.get(seed)) is not None and (theirs := others.get(seed)) is not None
    }
    # A difference of two values rounded to the step has the variance 2 * step**2 / 12.
    variance = max(spread_of(list(values.values())) ** 2, step**2 / 6) if len(values) > 1 else math.nan
    diverged, fallen = (tuple(s for s in seeds if s in its and its[s] is None) for its in (ours, others))
    missing = tuple(seed for seed in seeds if seed not in ours or seed not in others)
    error, rows = _row_error(baseline, contender, list(values))
    return Pair(values, variance, diverged, fallen, missing, error, rows, len(seeds))


def moderate(variances: np.ndarray, freedoms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances to judge with and their degrees of freedom; the last axis are the contenders of a table.

    Args:
        variances: of their differences over seeds; not a number where there is none.
        freedoms: seeds less one.
    """
    known = (variances > 0) & (freedoms > 0)
    count = known.sum(-1, keepdims=True)
    if not (count >= 3).any():
        return variances, freedoms
    half = np.maximum(freedoms, 1) / 2
    # The mean logarithm of an estimated variance lies below that of the true one by log(f / 2) - psi(f / 2).
    logs = np.log(np.where(known, variances, 1.0)) + np.log(half) - from_scipy("special").psi(half)
    usual = np.exp(np.where(known, logs, 0.0).sum(-1, keepdims=True) / np.maximum(count, 1))
    several = count >= 3
    mixed = np.maximum(variances, (variances + usual) / 2)
    return np.where(several, mixed, variances), np.where(several, 2 * freedoms, freedoms)


def _interval(pair: Pair, variance: float, freedom: int, alpha: float, tests: float) -> Difference:
    """The difference with its interval at the level 1 - `alpha`, one of so many `tests` that share the error."""
    values, notes = list(pair.values.values()), []
    for seeds, whose in ((pair.diverged, ""), (pair.fallen, "the baseline ")):
        if seeds:
            notes.append(f"{whose}diverged at {len(seeds)} of {pair.planned} seeds")
    if pair.missing:
        notes.append(f"{len(pair.missing)} of {pair.planned} seeds not finished")
    mean = math.fsum(values) / len(values) if values else None
    found: dict[str, Any] = {"freedom": freedom, "row_error": pair.row_error, "rows": pair.rows, "wanted": pair.planned}
    if len(values) == 1:
        notes.append("one seed: no interval")
    elif mean is not None:
        errors = Errors(math.sqrt(variance / len(values)), freedom, pair.row_error or 0.0, max(1, pair.rows - 1))
        half, p = errors.half(alpha), errors.p(mean)
        found |= {"spread": spread_of(values), "error": errors.total, "p": p, "corrected_p": min(1.0, tests * p)}
        found |= {"low": mean - half, "high": mean + half, "detectable": errors.detectable(alpha)}
        if errors.total == 0 and mean == 0:
            notes.append("the same at every seed")
    found |= {"note": "; ".join(notes), "diverged": pair.diverged, "missing": pair.missing}
    return Difference(tuple(pair.values), mean, **found)


def _narrow(before: Difference | None, now: Difference) -> Difference:
    """The newer of two looks, with what both of them leave."""
    if before is None or before.low is None or before.high is None or now.low is None or now.high is None:
        return now
    assert before.corrected_p is not None
    assert now.corrected_p is not None
    low, high = max(before.low, now.low), min(before.high, now.high)
    if low > high:
        note = "; ".join(filter(None, (now.note, "the looks contradict each other")))
        return now._replace(low=min(before.low, now.low), high=max(before.high, now.high), corrected_p=1.0, note=note)
    return now._replace(low=low, high=high, corrected_p=min(before.corrected_p, now.corrected_p))


def _verdict(found: Difference, pair: Pair, lower_is_better: bool, margin: float | None) -> Difference:
    """The difference with its verdict."""
    if found.low is None or found.high is None:
        return found
    verdict, note = OPEN, found.note
    if found.low > 0 or found.high < 0:
        verdict = BETTER if (found.high < 0) == lower_is_better else WORSE
    elif margin is not None and -margin < found.low and found.high < margin and not (pair.diverged or pair.fallen):
        verdict = EQUIVALENT
    # The runs that are left flatter whoever lost some: diverging is worse than any of them.
    if (verdict == BETTER and pair.diverged) or (verdict == WORSE and set(pair.fallen) - set(pair.diverged)):
        verdict, note = OPEN, f"{note}; the runs that did not diverge are no fair sample"
    return found._replace(verdict=verdict, note=note)


def _row_error(baseline: Sample, contender: Sample, seeds: Sequence[int]) -> tuple[float | None, int]:
    """Standard error over held-out rows of the difference, each row's taken as its mean over the seeds, and how many
    rows there are."""
    if not seeds or any(not (baseline.rows.get(seed) and contender.rows.get(seed)) for seed in seeds):
        return None, 0
    least = min(len(sample.rows[seed]) for sample in (baseline, contender) for seed in seeds)
    mine, theirs = (np.array([its.rows[seed][:least] for seed in seeds], dtype=float) for its in (contender, baseline))
    apart = mine - theirs
    known = ~np.isnan(apart)
    rows = np.where(known, apart, 0.0).sum(0)[known.any(0)] / known.sum(0)[known.any(0)]
    return (float(rows.std(ddof=1)) / math.sqrt(len(rows)), len(rows)) if len(rows) > 1 else (None, 0)


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean; None where there is no value, or one is not known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def spread_of(values: Sequence[float]) -> float:
    """Standard deviation; of one value 0."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


# Intervals, probabilities and power of a mean whose error has two parts.


def half_width(alpha: Any, seeds: Any, freedom: Any, rows: Any = 0.0, row_freedom: Any = 1) -> Any:
    """Half of an interval at the level 1 - alpha; numbers or arrays, see `Errors`."""
    stdtrit = from_scipy("special").stdtrit
    return np.hypot(stdtrit(freedom, alpha / 2) * seeds, stdtrit(row_freedom, alpha / 2) * rows)


class Errors(NamedTuple):
    """Standard errors of a mean, of seeds and of held-out rows, each with its degrees of freedom."""

    seeds: float
    freedom: int
    rows: float = 0.0
    row_freedom: int = 1

    @property
    def total(self) -> float:
        """The standard error of both."""
        return math.hypot(self.seeds, self.rows)

    def half(self, alpha: float) -> float:
        """Half of the interval at the level 1 - alpha."""
        return float(half_width(alpha, *self))

    def p(self, mean: float) -> float:
        """The alpha at which the interval of a mean would end at zero; 1 or 0 where nothing varies."""
        if self.total == 0 or mean == 0:
            return float(mean == 0)
        special = from_scipy("special")
        # Both parts together need a larger alpha than each alone.
        parts = ((self.freedom, self.seeds), (self.row_freedom, self.rows))
        alone = [2 * float(special.stdtr(freedom, -abs(mean) / error)) for freedom, error in parts if error]
        if len(alone) == 1 or max(alone) == 0:
            return max(alone)
        # In logarithms, so that small ones keep their digits; the end below both may be rounded.
        ends = math.log(max(alone)) - 1e-6, 0.0
        found = from_scipy("optimize").brentq(lambda log: self.half(math.exp(log)) - abs(mean), *ends, xtol=1e-13)
        return math.exp(found)

    def power(self, alpha: float, effect: float) -> float:
        """Probability that a true difference of `effect` is resolved with its sign, if these are the true errors."""
        return self._resolved(self._halves(alpha), effect)

    def detectable(self, alpha: float) -> float:
        """The true difference that is resolved with the probability `POWER`."""
        if self.total == 0:
            return 0.0
        halves = self._halves(alpha)
        ends = 0.0, float(halves.max()) + 10 * self.total
        found = from_scipy("optimize").brentq(lambda effect: self._resolved(halves, effect) - POWER, *ends, rtol=1e-6)
        return float(found)

    def _halves(self, alpha: float) -> np.ndarray:
        """Half widths that estimates of these errors lead to, each as probable as the others."""

        def estimates(error: float, freedom: int, count: int) -> np.ndarray:
            middles = (np.arange(count) + 0.5) / count
            return error * np.sqrt(2 / freedom * from_scipy("special").gammaincinv(freedom / 2, middles))

        seeds, rows = estimates(self.seeds, self.freedom, 200), estimates(self.rows, self.row_freedom, 16)
        return half_width(alpha, seeds[:, None], self.freedom, rows, self.row_freedom)

    def _resolved(self, halves: np.ndarray, effect: float) -> float:
        return float(from_scipy("special").ndtr((abs(effect) - halves) / self.total).mean())


def seeds_for(
    found: Difference, effect: float, contenders: int, *, level: float = LEVEL, most: int = 200
) -> int | None:
    """How many seeds, in one look at so many contenders, resolve a true difference of `effect` with a probability of
    80%, if the variances that were found are the true ones; None for more than `most`, as where rows are too few."""
    count, rows = len(found.seeds), found.row_error or 0.0
    if found.error is None or count < 2 or effect == 0:
        return None
    variance, each = max(found.error**2 - rows**2, 0.0) * count, found.freedom // (count - 1)
    alpha = (1 - level) / max(1, contenders)

    def enough(seeds: int) -> bool:
        errors = Errors(math.sqrt(variance / seeds), each * (seeds - 1), rows, max(1, found.rows - 1))
        return errors.total == 0 or errors.power(alpha, effect) >= POWER

    # More seeds never make it harder, so the least number is found by halving.
    counts = range(2, most + 1)
    first = bisect.bisect_left(counts, True, key=enough)
    return counts[first] if first < len(counts) else None


def t_quantile(level: float, freedom: float) -> float:
    """The t within which, on both sides of zero, lies the part `level` of Student's distribution."""
    if not 0 <= level < 1:
        raise ValueError(f"level must be at least 0 and below 1, got {level}")
    # the lower tail keeps its digits where `level` is close to 1
    return -float(from_scipy("special").stdtrit(freedom, (1 - level) / 2))


def from_scipy(name: str) -> Any:
    """A part of scipy, imported when it is needed."""
    try:
        return importlib.import_module(f"scipy.{name}")
    except ImportError as error:
        raise ValueError(needs("an interval", "scipy")) from error
