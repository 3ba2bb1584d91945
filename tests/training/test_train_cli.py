"""`twoaxis train` as a person meets it."""

from __future__ import annotations

import dataclasses
import json
import shlex
import signal
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.commands import Done, run
from tests.support.processes import ROOT, end, start, wait_for
from tests.training.runs import SHAPE
from twoaxis.model.load import load_model
from twoaxis.show.numbers import percent
from twoaxis.training.config import TrainConfig
from twoaxis.training.folder import load_log
from twoaxis.training.result import load_result

MODEL = ["--model", ",".join(f"{name}={value}" for name, value in SHAPE.items())]
DATA = ["--data", "task:recall:pairs=3", "--context", "24", "--eval-examples", "4"]
SMALL = [*MODEL, *DATA, "--batch", "4", "--no-measure-memory"]


def train(*arguments: str) -> Done:
    """The command on a wide terminal."""
    return run("train", *arguments, env={"COLUMNS": "300"})


def config_of(folder: Path) -> TrainConfig:
    return TrainConfig.from_dict(json.loads((folder / "run.json").read_text())["config"])


def test_train(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [*SMALL, "--out", str(folder), "--steps", "6", "--stream", "deep_delta:value_channels=2"]
    code, out, err = train(*arguments)
    result: Any = load_result(folder)
    assert code == 0
    assert f"held-out loss  {result.loss:.4f} nats per token" in out
    assert f"accuracy       {percent(result.accuracy, 2)} (chance 3.12%)" in out
    assert f"weights        {result.weights}\n" in out
    assert "6 steps, 576 tokens" in out
    assert f"model in {folder}/model" in out
    methods, data = "--stream deep_delta:value_channels=2", "--data task:recall:pairs=3"
    assert f"next           twoaxis compare --out {folder}-compared {methods} {data}\n" in out
    assert err.startswith("train: 576 tokens in ")
    assert len(err.splitlines()) == 1
    assert err.rstrip().split("  ")[-3:-1] == ["step 6", f"loss {result.train_loss:.4f}"]
    config = config_of(folder)
    assert config.model == SHAPE
    assert (config.stream, config.measure_memory, config.steps) == ("deep_delta:value_channels=2", False, 6)
    told = json.dumps(result.to_dict(), indent=1, ensure_ascii=False) + "\n"
    assert train(*arguments, "--json") == (0, told, "")  # finished: told again, not done again
    other = f"{folder} holds another run: lr is 0.004 there and 0.1 here. Choose another folder, or remove it"
    assert train(*arguments, "--lr", "0.1") == (2, "", f"twoaxis: {other}\n")
    wild = tmp_path / "wild"
    done = train(*SMALL, "--steps", "3", "--lr", "1e30", "--warmup", "0", "--out", str(wild))
    message = f"the gradient's norm of step 2 is nan; the run in {wild} was stopped there"
    assert (done.code, " ".join(done.out.split())[: len(message) + 9]) == (1, f"diverged {message}")


def test_methods_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import twoaxis\n"
        "from twoaxis.depth.standard import Standard\n"
        "@twoaxis.register('mine')\n"
        "class Mine(Standard):\n"
        "    pass\n"
    )
    arguments = [*SMALL, "--steps", "2", "--out", str(tmp_path / "run"), "--stream", "mine"]
    assert train(*arguments).code == 2
    assert train(*arguments, "--use", str(tmp_path / "mine.py")).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupted(number: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start("train", *SMALL, "--steps", "600", "--out", str(folder))
    try:
        wait_for((folder / "log.jsonl").exists, seconds=300)
        ended, said = end(process, number)
    finally:
        process.kill()
    assert ended == code
    assert said.startswith("twoaxis: stopped after step ")
    assert said.endswith("of 600; the same command goes on from there\n")
    assert len(list((folder / "checkpoints").iterdir())) == 1


DOCUMENTED: dict[str, dict[str, Any]] = {
    "runs/delta": {"stream": "deep_delta:value_channels=4", "steps": 2000},
    "runs/local": {"mixer": "short_swa:window=4", "data": ("notes", "letters.txt"), "tokens": 5_000_000}
    | {"tokenizer": "bytes"},
    "runs/recall": {"data": ("task:recall",), "context": 64, "model": {"hidden_size": 64, "num_hidden_layers": 2}},
    "runs/again": {"stream": "deep_delta:value_channels=4", "steps": 2000, "seed": 1},
    "runs/tuned": {"source": "runs/delta/model", "data": ("notes",), "lr": 1e-4},
    "runs/retrofit": {"source": "SmolLM2-135M", "stream": "denseformer", "train": "new+norms", "data": ("notes",)},
}
"""What the commands of the page ask for, by their folders."""


def test_documented_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take minutes; what they ask for is compared with the same fields given in Python."""
    asked: dict[str, TrainConfig] = {}

    def stop(config: TrainConfig, out: str, on_step: object) -> None:
        asked[out] = config
        raise ValueError(out)

    monkeypatch.setattr("twoaxis.training.train.train", stop)
    expected = {folder: TrainConfig(**fields) for folder, fields in DOCUMENTED.items()}
    delta = expected["runs/delta"]
    (tmp_path / "runs" / "delta").mkdir(parents=True)
    (tmp_path / "runs" / "delta" / "run.json").write_text(json.dumps({"config": delta.to_dict(), "key": delta.key}))
    for line in (ROOT / "docs" / "howto" / "train.md").read_text().splitlines():
        if line.startswith("twoaxis train ") and "--help" not in line:
            folder = line.partition("--out ")[2].split()[0]
            assert run(*shlex.split(line)[1:], folder=tmp_path) == (2, "", f"twoaxis: {folder}\n")
    assert asked == expected


def test_a_result_has_a_page_with_its_losses(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert train(*SMALL, "--out", str(folder), "--steps", "6", "--eval-every", "3").code == 0
    result: Any = load_result(folder)
    (chart,) = result.document().charts
    training, held_out = chart.panels[0].marks
    steps = [(r["tokens"], r["loss"]) for r in load_log(folder) if "loss" in r]
    assert steps == list(zip(training.x, training.y, strict=True))
    assert held_out.y[-1] == result.loss
    saved = result.save(folder / "report")
    assert {file.suffix for file in saved.files} == {".md", ".html", ".json", ".svg", ".png"}
    assert f"{result.loss:.4f} nats per token" in (folder / "report" / "report.html").read_text()
    assert result.exit_code == 0
    (folder / "log.jsonl").write_text('{"a": 1}\n{"tokens": "x", "loss": 1}\n{"tokens": 1, "loss": "y"}\n')
    assert result.document().charts == ()
    assert dataclasses.replace(result, status="diverged", message="the loss is nan").exit_code == 1


def test_a_family_is_trained_from_scratch(tmp_path: Path) -> None:
    """By its name and by a config.json, with the data and the values that our decoder has: the same run."""
    common = ["--steps", "4", *DATA, "--batch", "4", "--no-measure-memory", "--stream", "denseformer"]
    heads = SHAPE["num_attention_heads"]
    family = SHAPE | {"head_dim": SHAPE["hidden_size"] // heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-5}
    family |= {"tie_word_embeddings": True, "initializer_range": 0.06}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "qwen3", **family}))
    spelled = ",".join(f"{name}={value}" for name, value in family.items())
    ways = {"decoder": MODEL, "name": ["--family", "qwen3", "--model", spelled], "file": ["--config", str(file)]}
    for name, given in ways.items():
        assert train(*given, *common, "--out", str(tmp_path / name)).code == 0
    decoder, named, filed = results = [cast(Any, load_result(tmp_path / name)) for name in ways]
    assert named.weights == filed.weights
    assert filed.loss == pytest.approx(decoder.loss, rel=1e-5)
    assert len({(result.parameters, result.flops) for result in results}) == 1
    kept = config_of(tmp_path / "file")
    assert (kept.family, kept.model["hidden_size"]) == ("qwen3", SHAPE["hidden_size"])
    model: Any = load_model(tmp_path / "file" / "model", "cpu")
    assert model.config.text_config.model_type == "qwen3"
    assert train("--family", "qwen3", "--model", "hiden_size=32", *common, "--out", str(tmp_path / "x")).code == 2
    assert not (tmp_path / "x").exists()
