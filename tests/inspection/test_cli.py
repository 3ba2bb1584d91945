"""`twoaxis inspect` as a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.inspection.helpers import PROMPT, make
from tests.support import commands
from tests.support.commands import Done
from twoaxis.model.save import save_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "saved"
    path.mkdir()
    save_decoder(path, make(stream="attention_residuals"))
    return path


def run(*words: str, **options: Any) -> Done:
    return commands.run("inspect", *words, env={"COLUMNS": "120"}, **options)


def test_tables_on_stdout(folder: Path) -> None:
    done = run(str(folder), "--prompt", "Hello", "--bytes")
    assert done.code == 0, done.err
    assert done.err == ""
    assert "attention_residuals; 2 blocks of width 32" in done.out
    assert "a prompt of 5 tokens." in " ".join(done.out.split())
    assert len([line for line in done.out.splitlines() if line.startswith("0 attention")]) == 2


def test_json_and_files(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    done = run(str(folder), "--prompt", PROMPT, "--bytes", "--json", "--out", str(out))
    assert done.code == 0, done.err
    made = json.loads(done.out)
    assert made["prompt"] == PROMPT
    assert [(model["model"], model["tokenizer"]) for model in made["models"]] == [(str(folder), "bytes")]
    drawn = {f"inspect-{name}.{form}" for name in ("sources", "depth") for form in ("png", "svg")}
    names = {"inspect.html", "inspect.json", "inspect.md", *drawn}
    assert {p.name for p in out.iterdir()} == names
    assert f"wrote {out / 'inspect.html'} and {len(names) - 1} more" in done.err
    (out / "inspect-old.png").write_text("")  # of an earlier one with more to draw
    again = run(str(folder), "--prompt", "-", "--bytes", "--out", str(out), "--beside", str(folder), stdin=b"other\n")
    assert again.code == 0, again.err
    record = json.loads((out / "inspect.json").read_text())
    assert (record["prompt"], len(record["models"])) == ("other", 2)
    assert not (out / "inspect-old.png").exists()


def test_mistakes_end_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "inspect.html").write_text("mine")
    model, text = str(folder), ("--prompt", "x")
    for arguments, message in [
        ((model, "--bytes"), "the prompt is empty: give some text with --prompt"),
        (
            (model, *text),
            "has no tokenizer (tokenizer.json, tokenizer_config.json); if its tokens are bytes, say --bytes",
        ),
        ((model, *text, "--beside", str(tmp_path / "nowhere")), "there is no folder"),
        ((model, *text, "--bytes", "--out", str(tmp_path / "file")), "exists and is not an empty folder"),
        ((model, *text, "--bytes", "--out", str(tmp_path / "taken")), "exists and is not an empty folder"),
    ]:
        done = run(*arguments)
        assert done.code == 2, (arguments, done)
        assert done.out == ""
        assert done.err.startswith("twoaxis: ")
        assert done.err.count("\n") == 1, done.err
        assert message in done.err
    assert (tmp_path / "taken" / "inspect.html").read_text() == "mine"


def test_a_tokenizer_s_tokens_are_shown_as_the_text_they_stand_for(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    words = {word: number for number, word in enumerate(("<s>", "?", "The", "stream", "adds"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>").save_pretrained(tmp_path)
    done = run(str(tmp_path), "--prompt", "The stream adds", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["models"][0]["tokens"] == [
        {"id": 0, "text": ""},
        {"id": 2, "text": "The"},
        {"id": 3, "text": " stream"},
        {"id": 4, "text": " adds"},
    ]


def test_an_encoding_too_narrow_for_the_prompt(folder: Path) -> None:
    done = run(str(folder), "--prompt", "Grüße", "--bytes", encoding="ascii")
    assert done.code == 0, done.err
    assert "a prompt of 7 tokens." in " ".join(done.out.split())
