"""Planted laws come back; speed-ups keep the identities of their formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.comparison.scaling import (
    Law,
    NoLaw,
    Point,
    Scaling,
    find_law,
    fit_law,
    known_law,
    speed_up,
    speed_up_interval,
)

SIZES = (1e15, 4e15, 2e16, 1e17)


def loss_of(law: Law, compute: float) -> float:
    return law.l_inf + (law.scale or math.nan) * compute**-law.alpha


def losses(l_inf: float, alpha: float, rise: float, sizes: tuple[float, ...] = SIZES) -> tuple[float, ...]:
    """Of a law that lies `rise` above L_inf at the first size."""
    return tuple(l_inf + rise * (c / sizes[0]) ** -alpha for c in sizes)


@given(l_inf=st.floats(0.1, 4), alpha=st.floats(0.03, 1.0), rise=st.floats(0.5, 4))
def test_a_planted_law_comes_back(l_inf: float, alpha: float, rise: float) -> None:
    for sizes in (SIZES, SIZES[:3]):
        law = fit_law(sizes, losses(l_inf, alpha, rise, sizes))
        assert law.alpha == pytest.approx(alpha, rel=1e-4)
        assert law.l_inf == pytest.approx(l_inf, abs=1e-3)
        assert loss_of(law, 3e16) == pytest.approx(l_inf + rise * (3e16 / SIZES[0]) ** -alpha, abs=1e-5)
        assert law.error < 1e-7  # type: ignore[operator]


TWO = losses(2.0, 0.2, 1.0, SIZES[:2])


@pytest.mark.parametrize(
    ("sizes", "values", "l_inf", "message"),
    [
        (SIZES[:2], TWO, None, "three unknowns and there are 2 sizes; give three --sizes, or --l-inf"),
        (SIZES[:2], TWO, 3.0, r"--l-inf 3 must lie below every loss; the lowest is 2\.7"),
        (SIZES[:1], (3.0,), 2.0, "two unknowns and there are 1 sizes"),
        (SIZES, (3.0, 2.9, 2.8), None, "compute has 4 sizes and losses 3"),
        (SIZES, (3.0, 3.1, 3.2, 3.3), None, "do not follow a falling law"),
        (SIZES[:3], (4.0, 3.9, 2.0), None, "off any falling law"),  # falls faster and faster
        (SIZES, (3.0, 2.0, math.nan, 1.0), None, "losses finite"),
    ],
)
def test_points_that_determine_no_law_are_refused(sizes: Any, values: Any, l_inf: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_law(sizes, values, l_inf)


def test_a_law_without_a_floor_says_so() -> None:
    law = fit_law(SIZES, losses(0.0, 0.1, 5.0))
    assert law.l_inf == pytest.approx(0.0, abs=1e-6)
    assert law.alpha == pytest.approx(0.1, rel=1e-4)
    steep = tuple(5.0 - 0.5 * i for i in range(4))  # bends the other way: the floor would be below zero
    found = fit_law(tuple(10.0**i for i in range(15, 19)), steep)
    assert found.l_inf == 0
    assert "lower end" in found.note
    law = fit_law(SIZES[:2], TWO, l_inf=2.0)
    assert (law.l_inf, law.alpha) == pytest.approx((2.0, 0.2))


def test_a_known_law() -> None:
    law = known_law(1.6, 0.05)
    assert (law.l_inf, law.alpha, law.scale) == (1.6, 0.05, None)
    with pytest.raises(ValueError, match="--l-inf must not be negative, got -1"):
        known_law(-1, 0.1)
    with pytest.raises(ValueError, match="--alpha must be positive, got 0"):
        known_law(1, 0)


@given(
    alpha=st.floats(0.03, 0.5),
    compute=st.floats(1e12, 1e20),
    rate=st.floats(10, 1e6),
    gain=st.floats(0.001, 0.3),
    slower=st.floats(0.3, 1.5),
)
def test_identities_of_the_speed_up(alpha: float, compute: float, rate: float, gain: float, slower: float) -> None:
    law, base = known_law(1.6, alpha), Point(3.0, 1e6, rate)
    assert speed_up(law, base, base) == 1
    # The same loss at another speed is worth the ratio of the speeds; twice the tokens for it, half as much.
    assert speed_up(law, base, Point(3.0, 1e6, rate * slower)) == pytest.approx(slower, rel=1e-9)
    assert speed_up(law, base, Point(3.0, 2e6, rate)) == pytest.approx(0.5, rel=1e-9)
    # A loss on the law is worth the compute the law needs for it.
    better = Point(3.0 - gain, 1e6, rate * slower)
    expected = (1.4 / (1.4 - gain)) ** (1 / alpha) * slower
    assert speed_up(law, base, better) == pytest.approx(expected, rel=1e-9)
    # The formula, written out.
    scale = (base.loss - law.l_inf) * compute**alpha
    needed = (scale / (better.loss - law.l_inf)) ** (1 / alpha)
    assert expected == pytest.approx((needed / rate) / (compute / (rate * slower)), rel=1e-6)


def test_losses_at_the_floor() -> None:
    law = known_law(1.6, 0.1)
    with pytest.raises(NoLaw, match="no throughput"):
        speed_up(law, Point(3.0, 1, 0), Point(2.0, 1, 1))
    assert speed_up(law, Point(3.0, 1, 1), Point(1.6, 1, 1)) == math.inf
    with pytest.raises(NoLaw, match=r"1\.5000 is not above L_inf 1\.6"):
        speed_up(law, Point(1.5, 1, 1), Point(1.4, 1, 1))
    found = speed_up_interval(Scaling(law=law, note=""), {0: Point(3.0, 1, 1)}, {0: Point(1.0, 1, 1)})
    assert (found.value, found.low) == (math.inf, None)


def points(values: dict[int, float], rate: float = 100.0) -> dict[int, Point]:
    return {seed: Point(loss, 1e6, rate) for seed, loss in values.items()}


def test_equal_runs_have_a_speed_up_of_one_without_doubt() -> None:
    law = Scaling(law=known_law(1.6, 0.1), note="")
    same = points({0: 3.0, 1: 3.2, 2: 3.1})
    found = speed_up_interval(law, same, same)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    alone = speed_up_interval(law, points({0: 3.0}), points({0: 2.9}))
    assert (alone.low, alone.note) == (None, "one seed: no interval")


def planted(generator: np.random.Generator, seeds: int, noise: float) -> tuple[dict[str, dict[int, float]], Law]:
    """The baseline at four sizes, with noise of its own in every run."""
    law = fit_law(SIZES, losses(2.0, 0.3, 2.0))
    return {str(c): {seed: loss_of(law, c) + noise * generator.normal() for seed in range(seeds)} for c in SIZES}, law


@pytest.mark.parametrize("seeds", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_intervals_hold_as_often_as_they_say(seeds: int) -> None:
    generator = np.random.default_rng(seeds)
    trials, hits, exponents = 40, 0, 0
    compute = {str(c): c for c in SIZES}
    for _ in range(trials):
        base, law = planted(generator, seeds, 0.004)
        size = str(SIZES[1])
        truth = speed_up(law, Point(loss_of(law, SIZES[1]), 1e6, 100), Point(loss_of(law, SIZES[1]) - 0.05, 1e6, 90))
        mine = {seed: loss_of(law, SIZES[1]) - 0.05 + 0.004 * generator.normal() for seed in range(seeds)}
        scaling: Any = find_law(compute, base)
        found: Any = speed_up_interval(scaling, points(base[size]), points(mine, 90.0))
        hits += found.low <= truth <= found.high
        exponents += scaling.exponent.low <= 0.3 <= scaling.exponent.high
    # 95% of 40 is 38; fewer than 33 would come up in one of a thousand trials.
    assert hits >= 33
    assert exponents >= 33


def test_a_law_that_seeds_do_not_support_has_no_interval() -> None:
    generator = np.random.default_rng(0)
    compute = {str(c): c for c in SIZES}
    base = {str(c): {seed: 3.0 - 0.02 * i + 0.5 * generator.normal() for seed in range(3)} for i, c in enumerate(SIZES)}
    scaling = find_law(compute, base)
    assert (scaling.law, scaling.exponent) == (None, None)
    assert scaling.note.startswith("needs --sizes: ")
    mine = {seed: loss - 0.05 for seed, loss in base[str(SIZES[0])].items()}
    with pytest.raises(NoLaw, match="needs --sizes: "):
        speed_up_interval(scaling, points(base[str(SIZES[0])]), points(mine))
    told = dataclasses.replace(scaling, law=known_law(1.0, 0.1))  # a law, and seeds that do not support one
    found = speed_up_interval(told, points(base[str(SIZES[0])]), points(mine))
    assert found.low is None
    assert "draws of the seeds gave no law" in found.note
