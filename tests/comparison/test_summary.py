"""Comparison folders with planted differences, costs, gaps and laws: the numbers come back."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest

from tests.comparison.fake_comparison import ALPHA, FAKES, L_INF, STANDARD, TOKENS, Fake, law, make_fake
from twoaxis.base.files import read_json
from twoaxis.comparison.curves import difference_band, loss_band
from twoaxis.comparison.document import to_document
from twoaxis.comparison.reading import Curve, load_folder
from twoaxis.comparison.statistics import BETTER, OPEN, WORSE
from twoaxis.comparison.summary import Entry, Summary, summarise


def named(summary: Summary, part: str, table: int = 0) -> Entry:
    return next(entry for entry in summary.tables[table].entries if part in entry.label)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("plain"))


def test_a_curve_between_its_evaluations() -> None:
    curve = Curve((100.0, 200.0, 400.0), (5.0, 4.0, 3.0))
    assert curve.at(100) == 5.0
    assert curve.at(400) == 3.0
    assert curve.at(math.sqrt(100 * 200)) == pytest.approx(4.5)
    assert curve.at(math.sqrt(200 * 400)) == pytest.approx(3.5)
    assert curve.at(99) is None
    assert curve.at(401) is None
    assert Curve((), ()).at(1) is None
    assert Curve((7.0,), (2.0,)).at(7) == 2.0


def test_the_table(plain: Path) -> None:
    summary = summarise(plain)
    (table,) = summary.tables
    assert (table.data, table.size, table.chance, summary.match) == ("stdlib", "nano", None, "tokens")
    assert [entry.baseline for entry in table.entries] == [True, False, False, False, False, False]
    assert named(summary, "attention_residuals").verdict == BETTER
    assert named(summary, "hyper_connections").verdict == OPEN
    assert named(summary, "write only").verdict == WORSE
    base, mine = table.baseline, named(summary, "attention_residuals")
    assert mine.difference is not None
    assert mine.difference.mean == pytest.approx(-0.06, abs=0.01)
    expected = sum(mine.losses[seed] - base.losses[seed] for seed in range(4)) / 4
    assert mine.difference.mean == pytest.approx(expected, abs=1e-12)
    assert mine.parameters / base.parameters == pytest.approx(1.001)
    assert mine.flops_per_token / base.flops_per_token == pytest.approx(1.02)
    assert mine.tokens == base.tokens
    assert mine.tokens_per_second is not None
    assert base.tokens_per_second is not None
    assert mine.tokens_per_second / base.tokens_per_second == pytest.approx(0.91, abs=0.04)
    assert mine.peak_memory == round(300e6 * 1.12)
    assert mine.loss is not None
    assert mine.bits_per_byte == pytest.approx(mine.loss / math.log(2) / 3.1)
    assert summary.shared_rate
    assert summary.inits == ("paper",)


def test_gaps_are_counted_and_named(plain: Path) -> None:
    summary = summarise(plain)
    diverged, missing = named(summary, "write only"), named(summary, "muddformer")
    assert (diverged.finished, diverged.diverged, diverged.missing) == ((0, 1, 3), (2,), ())
    assert (missing.finished, missing.diverged, missing.missing) == ((0, 1, 2), (), (3,))
    assert diverged.difference is not None
    assert diverged.difference.note == "diverged at 1 of 4 seeds"
    assert missing.difference is not None
    assert missing.difference.note == "1 of 4 seeds not finished"
    assert summary.missing == 1
    assert all(len(entry.difference.seeds) == len(entry.finished) for entry in summary.tables[0].contenders)  # type: ignore[union-attr]


def test_runs_are_paired_by_their_seed_across_a_gap(tmp_path: Path) -> None:
    make_fake(tmp_path, (STANDARD, Fake("muddformer", noise=0.02, missing=(1,))))
    summary = summarise(tmp_path)
    base, mine = summary.tables[0].baseline, named(summary, "muddformer")
    assert mine.difference is not None
    assert mine.difference.seeds == (0, 2, 3)
    pairs = [mine.losses[seed] - base.losses[seed] for seed in (0, 2, 3)]
    assert mine.difference.mean == pytest.approx(sum(pairs) / 3)


def test_equal_budgets_read_the_longer_curve_where_the_shorter_ends(plain: Path) -> None:
    summary = summarise(plain)
    base, mine = summary.tables[0].baseline, named(summary, "attention_residuals")
    tokens, flops, time = (mine.equal[axis] for axis in ("tokens", "flops", "time"))
    assert not tokens.indicative
    assert tokens.difference == mine.difference
    # 2% more operations per token: the baseline ends first, and the contender is read at 1 / 1.02 of its run.
    assert flops.part == pytest.approx(1 / 1.02)
    assert flops.indicative
    assert flops.budget == pytest.approx(base.tokens * base.flops_per_token)
    by_hand = [mine.curves[seed].at(mine.tokens / 1.02) for seed in range(4)]
    assert flops.loss == pytest.approx(sum(loss for loss in by_hand if loss is not None) / 4)
    assert flops.difference.mean == pytest.approx((flops.loss or 0) - (base.loss or 0))
    assert time.part == pytest.approx((mine.tokens_per_second or 0) / (base.tokens_per_second or 1))
    assert (time.difference.mean or 0) > (flops.difference.mean or 0) > (tokens.difference.mean or 0)


def test_reading_a_schedule_early_resolves_nothing_by_itself(plain: Path, tmp_path: Path) -> None:
    # Slower contenders are read early at equal time: worse may be the schedule's doing, better is in spite of it.
    found = named(summarise(plain), "muddformer").equal["time"]
    assert found.early == "contender"
    assert found.difference.low is not None
    assert found.difference.low > 0
    assert found.difference.verdict == OPEN
    assert "one schedule had not ended" in found.difference.note
    kept = named(summarise(plain), "attention_residuals").equal["time"]
    assert (kept.early, kept.difference.verdict) == ("contender", BETTER)
    # Faster ones read the baseline early, which makes them look better.
    quick = (STANDARD, Fake("denseformer", 0.0, speed=1.6), Fake("elc_bert", -0.5, speed=1.6))
    same, bad = summarise(make_fake(tmp_path / "x", quick)).tables[0].contenders
    assert same.equal["time"].early == "baseline"
    assert same.equal["time"].difference.high is not None
    assert same.equal["time"].difference.high < 0
    assert same.equal["time"].difference.verdict == OPEN
    assert bad.equal["time"].difference.verdict == WORSE
    # A constant rate is the same at every length.
    constant = (STANDARD._replace(spelling="standard:train.schedule=constant"), quick[1])
    free = summarise(make_fake(tmp_path / "y", constant)).tables[0].contenders[0].equal["time"]
    assert (free.early, free.indicative, free.difference.verdict) == ("", False, BETTER)


@pytest.mark.parametrize("match", ["flops", "time"])
def test_what_was_matched_is_taken_at_the_ends(tmp_path: Path, match: str) -> None:
    fakes = (STANDARD, Fake("attention_residuals", 0.06, flops=1.25, speed=0.5))
    summary = summarise(make_fake(tmp_path / "x", fakes, match=match))
    base, mine = summary.tables[0].entries
    assert mine.tokens == pytest.approx(TOKENS * {"flops": 0.8, "time": 0.5}[match], rel=0.002)
    assert mine.equal[match].difference == mine.difference
    assert not mine.equal[match].indicative
    # At equal tokens the baseline, which saw more, is read early.
    assert mine.equal["tokens"].part == pytest.approx(mine.tokens / base.tokens)
    early = [base.curves[seed].at(mine.tokens) for seed in range(4)]
    expected = (mine.loss or 0) - sum(loss for loss in early if loss is not None) / 4
    assert mine.equal["tokens"].difference.mean == pytest.approx(expected)
    assert summary.tables[0].interleaved == (match == "time")


def test_a_folder_at_every_moment(plain: Path, tmp_path: Path) -> None:
    """Runs vanish one by one: the summary says what is missing and never fails."""
    folder = tmp_path / "x"
    shutil.copytree(plain, folder)
    results = sorted(folder.glob("runs/*/*/*/*/*/result.json"))
    assert len(results) == 4 * len(FAKES) - 1
    for count, result in enumerate(results, start=1):
        result.unlink()
        if count % 3 == 0:
            shutil.rmtree(result.parent)
        if count % 4 == 0 or count == len(results):
            summary = summarise(folder)
            assert summary.missing == 1 + count
            json.dumps(to_document(summary), allow_nan=False)
    summary = summarise(folder)
    assert all(entry.verdict == OPEN for entry in summary.tables[0].contenders)
    assert summary.tables[0].baseline.loss is None


def test_a_log_cut_short_and_an_unfinished_run(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "x"
    shutil.copytree(plain, folder)
    read = load_folder(folder)
    place = folder / read.lines[1].row.folder / "lr-0.002" / "seed-1"
    (place / "result.json").unlink()
    with open(place / "log.jsonl", "a") as file:
        file.write('{"step": 12, "held_out_l')
    entry = named(summarise(folder), "attention_residuals")
    assert entry.missing == (1,)
    assert 1 not in entry.curves
    assert len(load_folder(folder).lines[1].runs[1].curve.tokens) == 10


def test_tasks_have_accuracies(tmp_path: Path) -> None:
    fakes = (STANDARD, Fake("attention_residuals", 3.2), Fake("denseformer", 0.0))
    summary = summarise(make_fake(tmp_path / "x", fakes, data=(("task:recall",),)))
    base, good, same = summary.tables[0].entries
    assert summary.tables[0].chance == 0.1
    assert base.accuracy == pytest.approx(0.1, abs=0.02)
    assert good.accuracy is not None
    assert good.accuracy > 0.5
    assert good.accuracy_difference is not None
    assert good.accuracy_difference.verdict == BETTER
    assert same.accuracy_difference is not None
    assert same.accuracy_difference.verdict == OPEN
    assert base.bits_per_byte is None


def test_the_law_over_sizes_gives_speed_ups(tmp_path: Path) -> None:
    fakes = (Fake("standard", noise=1e-5), Fake("attention_residuals", 0.05, noise=1e-5, speed=0.9))
    summary = summarise(make_fake(tmp_path / "x", fakes, sizes=("a", "b", "c", "d"), spread=0.003))
    found = summary.laws["stdlib"]
    assert found.law is not None
    assert found.law.alpha == pytest.approx(ALPHA, abs=0.03)
    assert found.law.l_inf == pytest.approx(L_INF, abs=0.6)
    assert found.exponent is not None
    assert found.exponent.low is not None
    assert found.exponent.high is not None
    assert found.exponent.low < ALPHA < found.exponent.high
    for number, table in enumerate(summary.tables):
        base, mine = table.entries
        loss = law(TOKENS * 8_000_000 * 4**number)
        truth = ((loss - L_INF) / (loss - 0.05 - L_INF)) ** (1 / ALPHA) * 0.9
        assert base.speed_up is not None
        assert base.speed_up.value == 1
        assert mine.speed_up is not None
        assert mine.speed_up.value == pytest.approx(truth, rel=0.05)
        assert mine.speed_up.low is not None
        assert mine.speed_up.high is not None
        assert mine.speed_up.low < mine.speed_up.value < mine.speed_up.high


def test_without_sizes_there_is_no_speed_up(plain: Path, tmp_path: Path) -> None:
    summary = summarise(plain)
    assert all(entry.speed_up is None for entry in summary.tables[0].entries)
    assert named(summary, "muddformer").speed_up_note == "needs --sizes"
    two = make_fake(tmp_path / "two", FAKES[:2], sizes=("a", "b"))
    assert "give three --sizes, or --l-inf" in summarise(two).tables[0].entries[1].speed_up_note
    fitted = summarise(two, l_inf=L_INF)
    assert fitted.laws["stdlib"].law is not None
    assert fitted.laws["stdlib"].law.alpha == pytest.approx(ALPHA, abs=0.02)
    told = named(summarise(plain, l_inf=L_INF, alpha=ALPHA), "attention_residuals")
    base = summary.tables[0].baseline
    assert told.speed_up is not None
    ratio = ((base.loss or 0) - L_INF) / ((told.loss or 0) - L_INF)
    speed = (told.tokens_per_second or 0) / (base.tokens_per_second or 1)
    assert told.speed_up.value == pytest.approx(ratio ** (1 / ALPHA) * speed)
    with pytest.raises(ValueError, match=r"--alpha 0\.1 needs --l-inf too"):
        summarise(plain, alpha=0.1)


def test_learning_rates(tmp_path: Path) -> None:
    summary = summarise(make_fake(tmp_path / "x", FAKES[:2], rates=(2e-3, 4e-3)))
    assert not summary.shared_rate
    assert summary.rate_seeds == (1000, 1001)
    entry = summary.tables[0].entries[1]
    assert (entry.lr, entry.lr_edge, list(entry.lr_losses)) == (2e-3, True, ["0.002", "0.004"])


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not a folder; give the --out of twoaxis compare"):
        summarise(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no compare\.json"):
        summarise(tmp_path)
    (tmp_path / "compare.json").write_text("{")
    with pytest.raises(ValueError, match="is not a JSON document"):
        summarise(tmp_path)


def test_the_document_has_what_a_table_is_made_of(plain: Path) -> None:
    summary = summarise(plain)
    document = json.loads(json.dumps(to_document(summary), allow_nan=False))
    (table,) = document["tables"]
    assert [entry["label"] for entry in table["contenders"]] == [entry.label for entry in summary.tables[0].entries]
    base, mine = table["contenders"][:2]
    differences = [mine["losses"][seed] - base["losses"][seed] for seed in base["losses"]]
    assert mine["difference"]["mean"] == pytest.approx(sum(differences) / 4)
    assert mine["curves"]["0"]["loss"][-1] == pytest.approx(mine["losses"]["0"])
    assert mine["ratios"]["flops_per_token"] == pytest.approx(1.02)
    assert document["hardware"] == read_json(plain / "compare.json")["about"]["hardware_line"]
    assert document["commands"]


def test_bands_are_means_over_seeds_and_end_where_the_shorter_run_ends(plain: Path) -> None:
    summary = summarise(plain)
    base, mine = summary.tables[0].baseline, named(summary, "attention_residuals")
    band = loss_band(mine, "flops")
    assert band is not None
    assert band.x[-1] == pytest.approx(mine.tokens * mine.flops_per_token)
    assert band.mean[-1] == pytest.approx(mine.loss)
    apart = difference_band(mine, base, "tokens")
    assert apart is not None
    assert mine.difference is not None
    assert (apart.mean[-1], apart.spread[-1]) == pytest.approx((mine.difference.mean, mine.difference.spread))
    for axis in ("flops", "time"):
        apart = difference_band(mine, base, axis)
        assert apart is not None
        assert apart.x[-1] == pytest.approx(mine.equal[axis].budget)
        assert apart.mean[-1] == pytest.approx(mine.equal[axis].difference.mean)
    assert loss_band(dataclasses.replace(mine, curves={}), "tokens") is None
    assert difference_band(dataclasses.replace(mine, tokens_per_second=None), base, "time") is None
