"""`python -m benchmarks.verdicts`: how often `twoaxis compare` is wrong, and how often it finds what is there.

Losses are drawn, thousands of comparisons at once, and judged as `twoaxis.comparison.statistics` does: with its own
variances and intervals, on arrays (a test holds both to the same verdicts). About two minutes on one core;
`--write-docs` puts the tables into docs/explanation/statistics.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.random import Generator

from benchmarks.page import replace_between
from twoaxis.comparison.decisions import settle
from twoaxis.comparison.statistics import LEVEL, Look, added_looks, half_width, moderate, planned_looks

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "statistics.md"
MARKS = "<!-- simulated: written by python -m benchmarks.verdicts --write-docs -->", "<!-- end of simulated -->"
EFFECT = 2.0
"""Of the planted difference, in standard deviations of a paired difference."""
ROWS = 64
"""Held-out rows, where they bring noise of their own."""


def normal(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.normal(size=shape)


def unequal(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Runs of one contender vary up to nine times as much as another's; the baseline is in the middle."""
    return generator.normal(size=shape) * np.geomspace(1 / 3, 3, shape[-2])[np.argsort(ODD[: shape[-2]])][:, None]


ODD = np.array([0, -5, 1, -4, 2, -3, 3, -2, 4, -1, 5])
"""Sorts spreads so that the first one, the baseline's, is among the middle ones."""


def heavy(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_t(3, size=shape) / np.sqrt(3)


def bimodal(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A quarter of the runs stays on a plateau, three standard deviations above the others."""
    return (generator.normal(size=shape) + 3 * (generator.random(shape) < 0.25) - 0.75) / np.sqrt(1 + 9 * 3 / 16)


def skewed(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.exponential(size=shape) - 1


def plateau(generator: Generator, shape: tuple[int, ...]) -> np.ndarray:
    """The same for the baseline alone: a recipe that it does not stand, and contenders of the same mean do."""
    runs = generator.normal(size=shape)
    runs[:, :1] = np.sqrt(1 + 9 * 3 / 16) * bimodal(generator, (shape[0], 1, shape[2]))
    return runs


NOISE: dict[str, Callable[[Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": normal,
    "unequal": unequal,
    "heavy tails": heavy,
    "bimodal": bimodal,
    "skewed": skewed,
    "plateau": plateau,
}


def verdicts(
    apart: np.ndarray,
    looks: Sequence[Look],
    level: float = LEVEL,
    rows: np.ndarray | None = None,
    shared: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Sign of what is resolved, 0 where nothing is, and seeds used.

    Args:
        apart: paired differences (comparisons, contenders, seeds).
        looks: at the seeds from the first on; a contender that is resolved gets no more of them.
        level: of the intervals of a table.
        rows: what each held-out row adds to the differences of all seeds (comparisons, contenders, rows).
        shared: whether errors of rows have the quantile of the seeds, as they have not in a comparison.
    """
    sign = np.zeros(apart.shape[:2])
    used = np.full(apart.shape[:2], looks[0].seeds)
    shift, row_error, row_freedom = 0.0, 0.0, 1
    if rows is not None:
        row_freedom = rows.shape[2] - 1
        shift, row_error = rows.mean(-1), rows.std(-1, ddof=1) / np.sqrt(rows.shape[2])
    for look in looks:
        used = np.where(sign == 0, look.seeds, used)
        there = np.arange(apart.shape[2]) < used[..., None]
        mean = np.where(there, apart, 0.0).sum(-1) / used
        squares = np.where(there, (apart - mean[..., None]) ** 2, 0.0).sum(-1)
        variances, freedoms = moderate(squares / (used - 1), used - 1)
        alpha = (1 - level) * look.share / apart.shape[1]
        row_freedoms = freedoms if shared else row_freedom
        half = half_width(alpha, np.sqrt(variances / used), freedoms, row_error, row_freedoms)
        sign = np.where((sign == 0) & (np.abs(mean + shift) > half), np.sign(mean + shift), sign)
    return sign, used


def one_look(seeds: int) -> tuple[Look, ...]:
    return (Look(seeds, 1.0),)


def compared(
    noise: str,
    contenders: int,
    looks: Sequence[Look],
    trials: int,
    *,
    effect: float = 0.0,
    seed: int = 0,
    ratio: float = 0.0,
    shared: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signs and seeds of simulated comparisons, and which contenders are better by `effect`: the first one, or none.

    Args:
        noise: of runs, and of held-out rows.
        contenders: of the table.
        looks: at seeds.
        trials: comparisons.
        effect: in standard deviations of a paired difference.
        seed: of the draws.
        ratio: of the variance that `ROWS` held-out rows bring into a mean to the variance that the seeds of the first
            look do.
        shared: see `verdicts`.
    """
    generator = np.random.default_rng([seed, contenders, looks[-1].seeds, list(NOISE).index(noise)])
    runs = NOISE[noise](generator, (trials, contenders + 1, looks[-1].seeds))
    apart = runs[:, 1:] - runs[:, :1]
    spread = apart.std((0, 2))
    apart[:, 0] -= effect * spread[0]
    rows = None
    if ratio:
        losses = NOISE[noise](generator, (trials, contenders + 1, ROWS))
        rows = losses[:, 1:] - losses[:, :1]
        rows *= (spread * np.sqrt(ratio * ROWS / looks[0].seeds) / rows.std((0, 2)))[:, None]
    planted = np.zeros(contenders, bool)
    planted[0] = effect != 0
    return (*verdicts(apart, looks, rows=rows, shared=shared), planted)


def wrong(noise: str, contenders: int, looks: Sequence[Look], trials: int, ratio: float = 0.0) -> float:
    """Part of comparisons of equals in which anything is resolved."""
    return float((compared(noise, contenders, looks, trials, ratio=ratio)[0] != 0).any(1).mean())


def found(
    noise: str, contenders: int, looks: Sequence[Look], trials: int, effect: float = EFFECT, ratio: float = 0.0
) -> tuple[float, float]:
    """Part of comparisons in which the planted difference is resolved with its sign, and the mean seeds of it."""
    sign, used, planted = compared(noise, contenders, looks, trials, effect=effect, ratio=ratio)
    return float((sign[:, planted] == -1).mean()), float(used[:, planted].mean())


def chosen_rates(
    choosing: int, seeds: int, contenders: int, trials: int, *, gap: float = 1.0, rates: int = 3, own: bool = False
) -> float:
    """Part of comparisons of equals in which something is resolved when each has the rate that was chosen for it.

    Args:
        choosing: seeds on which rates are chosen.
        seeds: on which contenders are judged.
        contenders: of the table.
        trials: comparisons.
        gap: by which a rate beside the best one is worse, in standard deviations of a run.
        rates: tried; the middle one is the best of all contenders.
        own: whether each takes its best without a look at the baseline's.
    """
    generator = np.random.default_rng([choosing, seeds, contenders])
    worse = gap * np.abs(np.arange(rates) - rates // 2)
    losses = worse[:, None] + generator.normal(size=(trials, contenders + 1, rates, choosing))
    best = losses.mean(-1).argmin(-1)
    if not own:
        best = np.concatenate([best[:, :1], settle(losses[:, 1:], best[:, :1])], axis=1)
    runs = worse[best][..., None] + generator.normal(size=(trials, contenders + 1, seeds))
    return float((verdicts(runs[:, 1:] - runs[:, :1], one_look(seeds))[0] != 0).any(1).mean())


def tables(trials: int) -> Iterator[str]:
    """The tables of the page, line by line."""

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
        yield from (f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))
        yield ""

    def percent(value: float) -> str:
        return f"{100 * value:.1f}%"

    counts = (3, 4, 6, 8, 16)
    plans = {str(n): one_look(n) for n in counts} | {"until resolved": planned_looks(16)}

    def by_noise(many: Sequence[int], cell: Callable[[str, int, str], str]) -> Iterator[str]:
        rows = []
        for noise in NOISE:
            rows.append([f"**{noise}**", *[""] * len(many)])
            rows += [[plan, *(cell(noise, contenders, plan) for contenders in many)] for plan in plans]
        yield from table(["seeds", *(f"{n} contender{'s' * (n > 1)}" for n in many)], rows)

    def power(noise: str, contenders: int, plan: str) -> str:
        part, seeds = found(noise, contenders, plans[plan], trials)
        return percent(part) + (f" ({seeds:.1f})" if plan == "until resolved" else "")

    yield f"**Something is resolved although all contenders are equal**, nominally in 5% ({trials:,} comparisons each):"
    yield ""
    yield from by_noise((1, 2, 3, 5, 10), lambda *case: percent(wrong(case[0], case[1], plans[case[2]], trials)))
    yield f"**A true difference of {EFFECT:g} standard deviations is resolved**, with its sign; in brackets mean seeds:"
    yield ""
    yield from by_noise((1, 3, 5, 10), power)
    ratios = (0.0, 0.25, 1.0, 4.0, 16.0)
    yield (
        f"**Equal contenders with noise of {ROWS} held-out rows**; the ratio is that of the variance that rows bring "
        "into a mean to the variance that the seeds (of the first look) do:"
    )
    yield ""
    cases = [(1, "4"), (4, "4"), (5, "6"), (10, "6"), (5, "until resolved")]
    rows = []
    for noise in NOISE:
        rows.append([f"**{noise}**", *[""] * len(cases)])
        for ratio in ratios:
            cells = [percent(wrong(noise, many, plans[plan], trials, ratio)) for many, plan in cases]
            rows.append([f"{ratio:g}", *cells])
    heads = ["1 contender, 4 seeds", "4, 4 seeds", "5, 6 seeds", "10, 6 seeds", "5, until resolved"]
    yield from table(["ratio", *heads], rows)
    yield (
        "**Why rows have a quantile of their own**, 4 contenders, 4 seeds, normal losses; the true difference is 4 "
        "standard errors of seeds and rows together:"
    )
    yield ""
    rows = []
    for ratio in ratios:
        effect = 4 * np.sqrt((1 + ratio) / 4)
        cells = []
        for shared in (True, False):
            signs, _, first = compared("normal", 4, plans["4"], trials, effect=effect, ratio=ratio, shared=shared)
            none = compared("normal", 4, plans["4"], trials, ratio=ratio, shared=shared)[0]
            cells += [percent(float(part)) for part in ((none != 0).any(1).mean(), (signs[:, first] == -1).mean())]
        rows.append([f"{ratio:g}", *cells])
    yield from table(["ratio", "the seeds' for both: equals", "resolved", "each its own: equals", "resolved"], rows)
    yield "**Seeds added after a look**, without a plan, equal contenders and normal losses:"
    yield ""
    rows = []
    for counts in ((6, 12), (6, 12, 24), (3, 4, 5, 6, 7, 8, 9, 10)):
        naive = tuple(Look(n, 1.0) for n in counts)
        cells = [percent(wrong("normal", 5, looks, trials)) for looks in (naive, added_looks(counts))]
        rows.append([", ".join(map(str, counts)), *cells])
    yield from table(["seeds at the looks", "as if each were the only one", "as it is done"], rows)
    yield (
        "**Learning rates chosen for each contender**, of three, the two beside the best one standard deviation worse; "
        "equal contenders, five of them:"
    )
    yield ""
    rows = []
    rules = {"each its best": True, "the baseline's unless clearly better": False}
    for rule, own in rules.items():
        for choosing in (2, 4, 6, 8):
            cells = [percent(chosen_rates(choosing, seeds, 5, trials, own=own)) for seeds in (3, 6, 16)]
            rows.append([rule, str(choosing), *cells])
    yield from table(["rate", "choosing seeds", "3 seeds", "6 seeds", "16 seeds"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--trials", type=int, default=20_000, help="simulated comparisons of each cell")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {PAGE.name}")
    given = parser.parse_args()
    text = "\n".join(tables(given.trials)).strip()
    if given.write_docs:
        replace_between(PAGE, *MARKS, text)
    else:
        print(text)


if __name__ == "__main__":
    main()
