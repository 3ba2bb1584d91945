"""`twoaxis data` as a person meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
