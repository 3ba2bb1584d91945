"""`twoaxis data` as a person meets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from transformers.utils import logging

from tests.data.text_samples import load, write_folder
from twoaxis import cli


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """The command silences transformers in its process, which here belongs to other tests too."""
    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


class Run:
    """The entry point in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str | Path) -> tuple[object, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["twoaxis", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = self.capsys.readouterr()
        return stopped.value.code, shown.out, shown.err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def test_text(tmp_path: Path, run: Run) -> None:
    folder = write_folder(tmp_path / "texts")
    options = ["--data", folder, "--tokenizer", "bpe:300", "--context", "32", "--held-out", "0.2", "--isolate"]
    options += ["--cache", tmp_path / "cache"]
    code, out, err = run(*options, "--examples", "2", "--seed", "4")
    data = load(tmp_path, folder, tokenizer="bpe:300", isolate=True)
    facts = data.describe()
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["tokenizer", "tokenise"]
    lines = dict(line.split(None, 1) for line in out.split("\n\n")[0].splitlines())
    assert lines["data"] == "folder texts"
    assert lines["fingerprint"] == data.fingerprint
    assert lines["train"].endswith(f"{facts['train']['tokens']:,} tokens, {data.rows:,} rows of 32")
    assert lines["tokenizer"] == f"bpe:300, 300 tokens, {data.bytes_per_token:.3f} bytes per predicted held-out token"
    for number in range(2):
        shown = "\n".join(f"  | {line}" for line in data.excerpt(number, seed=4).splitlines())
        assert f"\nexample {number} of seed 4\n{shown}\n" in out
    code, out, err = run(*options, "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert {name: document[name] for name in facts} == facts
    assert document["examples"] == [data.excerpt(0)]


def test_tasks(run: Run) -> None:
    code, out, _ = run("--data", "task:recall:pairs=4,values=4", "--context", "24", "--examples", "1")
    assert code == 0
    assert "\nchance         accuracy 0.25, loss 1.3863 nats\n" in out
    assert "\nsolver         accuracy 1 over " in out
    assert "→v" in out.splitlines()[-1]
    code, out, _ = run("--data", "task:recall:pairs=4,values=4", "--context", "24", "--json")
    document = json.loads(out)
    assert (code, document["solver"]["accuracy"], document["options"]["pairs"]) == (0, 1.0, 4)
    assert document["solver"]["answers"] > 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "task:recal"), "twoaxis: unknown task 'recal' (did you mean 'recall'?)"),
        (("--data", "stdlb"), "twoaxis: there is no file or folder stdlb (did you mean 'stdlib'?)"),
        (("--context", "1"), "twoaxis: context must be at least 2"),
        (("--examples", "-1"), "twoaxis: examples must not be negative, got -1"),
        (("--tokenizer", "bpe:9"), "twoaxis: tokenizer 'bpe:9' is too small"),
        (("--held-out", "0"), "twoaxis: held_out is 0.0: nothing would be left"),
    ],
)
def test_mistakes_are_one_line(run: Run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
