"""Intervals, verdicts and how often they are wrong."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twoaxis.comparison.statistics import (
    BETTER,
    OPEN,
    WORSE,
    Difference,
    Sample,
    judge,
    mean_interval,
    seeds_needed,
    t_quantile,
)


def by_seed(values: list[float]) -> Sample:
    return Sample(dict(enumerate(values)))


def one(baseline: list[float], contender: list[float], others: int = 0, **options: bool | float) -> Difference:
    """The first of several contenders; the others only count for the correction."""
    names = {"it": by_seed(contender), **{f"other {i}": Sample({}) for i in range(others)}}
    return judge(by_seed(baseline), names, **options)["it"]  # type: ignore[arg-type]


def test_known_critical_values() -> None:
    assert t_quantile(0.95, 1) == pytest.approx(12.7062047, abs=1e-6)
    assert t_quantile(0.95, 2) == pytest.approx(4.3026527, abs=1e-6)
    assert t_quantile(0.99, 2) == pytest.approx(9.9248432, abs=1e-6)
    assert t_quantile(1 - 2.0**-40, 2) == pytest.approx(2**20, rel=1e-6)  # beyond t lies 1 / t^2 of the whole
    with pytest.raises(ValueError, match="between 0 and 1, got 1"):
        judge(Sample({}), {"a": Sample({})}, level=1.0)


def test_a_difference_is_the_paired_t_test() -> None:
    stats = pytest.importorskip("scipy.stats")
    baseline, contender = [4.231, 4.219, 4.240, 4.2], [4.208, 4.201, 4.219, 4.19]
    found = one(baseline, contender)
    theirs = stats.ttest_rel(contender, baseline)
    interval = theirs.confidence_interval(0.95)
    assert found.mean == pytest.approx(-0.018)
    assert found.p == pytest.approx(theirs.pvalue)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.verdict == BETTER
    assert found.resolved
    corrected = one(baseline, contender, others=4)
    interval = theirs.confidence_interval(0.99)
    assert (corrected.low, corrected.high) == pytest.approx((interval.low, interval.high))
    assert corrected.corrected_p == pytest.approx(5 * theirs.pvalue)
    assert one(baseline, contender, lower_is_better=False).verdict == WORSE
    assert one(contender, baseline).verdict == WORSE


@given(
    shift=st.floats(-2, 2),
    seeds=st.integers(2, 12),
    others=st.integers(0, 9),
    seed=st.integers(0, 2**31),
)
def test_interval_verdict_and_p_agree(shift: float, seeds: int, others: int, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(size=(2, seeds))
    found = one(noise[0].tolist(), (noise[1] + shift).tolist(), others)
    assert found.low is not None
    assert found.high is not None
    assert found.corrected_p is not None
    assert found.resolved == (not found.low <= 0 <= found.high) == (found.corrected_p < 0.05)


def test_one_seed_resolves_nothing() -> None:
    found = one([4.0], [1.0])
    assert (found.mean, found.low, found.high, found.p, found.verdict) == (-3.0, None, None, None, OPEN)
    assert "one seed: no interval" in found.note


def test_no_pair_at_all() -> None:
    found = judge(Sample({0: 4.0}), {"a": Sample({1: 3.0})})["a"]
    assert (found.mean, found.verdict, found.missing) == (None, OPEN, (0, 1))


def test_two_seeds_have_a_wide_interval() -> None:
    found = one([4.0, 4.0], [3.9, 3.8])
    assert found.low == pytest.approx(-0.15 - 12.7062047 * 0.05, abs=1e-6)
    assert found.verdict == OPEN


def test_missing_seeds_leave_pairs_only() -> None:
    found = judge(Sample({0: 4.0, 1: 4.1, 3: 4.3}), {"a": Sample({0: 3.9, 1: 4.01, 2: 2.0})}, seeds=(0, 1, 2, 3))["a"]
    assert found.seeds == (0, 1)
    assert found.mean == pytest.approx(-0.095)
    assert found.missing == (2, 3)
    assert "2 of 4 seeds not finished" in found.note


def test_diverged_runs_are_flagged_and_never_flatter() -> None:
    baseline = by_seed([4.0, 4.1, 4.2, 4.3])
    good = Sample({0: 3.0, 1: 3.11, 2: 3.2, 3: None})
    found = judge(baseline, {"a": good})["a"]
    assert found.high is not None
    assert found.high < 0
    assert (found.verdict, found.diverged) == (OPEN, (3,))
    assert "diverged at 1 of 4 seeds" in found.note
    assert "no fair sample" in found.note
    bad = Sample({0: 5.0, 1: 5.11, 2: 5.2, 3: None})
    assert judge(baseline, {"a": bad})["a"].verdict == WORSE  # diverging would not have helped
    assert judge(bad, {"a": baseline})["a"].verdict == BETTER
    fallen = judge(good, {"a": baseline})["a"]
    assert (fallen.verdict, fallen.diverged) == (OPEN, ())
    assert "the baseline diverged at 1 of 4 seeds" in fallen.note
    every = judge(baseline, {"a": Sample(dict.fromkeys(range(4)))})["a"]
    assert (every.mean, every.verdict, every.diverged) == (None, OPEN, (0, 1, 2, 3))


def test_no_variance() -> None:
    same = one([4.0, 4.1, 4.2], [4.0, 4.1, 4.2])
    assert (same.mean, same.low, same.high, same.p, same.verdict) == (0.0, 0.0, 0.0, 1.0, OPEN)
    assert "the same at every seed" in same.note
    apart = one([4.0, 4.0], [5.0, 5.0])
    assert (apart.p, apart.verdict) == (0.0, WORSE)


def test_rows_tell_how_far_another_held_out_sample_would_move_the_difference() -> None:
    generator = np.random.default_rng(0)
    rows = 4 + generator.normal(size=(2, 3, 50))  # contender and baseline, seeds, held-out rows
    rows[:, :, 7] = rows[1, :, 7]  # a row on which they agree
    samples = [Sample(dict(enumerate(its.mean(1))), dict(enumerate(its.tolist()))) for its in rows]
    found = judge(samples[1], {"it": samples[0]})["it"]
    apart = (rows[0] - rows[1]).mean(0)
    assert found.row_error == pytest.approx(apart.std(ddof=1) / math.sqrt(50))
    assert found.mean == pytest.approx(apart.mean())
    bare = judge(samples[1]._replace(rows={}), {"it": samples[0]})["it"]
    assert bare == found._replace(row_error=None)  # rows change no verdict
    gaps = samples[0]._replace(rows={seed: [None, *row[1:]] for seed, row in samples[0].rows.items()})
    assert judge(samples[1], {"it": gaps})["it"].row_error == pytest.approx(apart[1:].std(ddof=1) / math.sqrt(49))
    half = samples[0]._replace(rows={0: samples[0].rows[0]})
    assert judge(samples[1], {"it": half})["it"].row_error is None


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ValueError, match=r"need scipy: pip install 'twoaxis\[lab\]'"):
        one([4.0, 4.1], [4.0, 4.2])
    assert one([4.0], [4.0]).mean == 0  # one seed has no interval


def test_equal_rounded_values_are_no_certainty() -> None:
    # Accuracies of 64 answers: one more right at both seeds says little, 60 more say much.
    step = 1 / 64
    assert one([0.5, 0.5], [0.5 + step] * 2, lower_is_better=False, step=step).verdict == OPEN
    assert one([0.0, 0.0], [60 * step] * 2, lower_is_better=False, step=step).verdict == BETTER
    assert one([0.5, 0.5], [0.5 + step] * 2, lower_is_better=False).verdict == BETTER


def test_mean_interval() -> None:
    assert mean_interval([]) is None
    assert mean_interval([2.0]) == (2.0, -math.inf, math.inf)
    found = mean_interval([1.0, 3.0])
    assert found is not None
    assert found[0] == 2.0
    assert found[2] - 2.0 == pytest.approx(12.7062047, abs=1e-6)


def test_seeds_needed_is_the_first_count_that_resolves() -> None:
    found = one([0.0, 0.0, 0.0], [0.5, 1.0, 1.5], others=2)
    count = seeds_needed(found, 3)
    assert count is not None
    assert found.spread == pytest.approx(0.5)
    halves = [t_quantile(1 - 0.05 / 3, n - 1) * 0.5 / math.sqrt(n) for n in (count - 1, count)]
    assert halves[0] >= 1.0 > halves[1]
    assert seeds_needed(one([0.0, 0.0], [1e-9, -1.1e-9]), 1, most=20) is None


def false_positives(contenders: int, seeds: int, trials: int, *, share: float, seed: int) -> float:
    """Part of comparisons of equals in which anything is resolved; `share` of the noise belongs to the seed."""
    generator = np.random.default_rng(seed)
    common = generator.normal(size=(trials, 1, seeds)) * share
    noise = common + generator.normal(size=(trials, contenders + 1, seeds))
    wrong = 0
    for trial in noise:
        found = judge(by_seed(trial[0].tolist()), {str(i): by_seed(row.tolist()) for i, row in enumerate(trial[1:])})
        wrong += any(difference.resolved for difference in found.values())
    return wrong / trials


@pytest.mark.parametrize(("contenders", "seeds"), [(1, 3), (2, 3), (2, 10), (5, 3), (5, 5), (10, 3), (10, 10)])
def test_equals_are_told_apart_at_the_nominal_rate(contenders: int, seeds: int) -> None:
    # Each contender's noise and the shared baseline's are independent, so differences correlate by one half.
    trials = 1500
    rate = false_positives(contenders, seeds, trials, share=2.0, seed=100 * contenders + seeds)
    error = math.sqrt(0.05 * 0.95 / trials)
    assert rate <= 0.05 + 3 * error
    assert rate >= 0.02  # valid, and not by never saying anything


@pytest.mark.slow
def test_equals_are_told_apart_at_the_nominal_rate_everywhere() -> None:
    trials = 2000
    error = math.sqrt(0.05 * 0.95 / trials)
    for contenders in range(2, 11):
        for seeds in (3, 4, 5, 7, 10):
            rate = false_positives(contenders, seeds, trials, share=1.0, seed=1000 * contenders + seeds)
            assert 0.015 <= rate <= 0.05 + 3.5 * error, (contenders, seeds, rate)


@pytest.mark.parametrize(("sign", "verdict"), [(1.0, WORSE), (-1.0, BETTER)])
def test_a_planted_difference_is_resolved_with_its_sign(sign: float, verdict: str) -> None:
    generator = np.random.default_rng(5)
    right = wrong = 0
    for _ in range(200):
        common = generator.normal(size=5) * 10  # seeds differ by far more than contenders: pairing takes it away
        noise = generator.normal(size=(5, 5)) * 0.01
        contenders = {str(i): by_seed((common + noise[i]).tolist()) for i in range(1, 4)}
        contenders["planted"] = by_seed((common + noise[4] + sign * 0.1).tolist())
        found = judge(by_seed((common + noise[0]).tolist()), contenders)
        right += found["planted"].verdict == verdict
        wrong += found["planted"].resolved and found["planted"].verdict != verdict
    assert wrong == 0
    assert right >= 180


@pytest.mark.slow
def test_standard_against_itself_and_against_a_handicap(tmp_path: Path) -> None:
    """Real runs: the same model under other initial weights, and with a hundredth of the learning rate."""
    training = pytest.importorskip("twoaxis.training.train")
    from twoaxis.training.config import TrainConfig

    text = tmp_path / "text"
    text.mkdir()
    for name in range(40):
        words = [f"{name * i % 17} times {i} is {name * i % 17 * i}" for i in range(60)]
        (text / f"{name}.txt").write_text("\n".join(words))
    base = TrainConfig(
        data=(str(text),),
        tokenizer="bytes",
        context=32,
        batch=4,
        steps=40,
        lr=5e-3,
        held_out=0.2,
        eval_examples=16,
        threads=1,
        save_model=False,
        measure_memory=False,
        cache=str(tmp_path / "cache"),
        model={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    )
    seeds = range(4)

    def losses(shift: int, lr: float) -> Sample:
        found: dict[int, float | None] = {}
        for seed in seeds:
            config = dataclasses.replace(base, seed=seed, init_seed=seed + shift, lr=lr)
            found[seed] = training.train(config, tmp_path / f"{shift}-{lr}-{seed}").loss
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
