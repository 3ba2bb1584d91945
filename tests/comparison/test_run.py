"""Whole comparisons: killed, stopped, crashed, extended, refused; what is finished is never done again."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import twoaxis
from tests.comparison.comparing import FRAGILE, arguments, make_options, results, stamps, start, weights
from tests.support.commands import run as run_command
from tests.support.processes import children, end, wait_for
from twoaxis.base.files import claim
from twoaxis.base.timer import Rounds, Throughput
from twoaxis.comparison import budget
from twoaxis.comparison.forecast import forecast
from twoaxis.comparison.options import command_line
from twoaxis.comparison.plan import Plan
from twoaxis.comparison.results import Comparison
from twoaxis.comparison.run import compare, prepare
from twoaxis.comparison.runner.launchers import LocalLauncher
from twoaxis.comparison.runner.worker import TRIES, read_failure
from twoaxis.show import markdown

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def here(out: Path, options: dict[str, Any], **more: Any) -> tuple[Comparison, str]:
    """A comparison in this process, and what it says."""
    said = io.StringIO()
    return compare(options, out, console=Console(file=said, width=200), report=False, **more), said.getvalue()


def done(out: Path, options: dict[str, Any], **more: Any) -> tuple[Plan, str]:
    """A comparison in this process that comes to its end: its plan, and what it says."""
    found, said = here(out, options, **more)
    assert (found.failed, found.missing, found.diverged_runs) == ((), 0, [])
    return found.plan, said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare")
    (path / "fragile.py").write_text(FRAGILE)
    return path


@pytest.fixture(scope="module")
def options(place: Path) -> dict[str, Any]:
    return make_options(place, stream=["deep_delta"], seeds=2, steps=40, eval_every=20)


@pytest.fixture(scope="module")
def whole(place: Path, options: dict[str, Any]) -> Path:
    """A comparison that nobody interrupted."""
    _, said = done(place / "whole", options, command="twoaxis compare ...")
    assert re.findall(r"^(\d)/4", said, re.MULTILINE) == ["1", "2", "3", "4"]
    return place / "whole"


def leftovers(out: Path) -> list[str]:
    """Files that only an unfinished run needs, in the folders of finished ones."""
    kept = {"run.json", "result.json", "log.jsonl"}
    runs = [path.parent for path in out.glob("runs/**/result.json")]
    return sorted(str(file) for run in runs for file in run.iterdir() if file.name not in kept)


def test_a_comparison_leaves_its_plan_and_paired_runs(whole: Path) -> None:
    made: Any = Plan.load(whole)
    found = results(whole)
    assert sorted(found) == sorted(run.folder.as_posix() for run in made.runs())
    assert len(found) == 4
    for run in made.runs():
        result, about = found[run.folder.as_posix()], json.loads((whole / run.folder / "run.json").read_text())
        assert about["key"] == made.config(run).key
        assert (result.steps, result.tokens) == (40, 40 * 2 * 16)
        assert result.parameters == run.row.parameters
        assert result.flops == run.row.flops_per_token * result.tokens
        assert (run.row.tokens_per_second or 0) > 0
        assert 0 < (run.row.fixed_share or 0) <= 1  # measured on steps like these
    assert len(set(weights(whole).values())) == 4
    assert made.about["commands"] == ["twoaxis compare ..."]
    assert ", 1 thread" in made.about["hardware_line"]
    assert made.about["data"][made.rows[0].data]["vocab_size"] >= 256
    assert leftovers(whole) == []


def test_what_is_finished_is_not_done_again(
    whole: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: LocalLauncher, *_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(LocalLauncher, "start", start)
    before = stamps(whole)
    for asked in (options, {}):
        _, said = done(whole, asked)
        assert "4 of 4 runs are there already" in said
    assert stamps(whole) == before


def test_a_folder_refuses_what_does_not_fit(whole: Path, options: dict[str, Any], place: Path) -> None:
    (place / "a file").write_text("")
    for out, asked, message in (
        (whole, options | {"batch": 4, "steps": 41}, r"other settings \(batch: 2 -> 4; steps: 40 -> 41\)"),
        (place / "a file" / "out", options, "a part of the path is a file"),
        (place / "nothing", options | {"data": [str(place / "no such text")]}, "there is no file or folder"),
    ):
        with pytest.raises(ValueError, match=message):
            here(out, asked)
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        here(whole, options, jobs=0)
    with claim(whole), pytest.raises(ValueError, match="is in use by another process; what it does not do yet"):
        here(whole, options | {"seeds": 3})
    with claim(place / "empty"), pytest.raises(ValueError, match="is in use by another process"):
        here(place / "empty", options)
    text = Path(options["data"][0]) / "0.txt"
    original = text.read_text()
    try:
        text.write_text(original.replace("axis", "sixa"))
        with pytest.raises(ValueError, match=r"the data .* is not what it was when the comparison began"):
            here(shutil.copytree(whole, place / "moved"), {"seeds": 3})
    finally:
        text.write_text(original)


def running(process: subprocess.Popen[str], out: Path) -> bool:
    """Whether a comparison trains: besides the worker there is a run, and one has a checkpoint and no result."""
    assert process.poll() is None, process.communicate()
    saved = out.glob("runs/**/checkpoints/step-*")
    return len(children(process.pid)) > 1 and any(not (s.parent.parent / "result.json").exists() for s in saved)


def test_killed_it_comes_to_the_same_bits_and_grows(whole: Path, options: dict[str, Any], place: Path) -> None:
    """Killed with one seed, then resumed with one more and one more contender."""
    out = place / "killed"
    process = start("--out", str(out), *arguments(options | {"seeds": 1}))
    try:
        wait_for(lambda: running(process, out))
        assert end(process, signal.SIGKILL)[0] == -signal.SIGKILL
    finally:
        process.kill()
    before = stamps(out)
    made, said = done(out, {"seeds": 2, "mixer": ["short_conv"]})
    assert f"{len(before)} of 6 runs are there already" in said or not before
    after, kept = stamps(out), weights(whole)
    assert len(after) == 6
    assert after | before == after
    assert weights(out) | kept == weights(out)
    reference: Any = Plan.load(whole)
    rows = (*made.rows[:2], *reference.rows)
    counted = [dataclasses.replace(row, tokens_per_second=None, speed_spread=0.0, fixed_share=None) for row in rows]
    assert counted[:2] == counted[2:]  # throughput is measured, once for each folder
    assert (made.seeds, made.labels) == ((0, 1), ["standard", "deep_delta", "standard + short_conv"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_it_says_how_to_go_on(
    whole: Path, options: dict[str, Any], place: Path, number: signal.Signals
) -> None:
    out = place / number.name
    process = start("--out", str(out), *arguments(options | {"save_every": 30}))
    try:
        wait_for(lambda: len(children(process.pid)) > 1)
        wait_for(lambda: any(out.glob("runs/**/log.jsonl")))
        code, said = end(process, number)
    finally:
        process.kill()
    assert code == 128 + number, said
    assert said.endswith(f"twoaxis: stopped; go on with: twoaxis compare --out {out}\n")
    assert "Traceback" not in said
    before = stamps(out)
    process = start("--out", str(out), "--json")
    table, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert weights(out) == weights(whole)
    assert {path: stamps(out)[path] for path in before} == before
    assert json.loads(table)["missing_runs"] == 0


def test_crashes_and_divergence_leave_the_others_alone(whole: Path, options: dict[str, Any], place: Path) -> None:
    """A run that always breaks, one that breaks once, one whose loss explodes, and the usual ones."""
    out, own = place / "crashed", str(place / "fragile.py")
    fragile = [
        "fragile:how=segmentation fault,label=broken",
        f"fragile:how=exit,once={place / 'once'},label=shaky",
        "standard:train.lr=1e9,train.clip=0,label=hot",
    ]
    ended, errors = here(out, options | {"stream": ["deep_delta", *fragile], "use": [own], "seeds": "1,"})
    runs = {run.label: run for run in ended.plan.runs()}
    found = {label: results(out).get(run.folder.as_posix()) for label, run in runs.items()}
    assert found["broken"] is None
    assert found["hot"].status == "diverged"
    # the one that broke once was resumed and behaved as the plain residual
    plain = weights(whole)[runs["standard"].folder.as_posix()]
    assert found["standard"].weights == found["shaky"].weights == plain
    failed, missing = ended.failed
    assert missing.startswith("broken, ")
    assert ended.exit_code == 1
    assert failed.startswith(f"{missing}: crashed with SIGSEGV\n    Fatal Python error: Segmentation fault")
    (diverged,) = ended.diverged_runs
    assert re.fullmatch(r"hot, .*seed 1: the .* is (nan|inf).*", diverged)
    assert f"twoaxis: missing: {missing}\ntwoaxis: diverged: {diverged}\n" in errors
    assert read_failure(out / runs["broken"].folder)[1] == TRIES == 2
    # what fails twice before anybody looks is told once
    assert errors.count("it is tried once more") in (1, 2)
    assert leftovers(out) == []
    assert [path.parent for path in out.glob("runs/**/output.txt")] == [out / runs["broken"].folder]
    (place / "fragile.py").write_text(FRAGILE + "# changed\n")
    try:
        with pytest.raises(ValueError, match=r"the file .*fragile\.py is not what it was when the comparison began"):
            here(out, {"use": [own]})
    finally:
        (place / "fragile.py").write_text(FRAGILE)


def test_a_dry_run_counts_and_writes_nothing(whole: Path, options: dict[str, Any]) -> None:
    timed: list[list[str]] = []

    def speeds(configs: Any, words: int) -> dict[str, Throughput]:
        timed.append([config.stream for config in configs.values()])
        return dict.fromkeys(configs, Throughput(Rounds((100.0,)), None))

    asked = options | {"seeds": 3, "lr": "0.002,0.004", "lr_seeds": 2}
    asked |= {"stream": ["deep_delta", "standard:wider=muddformer"]}
    before = {path: path.stat().st_mtime_ns for path in sorted(whole.rglob("*"))}
    found = forecast(prepare(asked, whole), whole, 2, speeds)
    assert {path: path.stat().st_mtime_ns for path in sorted(whole.rglob("*"))} == before
    assert [(row.rates, row.runs, row.finished) for row in found.lines] == [(4, 3, 0)] * 3
    assert all(row.seconds > 7 * 40 * 2 * 16 / 100 for row in found.lines)
    assert found.seconds == pytest.approx(sum(row.seconds for row in found.lines) / 2)
    assert timed == [["standard", "deep_delta"]]  # one of each method
    plain, _, wider = found.lines
    assert wider.tokens_per_second == pytest.approx(100 * plain.row.flops_per_token / wider.row.flops_per_token)
    rest = forecast(prepare(options, whole), whole, 2, speeds)
    assert (rest.runs, rest.finished, rest.seconds) == (4, 4, 0.0)
    text = markdown.render(found.document())
    assert "21 runs, 0 of them finished, 21 to do, 2 at once" in text
    assert f"standard:wider=muddformer at nano on {options['data'][0]}: intermediate" in text.replace("\\", "")
    assert json.loads(json.dumps(found.to_dict()))["runs"] == 21


def test_contenders_that_differ_in_their_training_are_counted_and_timed_once(
    options: dict[str, Any], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_COUNTS", {})
    many, timed = [f"denseformer:train.weight_decay={n / 1000}" for n in range(100)], []

    def speeds(configs: Any, words: int) -> dict[str, Throughput]:
        timed.append(len(configs))
        return dict.fromkeys(configs, Throughput(Rounds((1.0,)), None))

    plan = prepare(options | {"stream": many}, place / "many")
    found = forecast(plan, place / "many", 2, speeds)
    assert (len(plan.rows), len(found.lines), len(budget._COUNTS), timed) == (101, 101, 2, [2])


@pytest.mark.slow
def test_every_contender_gets_its_rate_on_other_seeds(options: dict[str, Any], place: Path) -> None:
    out = place / "rates"
    asked = options | {
        "lr": "1e-5,3e-3,3e-2",
        "lr_seeds": 1,
        "seeds": 1,
        "stream": ["deep_delta", "denseformer:train.lr=1e-3"],
    }
    plan, _ = done(out, asked)
    found = results(out)
    assert len(found) == 2 * 3 + 3
    for row in plan.rows[:2]:
        losses = {rate: found[f"{row.folder.as_posix()}/lr-{rate!r}/seed-1000"].loss for rate in (1e-5, 3e-3, 3e-2)}
        assert row.lr_losses == {repr(rate): loss for rate, loss in losses.items()}
        assert row.lr == min(losses, key=lambda rate: losses[rate] or 0.0) != 1e-5
        assert row.lr_edge == (row.lr == 3e-2)
    assert plan.rows[2].lr == 1e-3
    before = stamps(out)
    plan, _ = done(out, {"lr": "1e-5,3e-3,3e-2,1e-1"})
    assert {path: stamps(out)[path] for path in before} == before
    assert set(plan.rows[0].lr_losses) == {"1e-05", "0.003", "0.03", "0.1"}


@pytest.mark.slow
def test_until_resolved_runs_what_its_looks_ask_for(options: dict[str, Any], place: Path) -> None:
    out = place / "until"
    streams = ["standard:train.lr=1e-5,label=slow", "standard:train.init_seed=99,label=twin"]
    done(out, options | {"stream": streams, "seeds": 8, "until": "resolved"})
    found = Comparison.load(out)
    base, slow, twin = found.entries
    assert (len(slow.runs), slow.verdict) == (4, "resolved (worse)")
    assert len(base.runs) == len(twin.runs) == (4 if twin.difference and twin.difference.wanted == 4 else 8)
    before = stamps(out)
    here(out, {})
    assert stamps(out) == before


@pytest.mark.slow
def test_a_file_the_system_refuses_is_named_and_the_rest_can_be_done_later(
    options: dict[str, Any], place: Path
) -> None:
    out = place / "full"

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    process = start("--out", str(out), *arguments(options | {"seeds": 3}), "--jobs", "1", preexec_fn=small_files)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1, errors
    assert re.search(r"twoaxis: failed: standard, .*seed 0: .*safetensors.* cannot be written: File too large", errors)
    assert errors.count("twoaxis: missing: ") == 6
    assert errors.count("twoaxis: failed: ") == 1  # the others would fail in the same way and are not tried
    done(out, {})
    assert len(results(out)) == 6


def test_the_command_line_and_python_say_the_same_and_nothing_unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []

    def hear(options: dict[str, Any], out: str, **_: Any) -> None:
        heard.append(options)
        raise ValueError("heard")

    monkeypatch.setattr("twoaxis.comparison.run.compare", hear)
    words = "--stream deep_delta --stream denseformer --data a b --data c --seeds 5,6 --lr 1e-3 --no-isolate --grid"
    said = run_command("compare", "--out", "x", *words.split(), "--model", "hidden_size=64", "--tokens", "300k")
    assert said.err == "twoaxis: heard\n"
    options: Any = {"stream": ["deep_delta", "denseformer"], "data": [["a", "b"], "c"], "seeds": [5, 6], "lr": 1e-3}
    options |= {"isolate": False, "grid": True, "model": {"hidden_size": 64}, "tokens": 300_000}
    with pytest.raises(ValueError, match="heard"):
        twoaxis.compare(out="x", **options)
    typed, python = heard
    assert set(typed) == set(python) == set(options)
    assert Plan.new(typed) == Plan.new(python)
    run_command("compare", "--out", "x")
    assert heard[2] == {}
    assert command_line("x", None, options | {"lr": [1e-3, 2e-3], "seeds": 5}) == (
        "twoaxis compare --out x --stream deep_delta --stream denseformer --data a b --data c --seeds 5 "
        "--lr 0.001,0.002 --no-isolate --grid --model hidden_size=64 --tokens 300000"
    )
