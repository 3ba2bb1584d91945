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
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

BETTER, WORSE, OPEN = "resolved (better)", "resolved (worse)", "not resolved"
"""The verdicts."""

LEVEL = 0.95
"""Of all intervals."""

Values = Mapping[int, float | None]
"""A measure by seed; None where the run diverged. A seed that is not there has not been run."""


class Difference(NamedTuple):
    """A contender's measure minus the baseline's, over the seeds both have."""

    seeds: tuple[int, ...]
    """Seeds with both values."""
    mean: float | None
    """Mean difference; None without a pair."""
    spread: float | None
    """Standard deviation of the differences; None with fewer than two pairs."""
    low: float | None
    """Lower end of the simultaneous interval."""
    high: float | None
    """Upper end of it."""
    p: float | None
    """Probability of so large a difference by chance, for this contender alone."""
    corrected_p: float | None
    """The same for the largest of all contenders: below 0.05 exactly when the interval leaves zero out."""
    verdict: str
    """`resolved (better)`, `resolved (worse)` or `not resolved`."""
    note: str
    """Why there is no interval, what is missing, which runs diverged."""
    diverged: tuple[int, ...]
    """Seeds at which the contender diverged."""
    missing: tuple[int, ...]
    """Seeds at which the contender or the baseline has not finished."""

    @property
    def resolved(self) -> bool:
        """Whether the sign of the difference is settled."""
        return self.verdict != OPEN

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self._asdict().items()}


def compare(
    baseline: Values,
    contenders: Mapping[str, Values],
    *,
    seeds: tuple[int, ...] | None = None,
    lower_is_better: bool = True,
    step: float = 0.0,
    level: float = LEVEL,
) -> dict[str, Difference]:
    """Hold every contender against the baseline.

    Args:
        baseline: its measure by seed.
        contenders: theirs, by name. All of them count for the correction, also those that have not finished, so that a
            verdict does not weaken when the others arrive.
        seeds: those planned; None is all that occur.
        lower_is_better: as for a loss; an accuracy is the other way round.
        step: smallest step of the measure, such as one in the number of answers for an accuracy. The spread is taken to
            be at least what rounding to this step brings, so that equal rounded values do not pass for certainty.
        level: probability that all intervals hold.
    """
    if seeds is None:
        seeds = tuple(sorted({*baseline, *(seed for values in contenders.values() for seed in values)}))
    return {
        name: difference(
            baseline, values, seeds, family=len(contenders), lower_is_better=lower_is_better, step=step, level=level
        )
        for name, values in contenders.items()
    }


def difference(
    baseline: Values,
    values: Values,
    seeds: tuple[int, ...],
    *,
    family: int,
    lower_is_better: bool = True,
    step: float = 0.0,
    level: float = LEVEL,
) -> Difference:
    """One contender of `family` against the baseline; see `compare`."""
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level}")
    pairs = {
        seed: mine - theirs
        for seed in seeds
        if (mine := values.get(seed)) is not None and (theirs := baseline.get(seed)) is not None
    }
    diverged = tuple(seed for seed in seeds if seed in values and values[seed] is None)
    fallen = tuple(seed for seed in seeds if seed in baseline and baseline[seed] is None)
    missing = tuple(seed for seed in seeds if seed not in values or seed not in baseline)
    notes = []
    if diverged:
        notes.append(f"diverged at {len(diverged)} of {len(seeds)} seeds")
    if fallen:
        notes.append(f"the baseline diverged at {len(fallen)} of {len(seeds)} seeds")
    if missing:
        notes.append(f"{len(missing)} of {len(seeds)} seeds not finished")
    mean = spread = low = high = p = corrected = None
    verdict = OPEN
    differences = list(pairs.values())
    count = len(differences)
    if count:
        mean = math.fsum(differences) / count
    if count == 1:
        notes.append("one seed: no interval")
    elif mean is not None:
        spread = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (count - 1))
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
    )


def _p(mean: float, error: float, freedom: int) -> float:
    """Two-sided probability of `mean`, and 1 or 0 where nothing varies."""
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return 2 * t_tail(abs(mean) / error, freedom)


def mean_interval(values: list[float], level: float = LEVEL) -> tuple[float, float, float] | None:
    """Mean and interval of a sample, None where it is empty; of a single value the interval is the whole line."""
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, -math.inf, math.inf
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
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


# Student's t distribution


def t_tail(t: float, freedom: float) -> float:
    """Probability that Student's t with `freedom` degrees of freedom exceeds `t`."""
    if freedom <= 0:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {freedom}")
    if t < 0:
        return 1 - t_tail(-t, freedom)
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2


@functools.lru_cache(maxsize=256)
def t_quantile(level: float, freedom: float) -> float:
    """The t within which, on both sides of zero, lies the part `level` of the distribution."""
    if not 0 <= level < 1:
        raise ValueError(f"level must be at least 0 and below 1, got {level}")
    tail = (1 - level) / 2
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(200):  # halving ends when the two are neighbours among the floats
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if t_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return high


def incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction."""
    if not 0 <= x <= 1:
        raise ValueError(f"x must lie between 0 and 1, got {x}")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly, its mirror image converges fast
        return 1 - incomplete_beta(1 - x, b, a)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x) - math.log(a)
    )
    return front * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    """1 / (1 + d1 / (1 + d2 / (1 + ...))) by Lentz's method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for index in range(1000):
        m = index // 2
        if index == 0:
            term = 1.0
        elif index % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 + term * d
        d = 1 / (d if abs(d) > tiny else tiny)
        c = 1 + term / (c if abs(c) > tiny else tiny)
        value *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return value - 1
