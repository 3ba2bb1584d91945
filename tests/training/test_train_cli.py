"""`twoaxis train` as a person meets it."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers.utils import logging

from tests.training.runs import SHAPE
from twoaxis import cli
from twoaxis.depth.registry import STREAMS
from twoaxis.show.charts import Line
from twoaxis.show.numbers import percent
from twoaxis.training.config import TrainConfig
from twoaxis.training.results import load_log, load_result

MODEL = ["--model", ",".join(f"{name}={value}" for name, value in SHAPE.items())]
DATA = ["--data", "task:recall:pairs=3", "--context", "24", "--eval-examples", "4"]
SMALL = [*MODEL, *DATA, "--batch", "4", "--no-measure-memory"]


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """The command silences transformers in its process, which here belongs to other tests too."""
    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["twoaxis", "train", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def config_of(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(json.loads((folder / "run.json").read_text())["config"])


def test_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / "run"
    arguments = [*SMALL, "--out", str(folder), "--steps", "6", "--stream", "deep_delta:value_channels=2"]
    assert run(monkeypatch, *arguments) == 0
    out, err = capsys.readouterr()
    result = load_result(folder)
    assert result is not None
    assert result.loss is not None
    assert f"held-out loss  {result.loss:.4f} nats per token" in out
    assert f"accuracy       {percent(result.accuracy, 2)} (chance 3.12%)" in out
    assert f"sha256 {result.weights}" in out
    assert "6 steps, 576 tokens" in out
    assert f"model in {folder}/model" in out
    assert err.startswith("train: 576 tokens in ")
    assert len(err.splitlines()) == 1
    assert err.rstrip().split("  ")[-3:-1] == ["step 6", f"loss {result.train_loss:.4f}"]
    config = config_of(folder)
    assert config.model == SHAPE
    assert (config.stream, config.measure_memory, config.steps) == ("deep_delta:value_channels=2", False, 6)
    assert run(monkeypatch, *arguments, "--json") == 0  # finished: told again, not done again
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads(json.dumps(result.to_dict()))
    assert err == ""
    assert run(monkeypatch, *arguments, "--lr", "0.1") == 2
    assert capsys.readouterr().err == (
        f"twoaxis: {folder} holds another run: lr is 0.002 there and 0.1 here. Choose another folder, or remove it\n"
    )


def test_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    arguments = [*SMALL, "--steps", "3", "--lr", "1e30", "--warmup", "0", "--out", str(tmp_path / "run")]
    assert run(monkeypatch, *arguments) == 1
    message = f"the gradient's norm of step 2 is nan; the run in {tmp_path / 'run'} was stopped there"
    assert " ".join(capsys.readouterr().out.split()).startswith(f"diverged {message} trained ")
    assert run(monkeypatch, *arguments, "--json") == 1
    assert json.loads(capsys.readouterr().out)["message"] == message


def test_methods_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import twoaxis\n"
        "from twoaxis.depth.standard import Standard\n"
        "@twoaxis.register('mine')\n"
        "class Mine(Standard):\n"
        "    pass\n"
    )
    monkeypatch.setattr(STREAMS, "entries", dict(STREAMS.entries))  # other tests list what there is
    arguments = [*SMALL, "--steps", "2", "--out", str(tmp_path / "run"), "--stream", "mine"]
    assert run(monkeypatch, *arguments) == 2
    assert run(monkeypatch, *arguments, "--use", str(tmp_path / "mine.py")) == 0
    capsys.readouterr()


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted(number: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "twoaxis", "train", *SMALL, "--steps", "600", "--out", str(folder)]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 300
            while not (folder / "log.jsonl").exists() and time.monotonic() < end:
                time.sleep(0.02)
            process.send_signal(number)
            _, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == code
    assert err.startswith("twoaxis: stopped after step ")
    assert err.endswith("of 600; the same command goes on from there\n")
    assert len(list((folder / "checkpoints").iterdir())) == 1


def documented() -> list[str]:
    page = (Path(__file__).parent.parent.parent / "docs" / "training.md").read_text()
    return [line for line in page.splitlines() if line.startswith("twoaxis train ") and "--help" not in line]


@pytest.mark.parametrize("command", documented())
def test_documented_commands_are_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They take minutes; what they ask for is compared with the same fields given in Python."""
    asked: list[TrainConfig] = []

    def stop(config: TrainConfig, out: str, on_step: object) -> None:
        asked.append(config)
        raise ValueError(out)

    monkeypatch.setattr("twoaxis.training.train.train", stop)
    monkeypatch.chdir(tmp_path)
    delta = TrainConfig(stream="deep_delta:value_channels=4", steps=2000)
    (tmp_path / "runs" / "delta").mkdir(parents=True)
    (tmp_path / "runs" / "delta" / "run.json").write_text(json.dumps({"config": delta.to_dict(), "key": delta.key}))
    words = shlex.split(command)
    assert run(monkeypatch, *words[2:]) == 2
    folder = words[words.index("--out") + 1]
    assert capsys.readouterr().err == f"twoaxis: {folder}\n"
    assert asked == [
        {
            "runs/delta": delta,
            "runs/local": TrainConfig(
                mixer="short_swa:window=4", data=("notes", "letters.txt"), tokenizer="bytes", tokens=5_000_000
            ),
            "runs/recall": TrainConfig(
                data=("task:recall",), context=64, model={"hidden_size": 64, "num_hidden_layers": 2}
            ),
            "runs/again": TrainConfig(stream="deep_delta:value_channels=4", steps=2000, seed=1),
            "runs/tuned": TrainConfig(source="runs/delta/model", data=("notes",), lr=1e-4),
        }[folder]
    ]


def test_a_result_has_a_page_with_its_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    assert run(monkeypatch, *SMALL, "--out", str(folder), "--steps", "6", "--eval-every", "3") == 0
    result = load_result(folder)
    assert result is not None
    (chart,) = result.document().charts
    training, held_out = chart.panels[0].marks
    assert isinstance(training, Line)
    assert isinstance(held_out, Line)
    log = load_log(folder)
    assert [(r["tokens"], r["loss"]) for r in log if "loss" in r] == list(zip(training.x, training.y, strict=True))
    assert held_out.y[-1] == result.loss
    saved = result.save(folder / "report")
    assert {file.suffix for file in saved.files} == {".md", ".html", ".json", ".svg", ".png"}
    assert f"{result.loss:.4f} nats per token" in (folder / "report" / "report.html").read_text()
    assert result.exit_code == 0
    assert dataclasses.replace(result, status="diverged", message="the loss is nan").exit_code == 1
