"""Intervals, verdicts, looks and power, and how often they are wrong."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.verdicts import NOISE, chosen_rates, compared, found, one_look, verdicts, wrong
from tests.comparison.comparing import make_options
from twoaxis.comparison.statistics import (
    BETTER,
    EQUIVALENT,
    OPEN,
    WORSE,
    Errors,
    Look,
    Sample,
    added_looks,
    half_width,
    judge,
    planned_looks,
    seeds_for,
    t_quantile,
)
from twoaxis.training.config import TrainConfig
from twoaxis.training.train import train

Losses = Sequence[float | None]
"""By seed; None where a run diverged."""


def by_seed(values: Losses) -> Sample:
    return Sample(dict(enumerate(values)))


def one(baseline: Losses, contender: Losses, others: int = 0, **options: Any) -> Any:
    """The first of several contenders; the others only count for the correction."""
    names = {"it": by_seed(contender), **{f"other {i}": Sample({}) for i in range(others)}}
    return judge(by_seed(baseline), names, **options)["it"]


def with_rows(values: np.ndarray, rows: np.ndarray) -> Sample:
    """A sample in which every held-out row adds the same to the value of each seed."""
    return Sample(
        dict(enumerate((values + rows.mean()).tolist())), {i: (v + rows).tolist() for i, v in enumerate(values)}
    )


def tables(apart: np.ndarray, looks: tuple[Look, ...] = (), rows: np.ndarray | None = None) -> dict[str, Any]:
    """Contenders whose differences to a baseline of zeros are given (contenders, seeds), and what rows add to them."""
    rows = np.zeros((len(apart), 1)) if rows is None else rows
    zeros = with_rows(np.zeros(apart.shape[1]), 0 * rows[0])
    samples = {str(i): with_rows(values, its) for i, (values, its) in enumerate(zip(apart, rows, strict=True))}
    return judge(zeros, samples, looks=looks)


def test_known_critical_values() -> None:
    assert t_quantile(0.95, 1) == pytest.approx(12.7062047, abs=1e-6)
    assert t_quantile(0.99, 2) == pytest.approx(9.9248432, abs=1e-6)
    assert t_quantile(1 - 2.0**-40, 2) == pytest.approx(2**20, rel=1e-6)  # beyond t lies 1 / t^2 of the whole
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        judge(Sample({}), {"a": Sample({})}, level=1.0)


def test_one_or_two_contenders_are_the_paired_t_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    baseline, contender = [4.231, 4.219, 4.240, 4.2], [4.208, 4.201, 4.219, 4.19]
    found = one(baseline, contender)
    theirs = stats.ttest_rel(contender, baseline)
    interval = theirs.confidence_interval(0.95)
    assert (found.mean, found.p) == pytest.approx((-0.018, theirs.pvalue))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert (found.verdict, found.resolved, found.freedom) == (BETTER, True, 3)
    corrected = one(baseline, contender, others=4)  # which have no spread to moderate by
    interval = theirs.confidence_interval(0.99)
    assert (corrected.low, corrected.high) == pytest.approx((interval.low, interval.high))
    assert corrected.corrected_p == pytest.approx(5 * theirs.pvalue)
    assert one(baseline, contender, lower_is_better=False).verdict == WORSE
    assert one(contender, baseline).verdict == WORSE
    each = judge({"a": by_seed(baseline), "b": by_seed(contender)}, {"a": by_seed(contender), "b": by_seed(contender)})
    assert (each["a"].mean, each["b"].mean) == pytest.approx((-0.018, 0.0))


def test_of_three_contenders_variances_are_moderated() -> None:
    special = pytest.importorskip("scipy.special")
    apart = np.array([[0.02, 0.0201, 0.0199], [0.0, 0.2, -0.1], [0.05, 0.15, -0.2]])
    found = tables(apart)
    variances = apart.var(1, ddof=1)
    usual = np.exp(np.log(variances).mean() + np.log(1) - special.psi(1))  # two degrees of freedom
    expected = np.maximum(variances, (variances + usual) / 2)
    assert [each.error for each in found.values()] == pytest.approx(list(np.sqrt(expected / 3)))
    assert [each.freedom for each in found.values()] == [4, 4, 4]
    calm = found["0"]
    half = t_quantile(1 - 0.05 / 3, 4) * math.sqrt((variances[0] + usual) / 2 / 3)
    assert (calm.low, calm.high) == pytest.approx((0.02 - half, 0.02 + half))
    assert (calm.verdict, one([0.0] * 3, apart[0].tolist()).verdict) == (OPEN, WORSE)  # calm by chance, or truly


@given(
    shift=st.floats(-2, 2),
    seeds=st.integers(2, 16),
    contenders=st.integers(1, 6),
    until=st.booleans(),
    spread=st.sampled_from([0.0, 1e-9, 0.3, 3.0]),
    seed=st.integers(0, 2**31),
)
def test_interval_verdict_and_p_agree(
    shift: float, seeds: int, contenders: int, until: bool, spread: float, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    noise, rows = generator.normal(size=(contenders, seeds)) + shift, spread * generator.normal(size=(contenders, 9))
    for each in tables(noise, planned_looks(seeds) if until else (), rows).values():
        assert each.resolved == (not each.low <= 0 <= each.high) == (each.corrected_p < 0.05)


@pytest.mark.parametrize("looks", [one_look(6), planned_looks(16), added_looks((3, 6, 12))])
@pytest.mark.parametrize(("contenders", "spread"), [(2, 0.0), (5, 0.0), (5, 2.0)])
def test_what_is_simulated_is_what_is_done(looks: tuple[Look, ...], contenders: int, spread: float) -> None:
    generator, most = np.random.default_rng(contenders), looks[-1].seeds
    apart = generator.normal(size=(40, contenders, most)) + generator.choice([0, 1, 2], (40, contenders, 1))
    rows = spread * generator.normal(size=(40, contenders, 12))
    signs, used = verdicts(apart, looks, rows=rows)
    for table, its, sign, count in zip(apart, rows, signs, used, strict=True):
        # A contender that is resolved gets no more seeds, as a comparison does it.
        samples = {str(i): with_rows(table[i][: count[i]], its[i]) for i in range(contenders)}
        made = judge(with_rows(np.zeros(most), np.zeros(12)), samples, seeds=tuple(range(most)), looks=looks)
        words = {BETTER: -1, OPEN: 0, WORSE: 1}
        assert [words[each.verdict] for each in made.values()] == sign.tolist()
        assert [each.wanted for each in made.values()] == count.tolist()


FOUR, GOOD, BAD = [4.0, 4.1, 4.2, 4.3], [3.0, 3.11, 3.2, None], [5.0, 5.11, 5.2, None]
NEAR, HALF = [0.001, -0.001, 0.002, -0.002], [0.5, 0.5]
UP = {"lower_is_better": False}
STEP = UP | {"step": 1 / 64}
CASES: dict[str, tuple[Losses, Losses, dict[str, Any], str, dict[str, Any]]] = {
    "no pair": ([4.0], [], {}, OPEN, {"mean": None, "missing": (0,), "note": "1 of 1 seeds not finished"}),
    "one pair": ([4.0], [1.0], {}, OPEN, {"mean": -3.0, "low": None, "high": None, "p": None, "note": "one seed: no"}),
    "two pairs": ([4.0] * 2, [3.9, 3.8], {}, OPEN, {"low": -0.15 - 12.7062047 * 0.05}),
    "diverged, the rest better": (FOUR, GOOD, {}, OPEN, {"diverged": (3,), "note": "diverged at 1 of 4 seeds"}),
    "which flatters it": (FOUR, GOOD, {}, OPEN, {"note": "no fair sample"}),
    "diverging would not have helped": (FOUR, BAD, {}, WORSE, {"diverged": (3,)}),
    "a worse baseline diverged": (BAD, FOUR, {}, BETTER, {"diverged": ()}),
    "a better baseline diverged": (GOOD, FOUR, {}, OPEN, {"note": "the baseline diverged at 1 of 4 seeds"}),
    "every run diverged": (FOUR, [None] * 4, {}, OPEN, {"mean": None, "diverged": (0, 1, 2, 3)}),
    "the same": (FOUR, FOUR, {}, OPEN, {"low": 0.0, "high": 0.0, "p": 1.0, "note": "the same at every seed"}),
    "without variance": ([4.0] * 2, [5.0] * 2, {}, WORSE, {"p": 0.0}),
    "inside a margin": ([0.0] * 4, NEAR, {"margin": 0.01}, EQUIVALENT, {}),
    "outside a margin": ([0.0] * 4, NEAR, {"margin": 0.001}, OPEN, {}),
    "small, and there": ([0.0] * 4, [each + 0.005 for each in NEAR], {"margin": 0.05}, WORSE, {}),
    "inside, one diverged": ([0.0] * 5, [*NEAR, None], {"margin": 0.01}, OPEN, {}),
    # Accuracies of 64 answers: one more right at both seeds says little, 60 more say much.
    "one answer more": (HALF, [0.5 + 1 / 64] * 2, STEP, OPEN, {}),
    "sixty answers more": ([0.0] * 2, [60 / 64] * 2, STEP, BETTER, {}),
    "as much without steps": (HALF, [0.5 + 1 / 64] * 2, UP, BETTER, {}),
}
"""Losses of baseline and contender by seed, options, the verdict, and what else is found."""


@pytest.mark.parametrize("name", CASES)
def test_verdicts_of_few_diverged_equal_and_rounded_runs(name: str) -> None:
    baseline, contender, options, verdict, expected = CASES[name]
    found = one(baseline, contender, **options)
    assert found.verdict == verdict
    for field, value in expected.items():
        known = getattr(found, field)
        assert value in known if field == "note" else known == value or known == pytest.approx(value, abs=1e-6)


def test_pairs_are_made_of_the_seeds_that_both_have() -> None:
    samples = Sample({0: 4.0, 1: 4.1, 3: 4.3}), {"a": Sample({0: 3.9, 1: 4.01, 2: 2.0})}
    found = judge(*samples, seeds=(0, 1, 2, 3))["a"]
    assert (found.seeds, found.missing, found.note) == ((0, 1), (2, 3), "2 of 4 seeds not finished")
    assert found.mean == pytest.approx(-0.095)


def test_the_error_over_held_out_rows_is_in_the_interval() -> None:
    generator = np.random.default_rng(0)
    rows = 4 + generator.normal(size=(2, 3, 50))  # contender and baseline, seeds, held-out rows
    rows[:, :, 7] = rows[1, :, 7]  # a row on which they agree
    samples = [Sample(dict(enumerate(its.mean(1))), dict(enumerate(its.tolist()))) for its in rows]
    found: Any = judge(samples[1], {"it": samples[0]})["it"]
    apart = (rows[0] - rows[1]).mean(0)
    assert found.row_error == pytest.approx(apart.std(ddof=1) / math.sqrt(50))
    assert found.mean == pytest.approx(apart.mean())
    bare: Any = judge(samples[1]._replace(rows={}), {"it": samples[0]})["it"]
    assert bare.row_error is None
    assert found.error == pytest.approx(math.hypot(bare.error, found.row_error))
    # Seeds have two degrees of freedom, rows 49.
    half = math.hypot(t_quantile(0.95, 2) * bare.error, t_quantile(0.95, 49) * found.row_error)
    assert (found.high - found.mean, found.rows) == (pytest.approx(half), 50)
    touching: Any = judge(samples[1], {"it": samples[0]}, level=1 - found.p)["it"]
    assert min(abs(touching.low), abs(touching.high)) == pytest.approx(0, abs=1e-12)
    gaps = samples[0]._replace(rows={seed: [None, *row[1:]] for seed, row in samples[0].rows.items()})
    assert judge(samples[1], {"it": gaps})["it"].row_error == pytest.approx(apart[1:].std(ddof=1) / math.sqrt(49))
    half = samples[0]._replace(rows={0: samples[0].rows[0]})
    assert judge(samples[1], {"it": half})["it"].row_error is None


def test_planned_looks_share_alpha_and_added_ones_spend_more() -> None:
    for most in (16, 12):
        assert planned_looks(most) == (Look(4, 0.5), Look(8, 0.25), Look(most, 0.25))
    assert planned_looks(3) == one_look(3)
    assert added_looks((6, 12, 24)) == (Look(6, 1.0), Look(12, 0.5), Look(24, 0.25))
    naive = tuple(Look(n, 1.0) for n in range(4, 17))
    assert wrong("normal", 2, naive, 2000) > 0.1  # what looks are for


def test_a_look_counts_when_all_it_is_about_have_ended() -> None:
    looks, seeds = planned_looks(16), tuple(range(16))
    clear, noisy = [1.0, 1.1, 0.9, 1.0], [0.5, -0.5, 0.4, -0.4]
    base = by_seed([0.0] * 16)

    def at(more: list[float]) -> tuple[Any, Any]:
        found = judge(base, {"a": by_seed(clear), "b": by_seed(noisy + more)}, seeds=seeds, looks=looks)
        return found["a"], found["b"]

    first, second = at([])
    assert (first.verdict, first.wanted, second.verdict, second.wanted) == (WORSE, 4, OPEN, 8)
    assert second.high == pytest.approx(t_quantile(1 - 0.05 / 2 / 2, 3) * second.error)
    begun = at([9.0, 9.0, 9.0])[1]  # three of the four more: nothing is looked at
    assert (begun.seeds, begun.wanted, begun.high) == ((0, 1, 2, 3), 8, second.high)
    ahead = judge(base, {"b": by_seed(noisy * 2), "c": by_seed(noisy)}, seeds=seeds, looks=looks)
    assert (ahead["b"].seeds, ahead["b"].wanted, ahead["c"].wanted) == ((0, 1, 2, 3), 8, 8)  # c has yet to catch up
    ended = at([0.5, -0.5, 0.4, -0.4])[1]
    assert (ended.seeds, ended.wanted) == (tuple(range(8)), 16)
    assert ended.high == pytest.approx(t_quantile(1 - 0.05 / 4 / 2, 7) * ended.error)
    late = at([3.0, 3.1, 3.0, 3.1, 2.9, 3.0, 3.1, 3.0, 3.0, 3.1, 3.0, 3.1])[1]
    assert (late.verdict, late.wanted, late.missing) == (WORSE, 16, ())


def test_looks_that_contradict_each_other_resolve_nothing() -> None:
    generator = np.random.default_rng(0)
    apart = np.concatenate([1 + 0.01 * generator.normal(size=(1, 4)), -9 + 0.01 * generator.normal(size=(1, 60))], 1)
    (it,) = tables(apart, (Look(4, 0.5), Look(64, 0.5))).values()
    assert it.verdict == OPEN
    assert "the looks contradict each other" in it.note


@given(freedom=st.integers(1, 40), alpha=st.floats(1e-3, 0.2), effect=st.floats(0.1, 5))
def test_power_of_seeds_alone_is_that_of_students_test(freedom: int, alpha: float, effect: float) -> None:
    quantile, errors = t_quantile(1 - alpha, freedom), Errors(0.3, freedom)
    exact = 1 - pytest.importorskip("scipy.special").nctdtr(freedom, effect, quantile)
    assert errors.power(alpha, 0.3 * effect) == pytest.approx(exact, abs=2e-3)
    assert errors.power(alpha, errors.detectable(alpha)) == pytest.approx(0.8, abs=1e-4)


def test_power_is_the_share_that_is_resolved() -> None:
    generator, alpha, trials = np.random.default_rng(0), 0.05 / 4, 40_000
    for errors in (Errors(0.01, 6, 0.02, 23), Errors(0.01, 3, 0.01, 63)):
        mean = errors.detectable(alpha) + errors.total * generator.normal(size=trials)
        seeds, rows = (
            error * np.sqrt(generator.chisquare(freedom, trials) / freedom)
            for error, freedom in (errors[:2], errors[2:])
        )
        assert (mean > half_width(alpha, seeds, errors[1], rows, errors[3])).mean() == pytest.approx(0.8, abs=0.01)


@given(effect=st.floats(0.3, 3), spread=st.floats(0.1, 2), contenders=st.integers(1, 6), rows=st.floats(0, 0.05))
def test_the_seeds_that_are_named_are_the_fewest(effect: float, spread: float, contenders: int, rows: float) -> None:
    values = spread * np.array([1.0, -1.0, 1.0, -1.0, 0.0])  # of the variance spread²
    found: Any = judge(
        with_rows(np.zeros(5), np.zeros(50)),
        {str(i): with_rows(values, rows * np.array([7.0, -7.0] * 25)) for i in range(min(2, contenders))},
    )["0"]
    count: Any = seeds_for(found, effect, contenders, most=400)
    tried = {n: Errors(spread / math.sqrt(n), n - 1, found.row_error, 49) for n in (count - 1, count) if n > 1}
    powers = [errors.power(0.05 / contenders, effect) for errors in tried.values()]
    assert powers[-1] >= 0.8
    assert all(each < 0.8 for each in powers[:-1])


def test_seeds_do_not_make_up_for_too_few_rows() -> None:
    found = one([0.0] * 3, [0.1, 0.0, -0.1])
    assert seeds_for(found, 0.1, 1) is not None
    assert seeds_for(found._replace(row_error=0.1, rows=50, error=math.hypot(found.error, 0.1)), 0.1, 1) is None


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ValueError, match=r"needs the package scipy.*pip install -e \"\.\[lab\]\""):
        one([4.0, 4.1], [4.0, 4.2])
    assert one([4.0], [4.0]).mean == 0  # one seed has no interval


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("contenders", [1, 3, 10])
def test_equals_are_told_apart_at_the_nominal_rate(noise: str, contenders: int) -> None:
    trials = 2000
    error = math.sqrt(0.05 * 0.95 / trials)
    rates = [wrong(noise, contenders, looks, trials) for looks in (*map(one_look, (3, 6, 16)), planned_looks(16))]
    assert max(rates) <= 0.05 + (0.015 if noise == "plateau" else 0) + 3 * error, rates
    assert rates[2] >= 0.01  # valid, and not by never saying anything
    rates = [wrong(noise, contenders, one_look(4), trials, ratio=ratio) for ratio in (0.25, 1.0, 4.0, 16.0)]
    assert max(rates) <= 0.05 + (0.015 if noise == "plateau" else 0) + 3 * error, rates


def test_a_planted_difference_is_resolved_with_its_sign() -> None:
    trials = 3000
    for seeds, least in ((3, 0.25), (6, 0.87), (8, 0.97)):  # two standard deviations, five contenders
        assert found("normal", 5, one_look(seeds), trials)[0] >= least
        sign, _, planted = compared("normal", 5, one_look(seeds), trials, effect=2.0)
        assert (sign[:, planted] == 1).mean() < 0.001
    power, seeds = found("normal", 5, planned_looks(16), trials)
    assert power > 0.99
    assert seeds < 7.5


def test_noise_of_rows_costs_little_power() -> None:
    for ratio in (0.0, 1.0, 16.0):  # four standard errors of seeds and rows together, four contenders, four seeds
        assert found("normal", 4, one_look(4), 4000, effect=2 * math.sqrt(1 + ratio), ratio=ratio)[0] > 0.55


def test_choosing_rates_costs_little_honesty() -> None:
    own, shared = (chosen_rates(6, 6, 5, 4000, own=own) for own in (True, False))
    assert shared < 0.075 < own


@pytest.mark.slow
def test_standard_against_itself_and_against_a_handicap(tmp_path: Path) -> None:
    """Real runs: the same model under other initial weights, and with a hundredth of the learning rate."""
    text = tmp_path / "text"
    text.mkdir()
    for name in range(40):
        words = [f"{name * i % 17} times {i} is {name * i % 17 * i}" for i in range(60)]
        (text / f"{name}.txt").write_text("\n".join(words))
    options = make_options(tmp_path, data=(str(text),), context=32, batch=4, steps=40, lr=5e-3, held_out=0.2, threads=1)
    options |= {"eval_examples": 16, "final_examples": TrainConfig.final_examples}
    base = TrainConfig(**options)
    seeds = range(4)

    def losses(shift: int, lr: float) -> Sample:
        found: dict[int, float | None] = {}
        for seed in seeds:
            config = dataclasses.replace(base, seed=seed, init_seed=seed + shift, lr=lr)
            found[seed] = train(config, tmp_path / f"{shift}-{lr}-{seed}").loss
        return Sample(found)

    groups = {shift: losses(shift, base.lr) for shift in (0, 100, 200, 300, 400, 500)}
    handicap = losses(0, base.lr / 100)
    # Every group against every other as its single contender: 15 comparisons of equals, each wrong with 5%. They share
    # runs, so the bound on their number is generous: 5 or more of 15 have a probability below 1 in 1000 if independent.
    resolved = [judge(groups[a], {"it": groups[b]})["it"].resolved for a in groups for b in groups if a < b]
    assert len(resolved) == 15
    assert sum(resolved) <= 4
    together = judge(groups[0], {str(shift): groups[shift] for shift in groups if shift} | {"handicap": handicap})
    assert together["handicap"].verdict == WORSE
    assert sum(difference.resolved for name, difference in together.items() if name != "handicap") <= 1
