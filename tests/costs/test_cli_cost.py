"""`twoaxis cost` as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from twoaxis import cli

SMALL = ("cost", "--shape", "nano", "--context", "64")


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["twoaxis", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*SMALL, "--stream", "attention_residuals:block_size=2", "--mixer", "canon", "--grid", "--json")
    assert run(monkeypatch, *words, "--pipeline-stages", "2", "--virtual-stages", "2") == 0
    found = json.loads(capsys.readouterr().out)
    labels = [row["label"] for row in found["methods"]]
    stream = "attention_residuals:block_size=2"
    assert labels == ["standard", stream, "standard + canon", f"{stream} + canon"]
    plain, blocks, *_ = found["methods"]
    assert plain["ratio"]["train"] == {"naive": 1.0, "fused": 1.0}
    assert blocks["parameters"]["added"] == 2 * 128 * 9
    assert len(blocks["traffic"]["sites"]) == 9
    assert [b["naive"] for b in blocks["pipeline"]["boundaries"]] == [2 * 256, 3 * 256, 4 * 256]
    assert [b["cached"] for b in blocks["pipeline"]["boundaries"]] == [2 * 256, 256, 256]
    assert found["deployment"]["virtual_stages"] == 2
    assert found["hardware"]["name"] == "h100"


def test_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *SMALL, "--stream", "deep_delta:value_channels=4,expand=conv", "--sites") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("IN SHORT", "MEMORY OF THE FULLEST DEVICE", "65% of 989 TFLOPS", "3 mlp", "It fits: "):
        assert words in shown, words


def test_figures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from twoaxis.costs import plots

    for name, few in (("DEPTHS", (2, 4)), ("CONTEXTS", (64, 128)), ("WINDOWS", (1, 4))):
        monkeypatch.setattr(plots, name, few)
    words = ("--stream", "attention_residuals", "--mixer", "short_swa:window=4", "--plot", str(tmp_path / "plots"))
    assert run(monkeypatch, *SMALL, *words) == 0
    assert "stages.svg" in capsys.readouterr().err
    for name in ("depth", "context", "window", "stages"):
        text = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert text.lstrip().startswith("<?xml")
        assert len(text) > 10_000


def test_the_plain_residual_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It stands for itself: no ratios to itself in the summary, and a stage's time is called so."""
    assert run(monkeypatch, *SMALL) == 0
    alone = capsys.readouterr().out
    summary = " ".join(alone.partition("IN SHORT")[2].partition("PARAMETERS AND")[0].split())
    assert summary.startswith("- standard: ")
    assert "131 kB of keys and values" in summary  # 64 tokens x 4 blocks x 2 x 128 numbers of 2 bytes
    assert "plain residual" not in summary
    assert "of a stage" not in " ".join(alone.split())
    assert run(monkeypatch, *SMALL, "--pipeline-stages", "2") == 0
    staged = capsys.readouterr().out
    assert "stage," in staged.partition("TIME, AS A RATIO")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pipeline-stages", "3"), "4 blocks cannot be cut into 3 stages; the nearest number of stages is 2"),
        (("--hardware", "h101"), "unknown hardware 'h101' (did you mean 'h100'?)"),
        (("--micro-batch", "-2"), "micro_batch must be at least 1, got -2"),
        (("--stream", "deep_dleta"), "unknown stream 'deep_dleta' (did you mean 'deep_delta'?)"),
        (("--stream", "deep_delta:chanels=2"), "deep_delta has no option 'chanels'"),
        (("--out", "p.json"), "--out is where --calibrate writes its profile"),
        (("--hardware", "no/p.json"), "there is no hardware profile no/p.json; make one with twoaxis cost --calibrate"),
        (("--grid", "--stream", "deep_delta"), "--grid pairs streams with mixers"),
        (("--calibrate", "--mixer", "canon"), "--calibrate runs on methods of its own; leave out --mixer"),
        (("--calibrate", "--published"), "--calibrate runs on methods of its own; leave out --published"),
        (("--published", "--stream", "deep_delta", "--sites"), "--published runs on methods of its own; leave out"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *SMALL, *words) == 2
    assert f"twoaxis: {message}" in capsys.readouterr().err


def test_a_memory_that_is_too_small_names_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("cost", "--shape", "smollm2-135m", "--micro-batch", "64", "--context", "8192", "--stream", "standard")
    assert run(monkeypatch, *words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "It does not fit: " in shown
    assert "recomput" in shown.partition("It does not fit: ")[2]


def test_help_does_not_load_torch() -> None:
    script = (
        "import sys\nfrom twoaxis import cli\nsys.argv = ['twoaxis', 'cost', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "assert 'torch' not in sys.modules\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("--pipeline-stages", "--calibrate", "Predict what streams and mixers cost"):
        assert words in done.stdout
