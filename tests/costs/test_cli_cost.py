"""`twoaxis cost` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import run

SMALL = ("cost", "--shape", "nano", "--context", "64")


def test_one_document() -> None:
    words = (*SMALL, "--stream", "attention_residuals:block_size=2", "--mixer", "canon", "--grid", "--json")
    done = run(*words, "--pipeline-stages", "2", "--virtual-stages", "2", "--batch", "3", "--prefill-chunk", "8")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    labels = [row["label"] for row in found["methods"]]
    stream = "attention_residuals:block_size=2"
    assert labels == ["standard", stream, "standard + canon", f"{stream} + canon"]
    plain, blocks, *_ = found["methods"]
    assert plain["ratio"]["train"] == {"eager": 1.0, "fused": 1.0}
    assert blocks["parameters"]["added"] == 2 * 128 * 9
    assert len(blocks["traffic"]["sites"]) == 9
    live = blocks["live"]["numbers"]
    assert live >= 4 * 128  # what crosses into the last block
    assert blocks["live"] == {"numbers": live, "training": live * 2 * 64, "prefill": live * 2 * 3 * 8}
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


def test_a_memory_that_is_too_small_names_the_remedy() -> None:
    words = ("cost", "--shape", "smollm2-135m", "--micro-batch", "64", "--context", "8192", "--stream", "standard")
    done = run(*words)
    assert done.code == 0
    shown = " ".join(done.out.split())
    assert "It does not fit: " in shown
    assert "recomput" in shown.partition("It does not fit: ")[2]
