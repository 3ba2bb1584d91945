"""The most likely mistakes of somebody new: one line that says what to do instead, and exit code 2."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.support.commands import run

OUT = ("--out", "out")
MISTAKES = {
    "a command's name": (("compair", *OUT), "unknown command 'compair' (did you mean 'compare'?)"),
    "a method's name": (("train", *OUT, "--stream", "mhcc"), "unknown stream 'mhcc' (did you mean 'mhc'?)"),
    "a method's option": (("cost", "--stream", "mhc:stream=4"), "has no option 'stream' (did you mean 'streams'?)"),
    "an option": (("generate", "hf", "--promt", "x"), "--prompt"),
    "a check's name": (("verify", "--only", "dualty"), "did you mean 'duality'?); the families are contract"),
    "a file of one's own": (("check", "none.py"), "there is no file none.py"),
    "a method on the map": (("methods", "densformer"), "did you mean 'denseformer'"),
    "a column": (("methods", "--columns", "colour"), "the columns are"),
    "a path": (("generate", "nowhere"), "there is no folder nowhere"),
    "a missing file": (("train", *OUT, "--config", "none.toml"), "none.toml cannot be read"),
    "missing text": (("train", *OUT, "--data", "none.txt"), "none.txt"),
    "nothing to evaluate": (("eval", "ours"), "name text files or folders with --data"),
    "a model of transformers": (("generate", "hf"), "twoaxis retrofit hf --stream denseformer --out hf-denseformer"),
    "a comparison in place of a model": (("inspect", "compared", "--prompt", "x"), "such as compared/runs/a/model"),
    "a run without a model": (("generate", "unfinished"), "it is not finished, or was made with --no-save-model"),
    "a model in place of a comparison": (("report", "ours"), "give the --out of twoaxis compare"),
    "a method of an unknown file": (("generate", "theirs"), "add --use /home/me/my_stream.py"),
    "no GPU": (("train", *OUT, "--data", "task:recall", "--device", "cuda"), "torch finds no GPU here; give cpu"),
    "a stream more": (("train", *OUT, "--stream", "mhc", "--stream", "ddl"), "twoaxis compare takes several"),
    "an option twice": (("cost", "--shape", "nano", "--shape=tiny"), "--shape is given 2 times; give it once"),
    "a word alone": (("data", "notes.txt"), "'notes.txt' stands alone; options are --NAME VALUE"),
    "a choice": (("advise", "--goal", "speed"), "Expected one of any, mixing, retrieval, shortcut."),
    "a contender's name": (("compare", *OUT, "--stream", "mhcc", "--data", "none.txt"), "did you mean 'mhc'?"),
    "a checkpoint in a pickle": (("generate", "pickled"), "save them as safetensors"),
}


def write(path: Path, document: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with what people have lying about."""
    write(tmp_path / "hf" / "config.json", {"model_type": "llama"})
    write(tmp_path / "compared" / "compare.json", {})
    write(tmp_path / "compared" / "runs" / "a" / "model" / "config.json", {"model_type": "twoaxis"})
    write(tmp_path / "unfinished" / "run.json", {})
    for name in ("ours", "theirs", "pickled"):
        write(tmp_path / name / "config.json", {"model_type": "twoaxis", "stream": "standard"})
        (tmp_path / name / ("model.bin" if name == "pickled" else "model.safetensors")).write_bytes(b"")
    origin = {"file": "/home/me/my_stream.py", "sha256": "0"}
    write(tmp_path / "theirs" / "methods.json", {"format": 1, "methods": {"my_stream": origin}})
    return tmp_path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_to_do(mistake: str, place: Path) -> None:
    words, message = MISTAKES[mistake]
    before = set(place.rglob("*"))
    done = run(*words, folder=place)
    assert done.code == 2, done.out + done.err
    (line,) = done.err.splitlines()
    assert line.startswith("twoaxis: ")
    assert message in line
    assert set(place.rglob("*")) == before


def test_a_missing_package_names_the_line_that_installs_it(place: Path) -> None:
    with mock.patch.dict(sys.modules, {"transformers": None}):
        done = run("retrofit", "hf", *OUT, folder=place)
    assert done.code == 2
    assert 'pip install -e ".[lab]" (in a clone of twoaxis)' in done.err
