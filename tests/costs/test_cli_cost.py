"""`twoaxis cost` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run

SMALL = ("cost", "--shape", "nano", "--context", "64")


def test_one_document() -> None:
    words = (*SMALL, "--stream", "attention_residuals:block_size=2", "--mixer", "canon", "--grid", "--json")
    done = run(*words, "--pipeline-stages", "2", "--virtual-stages", "2")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    labels = [row["label"] for row in found["methods"]]
    stream = "attention_residuals:block_size=2"
    assert labels == ["standard", stream, "standard + canon", f"{stream} + canon"]
    plain, blocks, *_ = found["methods"]
    assert plain["ratio"]["train"] == {"eager": 1.0, "fused": 1.0}
    assert blocks["parameters"]["added"] == 2 * 128 * 9
    assert len(blocks["traffic"]["sites"]) == 9
    assert [b["whole"] for b in blocks["pipeline"]["boundaries"]] == [2 * 256, 3 * 256, 4 * 256]
    assert [b["cached"] for b in blocks["pipeline"]["boundaries"]] == [2 * 256, 256, 256]
    assert found["deployment"]["virtual_stages"] == 2
    assert found["hardware"]["name"] == "h100"


def test_tables() -> None:
    done = run(*SMALL, "--stream", "deep_delta:value_channels=4,expand=conv", "--sites")
    assert done.code == 0, done.err
    shown = " ".join(done.out.split())
    for words in ("IN SHORT", "MEMORY OF THE FULLEST DEVICE", "65% of 989 TFLOPS", "3 mlp", "It fits: "):
        assert words in shown, words


def test_charts_and_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from twoaxis.costs import plots

    for name, few in (("DEPTHS", (2, 4)), ("CONTEXTS", (64, 128)), ("WINDOWS", (1, 4))):
        monkeypatch.setattr(plots, name, few)
    words = ("--stream", "attention_residuals", "--mixer", "short_swa:window=4", "--plot", str(tmp_path / "plots"))
    done = run(*SMALL, *words, "--html", str(tmp_path / "page.html"))
    assert done.code == 0, done.err
    assert "stages.svg" in done.err
    for name in ("depth", "context", "window", "stages"):
        text = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert text.startswith("<svg")
        assert "attention_residuals" in text
    page = (tmp_path / "page.html").read_text()
    for words in ("Memory of the fullest device", "Time as a ratio to the plain residual", "<svg", "time of"):
        assert words in page, words


def test_the_plain_residual_alone() -> None:
    """It stands for itself: no ratios to itself in the summary, and a stage's time is called so."""
    alone = run(*SMALL).out
    summary = " ".join(alone.partition("IN SHORT")[2].partition("PARAMETERS AND")[0].split())
    assert summary.startswith("- standard: ")
    assert "131 kB of keys and values" in summary  # 64 tokens x 4 blocks x 2 x 128 numbers of 2 bytes
    assert "plain residual" not in summary
    assert "of a stage" not in " ".join(alone.split())
    staged = run(*SMALL, "--pipeline-stages", "2").out
    assert "stage," in staged.partition("TIME, AS A RATIO")[2]


def profile(**changes: Any) -> str:
    """A hardware file with some fields changed."""
    from twoaxis.costs.hardware import DATA

    return json.dumps({**json.loads(DATA.read_text())["profiles"]["h100"], **changes})


@pytest.mark.parametrize(
    ("words", "file", "message"),
    [
        (("--hardware", "h101"), None, "unknown hardware 'h101' (did you mean 'h100'?); give one of a100, h100"),
        (("--hardware", "no/p.json"), None, "there is no hardware profile no/p.json; make one with twoaxis cost"),
        (("--hardware", "FILE"), "[1", "FILE is not a JSON document"),
        (("--hardware", "FILE"), "[]", "FILE is no hardware profile: it must be an object, got []"),
        (("--hardware", "FILE"), '{"title": "x"}', "FILE is no hardware profile: it has no kind; copy an entry of"),
        (
            ("--hardware", "FILE"),
            profile(kind="tpu"),
            "FILE: unknown kind 'tpu' (did you mean 'gpu'?); it is one of gpu, cpu",
        ),
        (("--hardware", "FILE"), profile(bandwidth="fast"), "bandwidth must be a finite number, got 'fast'"),
        (("--hardware", "FILE"), profile(matmul={"bfloat16": 1}), "it has no matmul.float16; copy"),
        (("--hardware", "FILE"), profile(clock={}), "it has no clock.overhead; copy an entry of"),
        (("--save", "p.json"), None, "--save keeps times of this machine: give --hardware here, got 'h100'"),
        (("--grid", "--stream", "deep_delta"), None, "--grid pairs streams with mixers; give at least one"),
        (("--published", "--stream", "deep_delta", "--sites"), None, "--published runs on methods of its own;"),
        (("--shape", "lama-3-8b"), None, "unknown shape 'lama-3-8b' (did you mean 'llama-3-8b'?); give a config.json"),
        (("--shape", "no/where.json"), None, "there is no configuration file no/where.json"),
        (("--shape", "FILE"), "{", "FILE is not a JSON document"),
        (("--shape", "FILE"), "{}", "FILE has no model_type"),
        (("--shape", "FILE"), '{"model_type": "lama"}', "FILE: transformers has no family 'lama' of causal language"),
        (
            ("--shape", "FILE"),
            '{"model_type": "llama", "hidden_size": "big"}',
            "FILE: text_config.hidden_size must be an integer, got 'big'",
        ),
        (
            ("--shape", "FILE"),
            '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 0}',
            "FILE: text_config.num_hidden_layers must be at least 1, got 0",
        ),
        (("--stream", "deep_dela"), None, "unknown stream 'deep_dela' (did you mean 'deep_delta'?)"),
        (("--stream", "standard:train.lr=1"), None, "standard:train.lr=1: train.lr changes the training"),
        (("--stream", "standard:model.hiden_size=1"), None, "a decoder has no field 'hiden_size' (did you mean"),
        (("--pipeline-stages", "3"), None, "4 blocks cannot be cut into 3 stages; the nearest number of stages is 2"),
        (("--virtual-stages", "2"), None, "2 virtual stages need a pipeline: give pipeline_stages of at least 2"),
        (("--tensor-parallel", "3"), None, "4 attention heads cannot be spread over 3 devices; the nearest number is"),
        (("--sequence-parallel",), None, "sequence parallelism needs tensor parallelism: give tensor_parallel"),
        (("--prefill-chunk", "65"), None, "a prefill chunk of 65 is longer than the context of 64"),
        (("--micro-batch", "0"), None, "micro_batch must be at least 1, got 0"),
    ],
)
def test_mistakes(tmp_path: Path, words: tuple[str, ...], file: str | None, message: str) -> None:
    """One line that says what is wrong and what to do, and exit code 2."""
    path = str(tmp_path / "file.json")
    if file is not None:
        Path(path).write_text(file)
    first = SMALL[:1] if "--shape" in words else SMALL  # an option that is given twice is a mistake of its own
    done = run(*first, *(path if word == "FILE" else word for word in words))
    assert (done.code, done.out) == (2, "")
    assert done.err.replace(path, "FILE").startswith("twoaxis: ")
    assert message in done.err.replace(path, "FILE")
    assert len(done.err.strip().splitlines()) == 1


def test_a_memory_that_is_too_small_names_the_remedy() -> None:
    words = ("cost", "--shape", "smollm2-135m", "--micro-batch", "64", "--context", "8192", "--stream", "standard")
    done = run(*words)
    assert done.code == 0
    shown = " ".join(done.out.split())
    assert "It does not fit: " in shown
    assert "recomput" in shown.partition("It does not fit: ")[2]


def test_help() -> None:
    done = run("cost", "--help")
    assert done.code == 0
    for words in ("--pipeline-stages", "--save", "Predict what streams and mixers cost"):
        assert words in done.out
