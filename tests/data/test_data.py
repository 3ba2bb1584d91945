"""`load_data`: what a run gets, from text and from tasks."""

from __future__ import annotations

import math
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.data.text_samples import load, settings, text, write_folder
from twoaxis.data.load import Data, load_data
from twoaxis.data.options import DataOptions
from twoaxis.data.packing import epoch_starts
from twoaxis.data.tasks import make_task
from twoaxis.data.tokenizer import Encoded
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.evaluate import evaluate


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "texts")


def ids(dataset: Any) -> torch.Tensor:
    return torch.stack([dataset[number]["input_ids"] for number in range(len(dataset))])


def test_what_a_run_gets(tmp_path: Path, folder: Path) -> None:
    data: Any = load_data(settings(tmp_path, folder))
    assert (data.name, data.vocab_size, data.context, data.end) == ("folder texts", 256, 32, 0)
    assert (data.answers, data.chance) == (False, None)
    again = load_data(settings(tmp_path, folder))
    assert again.fingerprint == data.fingerprint
    assert torch.equal(ids(data.train(3, 200)), ids(again.train(3, 200)))
    assert torch.equal(ids(data.train(3, 500))[:200], ids(data.train(3, 200)))  # a longer run begins like a shorter one
    assert not torch.equal(ids(data.train(3, 200)), ids(data.train(4, 200)))
    assert torch.equal(ids(data.held_out(10))[:5], ids(data.held_out(5)))
    assert len(data.held_out(10**6)) == len(data.corpus.held_out.tokens) // 32


def test_the_fingerprint_changes_with_the_tokens_only(tmp_path: Path, folder: Path) -> None:
    base = load(tmp_path, folder).fingerprint
    same: list[dict[str, Any]] = [{"eval_examples": 3}, {"cache": str(tmp_path / "other")}]
    for changes in same:
        assert load(tmp_path, folder, **changes).fingerprint == base
    other: list[dict[str, Any]] = [{"context": 31}, {"isolate": True}, {"held_out": 0.5}, {"tokenizer": "bpe:300"}]
    seen = {load(tmp_path, folder, **changes).fingerprint for changes in other}
    shutil.copytree(folder, tmp_path / "moved")
    assert load(tmp_path, tmp_path / "moved").fingerprint == base  # where texts come from does not matter
    with open(folder / "005.txt", "a") as file:
        file.write("!")
    seen.add(load(tmp_path, folder).fingerprint)
    assert len(seen - {base}) == 5


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_bytes_per_token_are_those_of_the_predicted_tokens(
    tmp_path: Path, folder: Path, tokenizer: str, isolate: bool
) -> None:
    data: Any = load(tmp_path, folder, tokenizer=tokenizer, isolate=isolate, eval_examples=7, final_examples=7)
    tokens = size = 0
    for number in range(7):
        item = data.held_out(7)[number]
        for token, label in zip(item["input_ids"][1:].tolist(), item["labels"][1:].tolist(), strict=True):
            if label != -100:
                tokens += 1
                if token == data.end:
                    continue
                known = data.corpus.tokenizer
                size += 1 if tokenizer == "bytes" else len(known.tokenizer.convert_ids_to_tokens(token))
    assert data.held_out(7).predicted(data.corpus.sizes) == (tokens, size)
    assert data.bytes_per_token == size / tokens
    assert tokens <= 7 * 31
    assert (data.corpus.sizes.sum(), len(data.corpus.sizes)) == (
        data.describe()["held_out"]["bytes"],
        data.describe()["held_out"]["tokens"],
    )


def test_bits_per_byte_are_those_of_eval(tmp_path: Path, folder: Path) -> None:
    data: Any = load(tmp_path, folder, tokenizer="bpe:300", eval_examples=5, final_examples=5)
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model: Any = Decoder(ModelConfig(**shape, num_attention_heads=2, initializer_range=0.3)).double()
    rows = data.held_out(5)
    batch = ids(rows)
    loss = torch.nn.functional.cross_entropy(model(batch)[:, :-1].reshape(-1, 300), batch[:, 1:].reshape(-1)).item()
    sizes = [np.array(data.corpus.sizes[start : start + 32]) for start in map(rows.start, range(5))]
    encoded = [Encoded(row.numpy(), size) for row, size in zip(batch, sizes, strict=True)]
    found = evaluate(model, encoded, context=32, stride=16)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.bits_per_byte == pytest.approx(loss / math.log(2) / data.bytes_per_token, rel=1e-12)


def test_a_single_document_has_a_gap(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text(text(3, 600), encoding="utf-8")
    data = load(tmp_path, tmp_path / "one.txt", held_out=0.3)
    assert data.name == "file one.txt"
    assert data.train_tokens == len(data.corpus.train.tokens) - 32
    furthest = max(int(epoch_starts(data.train_tokens, 32, 0, epoch).max()) for epoch in range(200))
    assert furthest + 32 <= data.train_tokens
    assert data.notes()[0] == "one document only: its end is held out, and the 32 tokens before the cut are not used"
    with pytest.raises(ValueError, match="the training part has 0 after a gap of 3,000 before the cut, of"):
        load(tmp_path, tmp_path / "one.txt", held_out=0.3, context=3000)


def test_what_is_said_of_it(tmp_path: Path, folder: Path) -> None:
    (folder / "copy.txt").write_bytes((folder / "000.txt").read_bytes())
    (folder / "zero.bin").write_bytes(b"\0")
    (folder / ".hidden").write_text("x")
    records = [f"record {n} {n * n}" for n in range(30)]
    (tmp_path / "more.jsonl").write_text("".join(f'{{"text": "{record}"}}\n' for record in records))
    data = load(tmp_path, folder, tmp_path / "more.jsonl", tokenizer="bpe:300")
    assert data.name == "folder texts + file more.jsonl"
    facts = data.describe()
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 70
    size = sum(len(each.encode()) for each in (*(text(n, 120) for n in range(40)), *records))
    assert facts["train"]["bytes"] + facts["held_out"]["bytes"] == size
    assert facts["train"]["rows"] == data.rows
    assert (facts["tokenizer"], facts["vocab_size"], facts["duplicates"]) == ("bpe:300", 300, 1)
    assert facts["skipped"] == {"hidden": 1, "binary": 1}
    assert facts["notes"][:2] == ["passed over: 1 binary, 1 hidden", "left out because the same text came before: 1"]
    row = data.train(0, 3)[2]["input_ids"].tolist()
    assert data.excerpt(2) == data.corpus.tokenizer.decode(row)
    assert "<|endoftext|>" in "".join(data.excerpt(n) for n in range(data.rows))


def test_too_little_text(tmp_path: Path, folder: Path) -> None:
    data = load(tmp_path, folder)
    tokens, size = len(data.corpus.held_out.tokens), data.corpus.facts["held_out"]["bytes"]
    assert len(load(tmp_path, folder, context=tokens).held_out(9)) == 1
    message = (
        f"folder texts is too little text for a context of {tokens + 1:,} tokens: the held-out part has {tokens:,}, "
        f"of {size:,} bytes; give more text, a smaller context or a larger held_out than 0.2"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(tmp_path, folder, context=tokens + 1)
    with pytest.raises(ValueError, match=r"the training part has .* or a smaller held_out than 0\.9"):
        load(tmp_path, folder, held_out=0.9, context=10_000)
    facts = load(tmp_path, write_folder(tmp_path / "few", 2, words=200), held_out=0.01).describe()
    assert (facts["train"]["documents"], facts["held_out"]["documents"]) == (1, 1)
    assert any("of the bytes are held out, not 1.0%: documents stay whole" in note for note in facts["notes"])


@pytest.mark.slow
def test_the_standard_library_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    data = load_data(DataOptions(cache=str(tmp_path)))
    assert (data.vocab_size, data.describe()["python"]) == (2048, platform.python_version())
    assert 2.8 < data.bytes_per_token < 3.6  # type: ignore[operator]
    assert load_data(DataOptions(cache=str(tmp_path / "again"))).fingerprint == data.fingerprint


def test_tasks(tmp_path: Path) -> None:
    data: Any = load_data(settings(tmp_path, "task:recall:pairs=4,values=4", context=24))
    task = make_task("recall", context=24, pairs=4, values=4)
    assert (data.name, data.vocab_size, data.context) == ("task:recall:pairs=4,values=4", task.vocab_size, 24)
    assert (data.answers, data.chance, data.bytes_per_token, data.end) == (True, task.chance, None, None)
    for seed in (0, 7):
        made, rows = task.examples(seed, 0, 150), data.train(seed, 150)
        for number in (149, 0, 63, 64):
            assert rows[number]["input_ids"].tolist() == made.input_ids[number].tolist()
            assert rows[number]["labels"].tolist() == made.labels[number].tolist()
    held = task.examples(0, 0, 20, held_out=True)
    assert torch.equal(ids(data.held_out(20)), torch.tensor(held.input_ids))
    assert not torch.equal(ids(data.held_out(20)), ids(data.train(0, 20)))
    with pytest.raises(IndexError, match="example 20 of 20"):
        data.held_out(20)[20]
    loader = torch.utils.data.DataLoader(data.train(0, 64), batch_size=8, num_workers=2)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in loader]), ids(data.train(0, 64)))
    prints = {load_data(settings(tmp_path, spec, context=24)).fingerprint for spec in ("task:recall", "task:local")}
    prints |= {load_data(settings(tmp_path, "task:recall:pairs=4,values=4", context=n)).fingerprint for n in (24, 25)}
    assert len(prints) == 4
    assert data.fingerprint in prints
    facts = data.describe()
    assert (facts["options"]["pairs"], facts["chance"], facts["task"]) == (4, task.chance, "recall")
    assert data.excerpt(3, seed=2) == task.show(task.examples(2, 3, 1))
    data.save_tokenizer(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("task:", "'task:' names no task"),
        ("task:recall:context=9", "the context of task:recall is the run's: give --context 9"),
        ("task:recall:pairs", "'pairs' in 'recall:pairs' is no option"),
        ("stdlib task:recall", "task:recall cannot be mixed with other data: stdlib, task:recall"),
    ],
)
def test_tasks_that_there_are_not(tmp_path: Path, spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_data(settings(tmp_path, *spec.split()))


def test_tokenizers_of_a_run_are_saved_beside_its_model(tmp_path: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    data: Data = load(tmp_path, folder, tokenizer="bpe:300")
    data.save_tokenizer(tmp_path / "model")
    loaded: Any = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (len(loaded), loaded.eos_token_id) == (300, data.end)
    as_given = load(tmp_path, folder, tokenizer=str(tmp_path / "model"))
    assert torch.equal(ids(as_given.held_out(5)), ids(data.held_out(5)))
    assert as_given.fingerprint == data.fingerprint
    load(tmp_path, folder).save_tokenizer(tmp_path / "bytes")
    assert not (tmp_path / "bytes").exists()
