"""Loss against compute, and what a contender's loss is worth in compute.

The baseline at several sizes gives a law

    L(C) = L_inf + A * C ** -alpha          C training operations, L held-out loss

and the law turns a lower loss into the compute the baseline would need to reach it:

    loss |  o base                          A      = (L_base - L_inf) * C ** alpha
         |   \\                              C_need = (A / (L_var - L_inf)) ** (1 / alpha)
         |    '.                            speed-up = (C_need / throughput_base) / (C / throughput_var)
         |  x---'--._  <- C_need
         +--C-----------> compute

`A` goes through the baseline's own point, so a contender equal to the baseline has a speed-up of exactly one, whatever
the fit's error. Without a law there is no speed-up: a guessed alpha would decide the answer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from twoaxis.comparison.statistics import LEVEL, from_scipy, t_quantile

ALPHAS = (0.005, 3.0)
"""Exponents looked at; a best one at either end means that the points tell nothing of the law."""
MISFIT = 0.25
"""How far points may lie off the law, as a part of their own spread."""
DRAWS = 300
"""Samples of a bootstrap."""
NEEDS_SIZES = "needs --sizes"
"""What stands in the place of a speed-up without a law."""


class Law(NamedTuple):
    """L(C) = l_inf + scale * C ** -alpha."""

    l_inf: float  # loss that compute cannot take away
    alpha: float  # how fast the rest falls
    scale: float | None  # A; None where l_inf and alpha were given and no size was fitted
    error: float | None  # root mean square distance of the points from the curve
    note: str  # where it comes from, and what to think of it


class NoLaw(ValueError):
    """The points do not determine a law; the message says why."""


class Interval(NamedTuple):
    """A number and where it lies with 95% confidence, as far as the seeds tell."""

    value: float
    low: float | None
    high: float | None
    note: str = ""

    def times(self, factor: float) -> Interval:
        """Of a multiple."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Interval(self.value * factor, low, high, self.note)


def fit_law(compute: Sequence[float], losses: Sequence[float], l_inf: float | None = None) -> Law:
    """Fit the law to the training operations and the mean held-out loss of each size by least squares.

    For a fixed exponent the law is linear in L_inf and A, so the search is over the exponent alone: a grid, then
    Brent's method around its best. L_inf stays at or above zero and A above it; where it is known two sizes suffice.
    """
    if len(compute) != len(losses):
        raise ValueError(f"compute has {len(compute)} sizes and losses {len(losses)}; give one loss for each size")
    return _fitted(tuple(compute), tuple(losses), l_inf)


@functools.lru_cache(maxsize=8192)  # draws of a few seeds repeat
def _fitted(compute: tuple[float, ...], losses: tuple[float, ...], l_inf: float | None) -> Law:
    c, y, different = np.array(compute), np.array(losses), len(set(compute))
    if not (np.isfinite(y).all() and (c > 0).all()):
        raise ValueError("compute must be positive and losses finite")
    if l_inf is None and different < 3:
        raise NoLaw(f"a law has three unknowns and there are {different} sizes; give three --sizes, or --l-inf")
    if l_inf is not None and different < 2:
        raise NoLaw(f"with --l-inf a law has two unknowns and there are {different} sizes; give two, or --alpha too")
    if l_inf is not None and l_inf >= y.min():
        raise NoLaw(f"--l-inf {l_inf:g} must lie below every loss; the lowest is {y.min():.4f}")
    centre = math.exp(float(np.log(c).mean()))  # powers of numbers near one are well-conditioned
    grid = np.geomspace(*ALPHAS, 121)
    best = int(np.argmin(_solve(c / centre, y, grid, l_inf)[2]))
    if best == 0 and y[-1] < y[0]:
        raise NoLaw(
            "the losses do not bend: no exponent fits better than a straight line; add a size further off, or --l-inf"
        )
    if best in (0, len(grid) - 1):
        raise NoLaw("the losses do not follow a falling law that levels off; more sizes or seeds are needed")
    found = from_scipy("optimize").minimize_scalar(
        lambda x: _solve(c / centre, y, np.exp([x]), l_inf)[2][0],
        bracket=tuple(np.log(grid[best - 1 : best + 2])),
        options={"xtol": 1e-12},
    )
    alpha = math.exp(float(found.x))
    floor, scale, square = (float(value[0]) for value in _solve(c / centre, y, np.array([alpha]), l_inf))
    if scale <= 0:
        raise NoLaw("the loss does not fall with compute; more sizes or seeds are needed")
    error = math.sqrt(square / len(y))
    if error > MISFIT * float(y.std()):
        raise NoLaw(
            f"the losses lie {error:.3g} off any falling law that levels off, and only {y.std():.3g} from each other; "
            "more sizes or seeds are needed"
        )
    sizes = f"fitted over {different} sizes"
    if l_inf is not None:
        sizes += f" with L_inf given as {l_inf:g}"
    elif floor == 0:
        sizes += "; L_inf is at its lower end, 0: the sizes do not show where the loss levels off"
    elif different == 3:
        sizes += ", which three parameters always fit"
    return Law(floor, alpha, scale * centre**alpha, error, sizes)


def _solve(
    c: np.ndarray, y: np.ndarray, alphas: np.ndarray, l_inf: float | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """L_inf, A and the squared error at each exponent."""
    x = c ** -alphas[:, None]  # (exponents, sizes)
    pure = (x * y).sum(1) / (x * x).sum(1)
    if l_inf is None:
        middle = x - x.mean(1, keepdims=True)
        scale = (middle * (y - y.mean())).sum(1) / np.maximum((middle * middle).sum(1), 1e-300)
        floor = y.mean() - scale * x.mean(1)
        floor, scale = np.where(floor < 0, 0.0, floor), np.where(floor < 0, pure, scale)
        floor = np.where(scale < 0, y.mean(), floor)
    else:
        floor, scale = np.full(len(x), l_inf), (x * (y - l_inf)).sum(1) / (x * x).sum(1)
    scale = np.maximum(scale, 0.0)
    rest = y - floor[:, None] - scale[:, None] * x
    return floor, scale, (rest * rest).sum(1)


def known_law(l_inf: float, alpha: float) -> Law:
    """A law known from elsewhere."""
    if l_inf < 0:
        raise ValueError(f"--l-inf must not be negative, got {l_inf:g}")
    if alpha <= 0:
        raise ValueError(f"--alpha must be positive, got {alpha:g}")
    return Law(l_inf, alpha, None, None, f"given: L_inf {l_inf:g}, alpha {alpha:g}")


class Point(NamedTuple):
    """What a speed-up needs of one contender at one size."""

    loss: float
    tokens: float
    throughput: float  # training tokens per second


def speed_up(law: Law, baseline: Point, contender: Point) -> float:
    """How much faster the contender reaches its loss than the baseline would.

    In the formula above the compute C cancels: what is left is the ratio of the distances to L_inf and that of the
    times. The contender's C is the baseline's for as many tokens. More than one pays in wall-clock time; it is infinite
    if the contender's loss lies at or below L_inf.
    """
    if not (baseline.throughput > 0 and contender.throughput > 0):
        raise NoLaw("no throughput was measured")
    if baseline.loss <= law.l_inf:
        raise NoLaw(f"the baseline's loss {baseline.loss:.4f} is not above L_inf {law.l_inf:.4f}")
    if contender.loss <= law.l_inf:
        return math.inf
    needed = ((baseline.loss - law.l_inf) / (contender.loss - law.l_inf)) ** (1 / law.alpha)  # C_need / C
    spent = contender.tokens / baseline.tokens
    return (needed / baseline.throughput) / (spent / contender.throughput)


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The law of a data set and what it was fitted to: the baseline at every size."""

    law: Law | None = None  # none without one
    note: str  # where it comes from, or why there is none
    exponent: Interval | None = None  # alpha with an interval over seeds, where it was fitted
    compute: Mapping[str, float] = field(default_factory=dict)  # training operations by size
    losses: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # held-out losses by size and seed
    l_inf: float | None = None  # as it was given

    @property
    def seeds(self) -> set[int]:
        """Those that every size has."""
        return set.intersection(*(set(group) for group in self.losses.values())) if self.losses else set()

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "law": self.law and self.law._asdict(),
            "alpha": self.exponent and self.exponent._asdict(),
            "note": self.note,
            "flops": dict(self.compute),
            "losses": dict(self.losses),
        }

    def law_of(self, sample: Sequence[int] | None = None) -> Law:
        """The law through the mean losses of every size, of all seeds or of a sample of them."""
        means = [_mean([group[seed] for seed in sample or group]) for group in self.losses.values()]
        return fit_law([self.compute[name] for name in self.losses], means, self.l_inf)


def find_law(
    compute: Mapping[str, float],
    losses: Mapping[str, Mapping[int, float]],
    *,
    l_inf: float | None = None,
    alpha: float | None = None,
) -> Scaling:
    """The law that is given by both parameters, or fitted over the sizes that have losses.

    Args:
        compute: training operations of the baseline by size.
        losses: its held-out losses by size and seed.
        l_inf: irreducible loss; None fits it.
        alpha: exponent; needs `l_inf`.
    """
    if l_inf is not None and alpha is not None:
        law = known_law(l_inf, alpha)
        return Scaling(law=law, note=law.note)
    found = Scaling(
        note="", compute=compute, losses={name: group for name, group in losses.items() if group}, l_inf=l_inf
    )
    try:
        law = found.law_of()
    except NoLaw as error:
        return replace(found, note=f"{NEEDS_SIZES}: {error}")
    exponent = _bootstrap(law.alpha, found.seeds, lambda sample: math.log(found.law_of(sample).alpha))
    return replace(found, law=law, note=law.note, exponent=exponent)


def speed_up_interval(scaling: Scaling, baseline: Mapping[int, Point], contender: Mapping[int, Point]) -> Interval:
    """The speed-up of the mean losses, with an interval over seeds; `NoLaw` where there is none.

    Seeds are drawn with replacement, whole: the baseline's losses at every size, and with them the law, the contender's
    loss and both throughputs move together. The standard error of so few draws is too small by sqrt((n - 1) / n), which
    is made up for, and the interval is Student's, on the logarithm.
    """
    law, fitted = scaling.law, bool(scaling.losses)
    if law is None:
        raise NoLaw(scaling.note)
    seeds = set(baseline) & set(contender)
    if not seeds:
        raise NoLaw("no seed has both the baseline and the contender")

    def at(sample: Sequence[int], its_law: Law) -> float:
        drawn = [[points[seed] for seed in sample] for points in (baseline, contender)]
        return speed_up(its_law, *(Point(*map(_mean, zip(*points, strict=True))) for points in drawn))

    value = at(sorted(seeds), law)
    if not math.isfinite(value):
        return Interval(value, None, None, "its loss is not above L_inf")
    return _bootstrap(
        value,
        seeds & scaling.seeds if fitted else seeds,
        lambda sample: math.log(at(sample, scaling.law_of(sample) if fitted else law)),
    )


def _bootstrap(value: float, among: set[int], draw: Callable[[Sequence[int]], float]) -> Interval:
    """An interval around a positive value from draws of its logarithm."""
    seeds, count = sorted(among), len(among)
    if count < 2:
        return Interval(value, None, None, "one seed: no interval")
    generator = np.random.default_rng(0)
    known: dict[tuple[int, ...], float] = {}
    drawn = [tuple(sorted(seeds[index] for index in generator.integers(0, count, count))) for _ in range(DRAWS)]
    for sample in set(drawn):
        try:
            known[sample] = draw(sample)
        except (NoLaw, OverflowError):
            known[sample] = math.inf
    found = [known[sample] for sample in drawn if math.isfinite(known[sample])]
    failed = DRAWS - len(found)
    if failed > DRAWS // 20:
        return Interval(value, None, None, f"no interval: {failed} of {DRAWS} draws of the seeds gave no law")
    error = float(np.std(found)) * math.sqrt(count / (count - 1))
    half = t_quantile(LEVEL, count - 1) * error
    with np.errstate(over="ignore"):
        return Interval(value, value * math.exp(-half), float(value * np.exp(half)))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
