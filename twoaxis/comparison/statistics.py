"""Is a contender different from the baseline, or is it the seeds?

Runs are paired: contender and baseline of one seed share the data order and the initial weights of what they have in
common, so the unit is the difference within a seed, and seeds are what vary.

    seed    baseline  contender  difference
    0       4.231     4.208      -0.023
    1       4.219     4.201      -0.018        mean -0.0207, standard error of 3 values,
    2       4.240     4.219      -0.021        Student's t with 2 degrees of freedom

Several contenders are held against the same baseline, and each more is one more chance to be fooled. The intervals are
therefore simultaneous: with k contenders each is made at the level 1 - 0.05 / k (Bonferroni), so that all of them
together hold in 95% of comparisons whatever the correlation that the shared baseline brings. A difference is resolved
exactly when its interval leaves zero out: the table and the verdict cannot disagree, which they could if Holm's steps
gave the verdict. Variances are not pooled over contenders, because methods differ in how much seeds matter to them.

Everything here is a function of numbers: nothing is read, nothing is planned. Quantiles are scipy's (extra `lab`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

BETTER, WORSE, OPEN = "resolved (better)", "resolved (worse)", "not resolved"
"""The verdicts."""

LEVEL = 0.95
"""Of all intervals."""


class Sample(NamedTuple):
    """A measure of a contender's runs.

    Attributes:
        values: by seed; None where the run diverged. A seed that is not there has not been run.
        rows: by seed, the same of every held-out row, where it was kept.
    """

    values: Mapping[int, float | None]
    rows: Mapping[int, Sequence[float | None]] = {}


class Difference(NamedTuple):
    """A contender's measure minus the baseline's, over the seeds both have.

    Attributes:
        seeds: with both values.
        mean: of the differences; None without a pair.
        spread: standard deviation of the differences; None with fewer than two pairs.
        low: lower end of the simultaneous interval.
        high: upper end of it.
        p: probability of so large a difference by chance, for this contender alone.
        corrected_p: the same for the largest of all contenders: below 0.05 exactly when the interval leaves zero out.
        verdict: `resolved (better)`, `resolved (worse)` or `not resolved`.
        note: why there is no interval, what is missing, which runs diverged.
        diverged: seeds at which the contender diverged.
        missing: seeds at which the contender or the baseline has not finished.
        row_error: standard error of the mean over the held-out rows: how far another held-out sample would move it.
            None where losses of rows are not known. Verdicts are about the held-out rows that there are.
    """

    seeds: tuple[int, ...]
    mean: float | None
    spread: float | None
    low: float | None
    high: float | None
    p: float | None
    corrected_p: float | None
    verdict: str
    note: str
    diverged: tuple[int, ...]
    missing: tuple[int, ...]
    row_error: float | None = None

    @property
    def resolved(self) -> bool:
        """Whether the sign of the difference is settled."""
        return self.verdict != OPEN

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._asdict().items()}


def judge(
    baseline: Sample,
    contenders: Mapping[str, Sample],
    *,
    seeds: tuple[int, ...] | None = None,
    lower_is_better: bool = True,
    step: float = 0.0,
    level: float = LEVEL,
) -> dict[str, Difference]:
    """Hold every contender against the baseline.

    Args:
        baseline: its measure.
        contenders: theirs, by name. All of them count for the correction, also those that have not finished, so that a
            verdict does not weaken when the others arrive.
        seeds: those planned; None is all that occur.
        lower_is_better: as for a loss; an accuracy is the other way round.
        step: smallest step of the measure, such as one in the number of answers for an accuracy. The spread is taken to
            be at least what rounding to this step brings, so that equal rounded values do not pass for certainty.
        level: probability that all intervals hold.
    """
    if seeds is None:
        seeds = tuple(sorted({*baseline.values, *(seed for sample in contenders.values() for seed in sample.values)}))
    return {
        name: difference(
            baseline, sample, seeds, family=len(contenders), lower_is_better=lower_is_better, step=step, level=level
        )
        for name, sample in contenders.items()
    }


def difference(
    baseline: Sample,
    contender: Sample,
    seeds: tuple[int, ...],
    *,
    family: int,
    lower_is_better: bool = True,
    step: float = 0.0,
    level: float = LEVEL,
) -> Difference:
    """One contender of `family` against the baseline; see `judge`."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    values, others = contender.values, baseline.values
    pairs = {
        seed: mine - theirs
        for seed in seeds
        if (mine := values.get(seed)) is not None and (theirs := others.get(seed)) is not None
    }
    diverged = tuple(seed for seed in seeds if seed in values and values[seed] is None)
    fallen = tuple(seed for seed in seeds if seed in others and others[seed] is None)
    missing = tuple(seed for seed in seeds if seed not in values or seed not in others)
    notes = []
    if diverged:
        notes.append(f"diverged at {len(diverged)} of {len(seeds)} seeds")
    if fallen:
        notes.append(f"the baseline diverged at {len(fallen)} of {len(seeds)} seeds")
    if missing:
        notes.append(f"{len(missing)} of {len(seeds)} seeds not finished")
    mean = spread = low = high = p = corrected = None
    verdict, count = OPEN, len(pairs)
    if count:
        mean, spread = _moments(list(pairs.values()))
    if count == 1:
        spread = None
        notes.append("one seed: no interval")
    elif mean is not None and spread is not None:
        # A difference of two values rounded to the step has the variance 2 * step**2 / 12.
        error = max(spread, step / math.sqrt(6)) / math.sqrt(count)
        half = t_quantile(1 - (1 - level) / max(1, family), count - 1) * error
        low, high = mean - half, mean + half
        p = _p(mean, error, count - 1)
        corrected = min(1.0, family * p)
        if low > 0 or high < 0:
            verdict = BETTER if (mean < 0) == lower_is_better else WORSE
        elif error == 0:
            notes.append("the same at every seed")
        # The runs that are left flatter whoever lost some: diverging is worse than any of them.
        if (verdict == BETTER and diverged) or (verdict == WORSE and set(fallen) - set(diverged)):
            verdict = OPEN
            notes.append("the runs that did not diverge are no fair sample")
    return Difference(
        seeds=tuple(pairs),
        mean=mean,
        spread=spread,
        low=low,
        high=high,
        p=p,
        corrected_p=corrected,
        verdict=verdict,
        note="; ".join(notes),
        diverged=diverged,
        missing=missing,
        row_error=_row_error(baseline, contender, tuple(pairs)),
    )


def _row_error(baseline: Sample, contender: Sample, seeds: Sequence[int]) -> float | None:
    """Standard error over held-out rows of the difference, each row's taken as its mean over the seeds."""
    if not seeds or any(not (baseline.rows.get(seed) and contender.rows.get(seed)) for seed in seeds):
        return None
    columns = zip(*(zip(contender.rows[seed], baseline.rows[seed], strict=False) for seed in seeds), strict=False)
    means = []
    for pairs in columns:
        apart = [mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None]
        if apart:
            means.append(math.fsum(apart) / len(apart))
    return _moments(means)[1] / math.sqrt(len(means)) if len(means) > 1 else None


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean; None where there is no value, or one is not known."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; the latter of one value is 0."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1))


def _p(mean: float, error: float, freedom: int) -> float:
    """Two-sided probability of `mean`, and 1 or 0 where nothing varies."""
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * float(from_scipy("special").stdtr(freedom, -abs(mean) / error))


def mean_interval(values: list[float], level: float = LEVEL) -> tuple[float, float, float] | None:
    """Mean and interval of a sample, None where it is empty; of a single value the interval is the whole line."""
    if not values:
        return None
    mean, spread = _moments(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    half = t_quantile(level, len(values) - 1) * spread / math.sqrt(len(values))
    return mean, mean - half, mean + half


def seeds_needed(difference: Difference, contenders: int, *, level: float = LEVEL, most: int = 100) -> int | None:
    """How many seeds would resolve a difference of this size with this spread; None beyond `most` or without a spread.

    A guide for planning: the spread of a few seeds is itself uncertain.
    """
    if difference.mean is None or not difference.spread or difference.mean == 0:
        return None
    each = 1 - (1 - level) / max(1, contenders)
    for count in range(2, most + 1):
        if t_quantile(each, count - 1) * difference.spread / math.sqrt(count) < abs(difference.mean):
            return count
    return None


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
        raise ValueError("intervals and laws need scipy: pip install 'twoaxis[lab]'") from error
