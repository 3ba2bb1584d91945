"""`twoaxis inspect` as a person meets it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tests.inspection.helpers import PROMPT, make
from twoaxis import cli
from twoaxis.inspection.page import page


@pytest.fixture(autouse=True)
def notes() -> Iterator[None]:
    """The command silences transformers in its process, which here belongs to other tests too."""
    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "saved"
    make(stream="attention_residuals").save_pretrained(path)
    return path


class Result(SimpleNamespace):
    code: int
    out: str
    err: str


class Command:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, stdin: bytes = b"") -> Result:
        self.monkeypatch.setattr(sys, "argv", ["twoaxis", "inspect", *arguments])
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        shown = self.capsys.readouterr()
        return Result(code=stopped.value.code, out=shown.out, err=shown.err)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "120")
    return Command(monkeypatch, capsys)


def test_tables_on_stdout(folder: Path, run: Command) -> None:
    done = run(str(folder), "--prompt", "Hello", "--bytes")
    assert done.code == 0, done.err
    assert done.err == ""
    assert "attention_residuals; 2 blocks of width 32" in done.out
    assert "a prompt of 5 tokens." in " ".join(done.out.split())
    rows = [line for line in done.out.splitlines() if line.startswith("0 attention")]
    assert len(rows) == 1
    assert rows[0].endswith("1  embedding 1")


def test_json_and_files(folder: Path, run: Command, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = run(str(folder), "--prompt", PROMPT, "--bytes", "--json", "--out", str(tmp_path / "out"))
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["prompt"] == PROMPT
    assert made["model"] == str(folder)
    assert made["tokenizer"] == "bytes"
    names = {"inspect.html", "inspect.json", "sources.png", "sources.svg", "depth.png", "depth.svg"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == names
    assert all(str(tmp_path / "out" / name) in done.err for name in names)
    assert (tmp_path / "out" / "inspect.html").read_text() == page(made)
    again = run(str(folder), "--prompt", "-", "--bytes", "--out", str(tmp_path / "out"), stdin=b"other\n")
    assert again.code == 0, again.err
    assert json.loads((tmp_path / "out" / "inspect.json").read_text())["prompt"] == "other"


def test_mistakes_end_in_one_line(folder: Path, run: Command, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inspect.html").write_text("mine")
    model, text = str(folder), ("--prompt", "x")
    for arguments, message in [
        ((model, "--bytes"), "the prompt is empty: give some text with --prompt"),
        ((model, "--bytes", "--prompt", "-"), "the prompt is empty"),
        (
            (model, *text),
            "has no tokenizer (tokenizer.json, tokenizer_config.json); if its tokens are bytes, say --bytes",
        ),
        ((model, "--bytes", "--prompt", "x" * 65), "the prompt has 65 tokens, the model is made for 64"),
        ((str(tmp_path / "empty"), *text), "has no config.json; give a folder that save_pretrained"),
        ((str(tmp_path / "nowhere"), *text), "there is no folder"),
        ((model, *text, "--bytes", "--out", str(tmp_path / "file")), "is a file; give a folder"),
        ((model, *text, "--bytes", "--out", str(tmp_path / "file" / "in")), "Not a directory"),
        ((model, *text, "--bytes", "--out", str(tmp_path / "taken")), "has inspect.html, which no inspection wrote"),
        ((model, *text, "--bytes", "--device", "nowhere"), "device 'nowhere' cannot be used"),
    ]:
        done = run(*arguments)
        assert done.code == 2, (arguments, done)
        assert done.out == ""
        assert done.err.startswith("twoaxis: ")
        assert done.err.count("\n") == 1, done.err
        assert message in done.err
    assert (tmp_path / "taken" / "inspect.html").read_text() == "mine"


def test_a_tokenizer_s_tokens_are_shown_as_the_text_they_stand_for(folder: Path, run: Command, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {word: number for number, word in enumerate(("<s>", "?", "The", "stream", "adds"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(tmp_path)
    done = run(str(tmp_path), "--prompt", "The stream adds", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["tokens"] == [
        {"id": 0, "text": ""},
        {"id": 2, "text": "The"},
        {"id": 3, "text": " stream"},
        {"id": 4, "text": " adds"},
    ]


def test_as_a_process_with_an_encoding_too_narrow_for_the_prompt(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twoaxis", "inspect", str(folder), "--prompt", "Grüße", "--bytes"],
        capture_output=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    assert b"a prompt of 7 tokens." in b" ".join(done.stdout.split())
