"""Comparison folders with planted differences, costs, gaps and laws: the numbers come back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.comparison.fake_comparison import ALPHA, FAKES, L_INF, STANDARD, TOKENS, Fake, law, make_fake
from twoaxis.comparison.charts import difference_line, loss_line
from twoaxis.comparison.decisions import seeds_wanted
from twoaxis.comparison.plan import Run
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.run_folders import Curve
from twoaxis.comparison.sections import Entry
from twoaxis.comparison.statistics import BETTER, OPEN, WORSE
from twoaxis.show import markdown
from twoaxis.training.result import Result, load_result


def load(folder: Path, **options: Any) -> Any:
    """A comparison, every number of which is taken to be there."""
    return Comparison.load(folder, **options)


def named(found: Any, part: str) -> Any:
    return next(entry for entry in found.sections[0].entries if part in entry.label)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(tmp_path_factory.mktemp("plain"))


def test_a_curve_between_its_evaluations() -> None:
    curve = Curve((100.0, 200.0, 400.0), (5.0, 4.0, 3.0))
    found = {tokens: curve.at(tokens) for tokens in (99, 100, math.sqrt(100 * 200), math.sqrt(200 * 400), 400, 401)}
    assert list(found.values()) == [None, 5.0, pytest.approx(4.5), pytest.approx(3.5), 3.0, None]
    assert (Curve((), ()).at(1), Curve((7.0,), (2.0,)).at(7)) == (None, 2.0)
    assert Curve((80.0, 90.0, 100.0), (3.0, 2.0, 1.0)).late == 1.5
    assert (curve.reaches(4.5), curve.reaches(2.9)) == (pytest.approx(math.sqrt(100 * 200)), None)


def test_runs_are_paired_by_their_seed_across_a_gap(plain: Path, tmp_path: Path) -> None:
    found = load(make_fake(tmp_path, (STANDARD, Fake("muddformer", noise=0.02, missing=(1,)))))
    base, mine = found.sections[0].baseline, named(found, "muddformer")
    assert mine.difference.seeds == (0, 2, 3)
    pairs = [mine.losses[seed] - base.losses[seed] for seed in (0, 2, 3)]
    assert mine.difference.mean == pytest.approx(sum(pairs) / 3)
    found = load(plain)
    diverged, missing = named(found, "write only"), named(found, "muddformer")
    assert (tuple(diverged.results), diverged.diverged, diverged.missing) == ((0, 1, 3), (2,), ())
    assert (tuple(missing.results), missing.diverged, missing.missing) == ((0, 1, 2), (), (3,))
    assert diverged.difference.note == "diverged at 1 of 4 seeds"
    assert missing.difference.note == "1 of 4 seeds not finished"
    assert found.missing == 1


def test_equal_budgets_read_the_longer_curve_where_the_shorter_ends(plain: Path) -> None:
    found = load(plain)
    base, mine = found.sections[0].baseline, named(found, "attention_residuals")
    tokens, flops, time = (mine.equal[axis] for axis in ("tokens", "flops", "time"))
    assert not tokens.indicative
    assert tokens.difference == mine.difference
    # 2% more operations per token: the baseline ends first, and the contender is read at 1 / 1.02 of its run.
    assert flops.read_at == pytest.approx(1 / 1.02)
    assert flops.indicative
    assert flops.budget == pytest.approx(base.row.tokens * base.row.flops_per_token)
    by_hand = [mine.curves[seed].at(mine.row.tokens / 1.02) for seed in range(4)]
    assert flops.loss == pytest.approx(sum(by_hand) / 4)
    assert flops.difference.mean == pytest.approx(flops.loss - base.mean("loss"))
    assert time.read_at == pytest.approx(mine.tokens_per_second / base.tokens_per_second)
    assert time.difference.mean > flops.difference.mean > tokens.difference.mean


def test_reading_a_schedule_early_resolves_nothing_by_itself(plain: Path, tmp_path: Path) -> None:
    # Slower contenders are read early at equal time: worse may be the schedule's doing, better is in spite of it.
    found = named(load(plain), "muddformer").equal["time"]
    assert found.early == "contender"
    assert found.difference.low > 0
    assert found.difference.verdict == OPEN
    assert "one schedule had not ended" in found.difference.note
    kept = named(load(plain), "attention_residuals").equal["time"]
    assert (kept.early, kept.difference.verdict) == ("contender", BETTER)
    # Faster ones read the baseline early, which makes them look better.
    quick = (STANDARD, Fake("denseformer", 0.0, speed=1.6), Fake("elc_bert", -0.5, speed=1.6))
    same, bad = load(make_fake(tmp_path / "x", quick)).sections[0].contenders
    assert same.equal["time"].early == "baseline"
    assert same.equal["time"].difference.high < 0
    assert same.equal["time"].difference.verdict == OPEN
    assert bad.equal["time"].difference.verdict == WORSE
    # A constant rate is the same at every length.
    constant = (STANDARD._replace(spelling="standard:train.schedule=constant"), quick[1])
    free = load(make_fake(tmp_path / "y", constant)).sections[0].contenders[0].equal["time"]
    assert (free.early, free.indicative, free.difference.verdict) == ("", False, BETTER)


@pytest.mark.parametrize("match", ["flops", "time"])
def test_what_was_matched_is_taken_at_the_ends(tmp_path: Path, match: str) -> None:
    fakes = (STANDARD, Fake("attention_residuals", 0.06, flops=1.25, speed=0.5))
    found = load(make_fake(tmp_path / "x", fakes, match=match))
    base, mine = found.sections[0].entries
    assert mine.row.tokens == pytest.approx(TOKENS * {"flops": 0.8, "time": 0.5}[match], rel=0.002)
    assert mine.equal[match].difference == mine.difference
    assert not mine.equal[match].indicative
    # At equal tokens the baseline, which saw more, is read early.
    assert mine.equal["tokens"].read_at == pytest.approx(mine.row.tokens / base.row.tokens)
    early = [base.curves[seed].at(mine.row.tokens) for seed in range(4)]
    expected = mine.mean("loss") - sum(early) / 4
    assert mine.equal["tokens"].difference.mean == pytest.approx(expected)
    assert found.sections[0].interleaved == (match == "time")


def test_a_folder_at_every_moment(plain: Path, tmp_path: Path) -> None:
    """Runs vanish one by one: the report says what is missing and never fails."""
    folder = shutil.copytree(plain, tmp_path / "x")
    results = sorted(folder.glob("runs/*/*/*/*/*/result.json"))
    assert len(results) == 4 * len(FAKES) - 1
    for count, result in enumerate(results, start=1):
        result.unlink()
        if count % 3 == 0:
            shutil.rmtree(result.parent)
        if count % 4 == 0 or count == len(results):
            assert load(folder).missing == 1 + count
            json.dumps(load(folder).to_dict(), allow_nan=False)
    (section,) = load(folder).sections
    assert all(entry.verdict == OPEN for entry in section.contenders)
    assert section.baseline.mean("loss") is None


def test_folders_without_all_their_files(plain: Path, tmp_path: Path) -> None:
    for message in ("x is not a folder; give the --out of twoaxis compare", r"has no compare\.json", "is not a JSON"):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / "x")
        if (tmp_path / "x").exists():
            (tmp_path / "x" / "compare.json").write_text("{")
        (tmp_path / "x").mkdir(exist_ok=True)
    folder = shutil.copytree(plain, tmp_path / "x", dirs_exist_ok=True)
    place = folder / load(folder).entries[1].runs[1].folder
    (place / "result.json").unlink()
    with open(place / "log.jsonl", "a") as file:
        file.write('{"step": 12, "held_out_l')
    entry = named(load(folder), "attention_residuals")
    assert entry.missing == (1,)
    assert 1 not in entry.curves
    assert len(entry.runs[1].curve.tokens) == 10


def test_tasks_have_accuracies(tmp_path: Path) -> None:
    fakes = (STANDARD, Fake("attention_residuals", 3.2), Fake("denseformer", 0.0))
    (section,) = load(make_fake(tmp_path / "x", fakes, data=(("task:recall",),))).sections
    base, good, same = section.entries
    assert section.chance == 0.1
    assert base.mean("accuracy") == pytest.approx(0.1, abs=0.02)
    assert good.mean("accuracy") > 0.5
    assert (good.accuracy_difference.verdict, same.accuracy_difference.verdict) == (BETTER, OPEN)
    assert base.mean("bits_per_byte") is None


def test_the_law_over_sizes_gives_speed_ups(tmp_path: Path) -> None:
    fakes = (Fake("standard", noise=1e-5), Fake("attention_residuals", 0.05, noise=1e-5, speed=0.9))
    found = load(make_fake(tmp_path / "x", fakes, sizes=("a", "b", "c", "d"), spread=0.003))
    scaling = found.laws["stdlib"]
    assert scaling.law.alpha == pytest.approx(ALPHA, abs=0.03)
    assert scaling.law.l_inf == pytest.approx(L_INF, abs=0.6)
    assert scaling.exponent.low < ALPHA < scaling.exponent.high
    for number, section in enumerate(found.sections):
        base, mine = section.entries
        loss = law(TOKENS * 8_000_000 * 4**number)
        truth = ((loss - L_INF) / (loss - 0.05 - L_INF)) ** (1 / ALPHA) * 0.9
        assert (base.worth.tokens.value, base.worth.throughput) == (1, 1)
        net, tokens = mine.worth.net, mine.worth.tokens
        assert net.value == pytest.approx(truth, rel=0.05)
        assert tokens.value * mine.worth.throughput == pytest.approx(net.value)
        assert net.low < net.value < net.high


def test_without_sizes_there_is_no_speed_up(plain: Path, tmp_path: Path) -> None:
    found = load(plain)
    assert all(entry.worth is None for entry in found.sections[0].entries)
    assert named(found, "muddformer").worth_note == "needs --sizes"
    two = make_fake(tmp_path / "two", FAKES[:2], sizes=("a", "b"))
    assert "give three --sizes, or --l-inf" in load(two).sections[0].entries[1].worth_note
    fitted = load(two, l_inf=L_INF)
    assert fitted.laws["stdlib"].law.alpha == pytest.approx(ALPHA, abs=0.02)
    told = named(load(plain, l_inf=L_INF, alpha=ALPHA), "attention_residuals")
    base = found.sections[0].baseline
    ratio = (base.mean("loss") - L_INF) / (told.mean("loss") - L_INF)
    speed = told.tokens_per_second / base.tokens_per_second
    assert told.worth.net.value == pytest.approx(ratio ** (1 / ALPHA) * speed)
    with pytest.raises(ValueError, match=r"--alpha 0\.1 needs --l-inf too"):
        load(plain, alpha=0.1)


def test_more_tokens_of_the_baseline_tell_what_a_loss_is_worth(tmp_path: Path) -> None:
    fakes = (
        Fake("standard", noise=1e-4),
        Fake("attention_residuals", 0.05, noise=1e-4, speed=0.8),
        Fake('standard:train.budget=2,label="twice"', 0.1, noise=1e-4),
        Fake('standard:train.warmup=0.5,label="warm"', 0.07, noise=1e-4),
    )
    folder = make_fake(tmp_path / "x", fakes, checks=("twice", "warm"))
    (section,) = load(folder).sections
    (mine,) = section.contenders
    assert mine.worth.tokens.value == pytest.approx(math.sqrt(2), rel=0.02)  # half of what a doubling brings
    assert mine.worth.net.value == pytest.approx(math.sqrt(2) * 0.8, rel=0.05)
    assert mine.worth.source == "more tokens"
    assert mine.tokens_to(section.baseline.mean("loss")) == pytest.approx(0.9 * TOKENS, rel=0.03)
    assert (section.unsteadiness.label, section.unsteadiness.verdict) == ("warm", "check")
    shown = markdown.render(load(folder).document())
    assert "moves the loss by -0.07" in shown
    assert "more than the difference of attention_residuals: the recipe may explain it" in shown


def test_until_resolved_a_contender_has_as_many_seeds_as_it_takes(tmp_path: Path) -> None:
    fakes = (STANDARD, Fake("muddformer", 0.1, missing=tuple(range(4, 16))), Fake("denseformer", noise=0.05))
    folder = make_fake(tmp_path / "x", fakes, seeds=tuple(range(16)), until="resolved")
    found = load(folder)
    base, clear, noisy = found.entries
    assert (len(base.seeds), len(clear.seeds), len(noisy.seeds), found.missing) == (16, 4, 16, 0)
    assert (clear.verdict, noisy.verdict) == (BETTER, OPEN)
    assert noisy.power.seeds > 16
    plan = found.plan

    def result(run: Run, most: int) -> Result | None:
        return load_result(folder / run.folder) if run.seed < most else None

    for most, wanted in ((3, [4, 4, 4]), (4, [8, 4, 8]), (7, [8, 4, 8]), (8, [16, 4, 16]), (16, [16, 4, 16])):
        assert list(seeds_wanted(plan, lambda run, most=most: result(run, most)).values()) == wanted


def test_close_throughputs_give_no_verdict_at_equal_time(tmp_path: Path) -> None:
    fakes = (STANDARD, Fake("muddformer", 0.2, speed=0.995), Fake("denseformer", 0.2, speed=0.8))
    close, far = load(make_fake(tmp_path / "x", fakes)).sections[0].contenders
    assert (close.equal["time"].unsure, close.equal["time"].difference.verdict) == (True, OPEN)
    assert "differ by less than they were measured to" in close.equal["time"].difference.note
    assert (far.equal["time"].unsure, far.equal["time"].difference.verdict) == (False, BETTER)


def test_curves_are_read_on_the_rows_that_all_evaluations_have(tmp_path: Path) -> None:
    """The last evaluation has 512 rows, of which the first 64 are easier; the others have these 64."""
    fakes = (STANDARD, Fake("denseformer", speed=0.8, flops=1.25))
    folder = make_fake(tmp_path / "x", fakes, held_out=512)
    before = load(folder).sections[0]
    for path in folder.glob("runs/*/*/*/*/seed-*/result.json"):
        fields = json.loads(path.read_text())
        fields["row_losses"] = [loss - 0.5 if row < 64 else loss for row, loss in enumerate(fields["row_losses"])]
        path.write_text(json.dumps(fields))
    for path in folder.glob("runs/*/*/*/*/seed-*/log.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records[:-1]:
            if "held_out_loss" in record:
                record["held_out_loss"] -= 0.5
        path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (mine,), base = (section := load(folder).sections[0]).contenders, section.baseline
    ((was,), was_base) = before.contenders, before.baseline
    assert base.mean("loss") == was_base.mean("loss")
    assert base.end == pytest.approx(was_base.end - 0.5, abs=1e-6)
    for axis in ("flops", "time"):
        difference = mine.equal[axis].difference
        assert difference.mean == pytest.approx(was.equal[axis].difference.mean, abs=1e-6)
        assert 0 < difference.mean < 0.3  # as good as the baseline, and read at four fifths of its run
    assert mine.tokens_to(base.end) == pytest.approx(was.tokens_to(was_base.end))
    assert "Curves are of 64 held-out rows, losses at the end of 512." in markdown.render(load(folder).document())


def test_spikes_of_the_gradient_are_counted(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "x")
    path = min(folder.glob("runs/*/*/*/*/seed-0/log.jsonl"))
    norms = [9.0, 1.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0, 1.0]  # the first fifth does not count
    lines = "".join(json.dumps({"tokens": n, "grad_norm": norm}) + "\n" for n, norm in enumerate(norms))
    path.write_text(path.read_text() + lines)
    assert sum(entry.spikes for entry in load(folder).entries) == 1


def test_lines_are_means_over_seeds_and_end_where_the_shorter_run_ends(plain: Path) -> None:
    found = load(plain)
    base, mine = found.sections[0].baseline, named(found, "attention_residuals")
    line: Any = loss_line(mine, "flops", mine.curves.values())
    assert line.x[-1] == pytest.approx(mine.row.tokens * mine.row.flops_per_token)
    assert line.y[-1] == pytest.approx(mine.mean("loss"))
    apart: Any = difference_line(mine, base, "tokens")
    assert (apart.y[-1], apart.high[-1] - apart.low[-1]) == pytest.approx(
        (mine.difference.mean, 2 * mine.difference.spread)
    )
    for axis in ("flops", "time"):
        apart = difference_line(mine, base, axis)
        assert apart.x[-1] == pytest.approx(mine.equal[axis].budget)
        assert apart.y[-1] == pytest.approx(mine.equal[axis].difference.mean)
    assert loss_line(mine, "tokens", []) is None
    assert difference_line(mine, Entry(base.section, base.row, {}), "time") is None


def test_the_result_object(plain: Path, tmp_path: Path) -> None:
    found = load(plain)
    assert found.losses["standard"] == found.sections[0].baseline.losses
    assert found.verdicts["muddformer"] == BETTER
    assert (found.exit_code, dataclasses.replace(found, failed=("a run",)).exit_code) == (0, 1)
    (table,) = json.loads(json.dumps(found.to_dict(), allow_nan=False))["tables"]
    assert [entry["label"] for entry in table["contenders"]] == [entry.label for entry in found.entries]
    mine = table["contenders"][1]
    assert mine["curves"]["0"]["loss"][-1] == pytest.approx(mine["losses"]["0"])
    assert mine["ratios"]["flops_per_token"] == pytest.approx(1.02)
    several = load(make_fake(tmp_path / "x", FAKES[:2], sizes=("a", "b"), held_out=64))
    with pytest.raises(ValueError, match=r"there are 2 sections \(stdlib, a; stdlib, b\): ask one of \.sections"):
        _ = several.losses
    mine = several.sections[1].entries[1]
    assert mine.label == "attention_residuals:block_size=4"
    assert mine.difference.row_error == pytest.approx(0.02 / 8, rel=0.5)  # noise of 0.04 at each of four seeds
    assert mine.equal["tokens"].difference == mine.difference
    assert mine.equal["time"].difference.row_error is None  # the curve before its end has no rows


# Files that something else wrote.

WRONG: list[Any] = [None, True, -1, 0, 2.5, 1e308, 10**400, float("nan"), "x", "", [], [1, None], {}, {"a": []}]
"""Values in the place of others."""


def spoil(document: Any, choices: list[int]) -> Any:
    """The document with one value somewhere in it replaced, or its key removed; the numbers choose."""
    path, place = [], document
    while isinstance(place, dict | list) and place and len(path) < choices[0] % 6 + 1:
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        path.append(list(keys)[choices[len(path) + 1] % len(keys)])
        place = place[path[-1]]
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    if choices[-1] % 8 == 0:
        del holder[path[-1]]
    else:
        holder[path[-1]] = WRONG[choices[-1] % len(WRONG)]
    return document


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fake(
        tmp_path_factory.mktemp("few") / "x", (STANDARD, FAKES[3]), seeds=(1, 2), rates=(2e-3, 4e-3), held_out=3
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["result.json", "log.jsonl"]),  # test_plan_files.py spoils compare.json
    choices=st.lists(st.integers(0, 2**16), min_size=8, max_size=8),
)
def test_a_file_of_a_wrong_shape_is_named(few: Path, name: str, choices: list[int]) -> None:
    """Whatever a file has in it, a report is made or the error says which file is wrong."""
    path = min(few.glob(f"runs/*/*/*/lr-0.002/seed-1/{name}"))
    kept = path.read_bytes()
    try:
        if name == "log.jsonl":
            lines = [json.loads(line) for line in kept.splitlines()]
            path.write_text("".join(json.dumps(line) + "\n" for line in spoil(lines, choices)))
        else:
            path.write_text(json.dumps(spoil(json.loads(kept), choices)))
        told = name
        try:
            found = load(few, l_inf=1.0, alpha=0.1)
            json.dumps(found.to_dict(), allow_nan=False)
            markdown.render(found.document())
        except ValueError as error:
            told = str(error)
        assert name in told
    finally:
        path.write_bytes(kept)


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("result.json", {"loss": "low"}, "result.json is damaged: loss must be"),
        ("result.json", {"tokens_per_second": 1e40}, "tokens_per_second must be a number below 1e+30"),
        ("result.json", {"status": "finnished"}, "did you mean"),
        ("log.jsonl", {"tokens": 5, "held_out_loss": "low"}, "line 21: held_out_loss must be a number, got 'low'"),
        ("log.jsonl", {"tokens": [], "held_out_loss": 1}, "log.jsonl, line 21: tokens must be a number, got []"),
    ],
)
def test_the_field_is_named(plain: Path, tmp_path: Path, name: str, change: dict[str, Any], told: str) -> None:
    folder = shutil.copytree(plain, tmp_path / "x")
    path = min(folder.glob(f"runs/*/*/*/*/seed-0/{name}"))
    if name == "log.jsonl":
        path.write_text(path.read_text() + json.dumps(change) + "\n")
    else:
        path.write_text(json.dumps(json.loads(path.read_bytes()) | change))
    with pytest.raises(ValueError, match=re.escape(told)):
        load(folder)
