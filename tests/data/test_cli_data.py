"""`twoaxis data` as a person meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from tests.data.text_samples import load, write_folder
from tests.support.commands import run


def test_text(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "texts")
    options = ["--data", folder, "--tokenizer", "bpe:300", "--context", "32", "--held-out", "0.2", "--isolate"]
    options += ["--cache", tmp_path / "cache"]
    code, out, err = run("data", *map(str, options), "--examples", "2", "--seed", "4")
    data = load(tmp_path, folder, tokenizer="bpe:300", isolate=True)
    facts = data.describe()
    assert code == 0
    assert [line.split(":")[0] for line in err.splitlines()] == ["tokenizer", "tokenise"]
    lines = dict(re.split(r"  +", line, maxsplit=1) for line in out.strip().split("\n\n")[0].splitlines())
    assert lines["data"] == "folder texts"
    assert lines["fingerprint"] == data.fingerprint
    assert lines["train"].endswith(f"{facts['train']['tokens']:,} tokens, {data.rows:,} rows of 32")
    assert lines["tokenizer"] == f"bpe:300, 300 tokens, {data.bytes_per_token:.3f} bytes per predicted held-out token"
    for number in range(2):
        assert f"example {number} of seed 4" in out.lower()
        assert all(line.strip() in out for line in data.excerpt(number, seed=4).splitlines())
    code, out, err = run("data", *map(str, options), "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert {name: document[name] for name in facts} == facts
    assert document["examples"] == [data.excerpt(0)]


def test_tasks() -> None:
    code, out, _ = run("data", "--data", "task:recall:pairs=4,values=4", "--context", "24", "--examples", "1")
    assert code == 0
    assert "accuracy 0.25, loss 1.3863 nats" in out
    assert "accuracy 1 over " in out
    assert "→v" in out.splitlines()[-1]
    code, out, _ = run("data", "--data", "task:recall:pairs=4,values=4", "--context", "24", "--json")
    document = json.loads(out)
    assert (code, document["solver"]["accuracy"], document["options"]["pairs"]) == (0, 1.0, 4)
    assert document["solver"]["answers"] > 64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "task:recal"), "twoaxis: unknown task 'recal' (did you mean 'recall'?)"),
        (("--data", "stdlb"), "twoaxis: there is no file or folder stdlb (did you mean 'stdlib'?)"),
        (("--context", "1"), "twoaxis: context must be at least 2"),
        (("--examples", "-1"), "twoaxis: examples must lie between 0 and 1000, got -1"),
        (("--tokenizer", "bpe:9"), "twoaxis: tokenizer 'bpe:9' is too small"),
        (("--held-out", "0"), "twoaxis: held_out is 0.0: nothing would be left"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run("data", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
