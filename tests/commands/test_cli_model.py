"""`twoaxis generate` and `twoaxis eval` as a person meets them, on a tiny byte-level model."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import twoaxis
from tests.support.commands import run
from tests.support.foreign import byte_tokenizer
from twoaxis.commands.models import Continuation
from twoaxis.data.tokenizer import Bytes
from twoaxis.model.decoder import Decoder
from twoaxis.model.generate import Generated, generate
from twoaxis.model.load import load_model
from twoaxis.model.presets import preset
from twoaxis.model.save import save_decoder

PROMPT = "Grüße from the two axes"
TEXT = "The residual stream only adds along depth. ÄÖÜ\r\n" * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level model with a stream and a mixer that remember tokens."""
    torch.manual_seed(3)
    config = preset(
        "nano",
        vocab_size=260,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=48,
        initializer_range=0.3,
        tie_word_embeddings=False,
        max_position_embeddings=64,
        stream="deep_delta",
        stream_options={"value_channels": 2, "compress": "token"},
        mixer="canon",
    )
    path = tmp_path_factory.mktemp("model") / "saved"
    path.mkdir()
    save_decoder(path, Decoder(config, 3))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    (path / "a.txt").write_bytes(TEXT.encode())
    (path / "b.txt").write_text("short")
    return path


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    model: Any = load_model(folder, "cpu")
    ids = torch.tensor([list(prompt.encode())])
    made = model.generate(ids, tokens)[0, ids.shape[1] :]
    return bytes(t for t in made.tolist() if t < 256).decode(errors="replace")


def test_generate_prints_what_the_model_generates(folder: Path) -> None:
    words, text = ("generate", str(folder), "--tokens", "24", "--bytes", "--prompt"), greedy(folder, PROMPT, 24)
    done = run(*words, PROMPT)
    assert (done.code, done.out) == (0, text)
    time, cache = done.err.splitlines()
    assert time.startswith("24 tokens in ")
    assert time.endswith(f"tokens/s), prompt {len(PROMPT.encode())} tokens")
    assert cache.startswith("cache bytes: attention ")
    assert max(map(len, done.err.splitlines())) <= 80
    done = run(*words, PROMPT, "--json")
    made = json.loads(done.out)
    assert (made["prompt"], made["tokens"], made["text"], done.err) == (PROMPT, 24, text, "")
    assert text.rstrip("\n") in run(*words, PROMPT, "--markdown", "--echo").out
    assert run(*words, "-", "--echo", stdin=f"{PROMPT}\n".encode()).out == PROMPT + text
    refused = run(*words, "-", stdin=b"ab\xff")
    assert (refused.code, refused.err) == (2, "twoaxis: the prompt on stdin is not UTF-8: byte 2 cannot be read\n")
    (row,) = twoaxis.generate(str(folder), prompt=PROMPT, tokens=24, as_bytes=True).rows()
    assert (row["prompt"], row["text"]) == (PROMPT, text)


def test_the_cache_is_reported_by_part(folder: Path) -> None:
    model = load_model(folder, "cpu")
    made = generate(model, Bytes(260), PROMPT, tokens=10)
    seen = len(PROMPT.encode()) + 9  # the last token has not been read
    _, past = model.step(torch.zeros(1, seen, dtype=torch.long), model.start())
    assert made.cache_bytes == past.nbytes_by_part()
    assert all(size > 0 for size in made.cache_bytes.values())
    assert made.rate == 10 / made.seconds


def test_eval_prints_one_json_document(folder: Path, data: Path) -> None:
    done = run(
        *("eval", str(folder), "--data", str(data), str(data / "b.txt"), "--bytes", "--json"),
        *("--context", "16", "--stride", "5", "--batch", "3"),
    )
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert list(found) == [
        *("twoaxis", "torch", "model", "data", "tokenizer", "loss", "perplexity", "bits_per_byte", "tokens", "bytes"),
        *("documents", "context", "stride", "seconds", "tokens_per_second"),
    ]
    texts = [TEXT.encode(), b"short", b"short"]
    assert found["tokens"] == found["bytes"] == sum(len(text) - 1 for text in texts)
    assert (found["documents"], found["context"], found["stride"], found["tokenizer"]) == (3, 16, 5, "bytes")
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    model, total = load_model(folder, "cpu"), 0.0
    for text in texts:
        for at in range(1, len(text)):
            start = 0 if at < 16 else -(-(at - 15) // 5) * 5
            with torch.no_grad():
                logits = model(torch.tensor([list(text[start:at])]))[0, -1]
            total -= logits.log_softmax(-1)[text[at]].item()
    assert found["loss"] == pytest.approx(total / found["tokens"], rel=1e-5)
    (line,) = done.err.splitlines()  # no bar where nobody watches
    assert line.startswith(f"eval: {found['tokens']} tokens in ")
    shown = run("eval", str(folder), "--data", str(data), "--bytes", "--max-tokens", "40", "--device", "cpu").out
    heads = ["loss", "perplexity", "bits", "counted", "context", "time"]
    assert [line.split()[0] for line in shown.splitlines()] == heads
    assert "40 tokens, 40 bytes, 1 documents" in shown
    assert "context        64 tokens, stride 32, bytes" in shown


def test_the_folders_own_tokenizer(folder: Path, data: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = byte_tokenizer(merges=[("T", "h"), ("Ġ", "t")])
    tokenizer.save_pretrained(tmp_path)
    done = run("generate", str(tmp_path), "--prompt", PROMPT, "--tokens", "12")
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    model: Any = load_model(tmp_path, "cpu")
    made = model.generate(ids, 12)[0, ids.shape[1] :]
    assert done.out == tokenizer.decode(made)
    assert f"prompt {ids.shape[1]} tokens" in done.err
    assert ids.shape[1] < len(PROMPT.encode())
    found = run("eval", str(tmp_path), "--data", str(data / "a.txt"), "--json")
    document = json.loads(found.out)
    assert document["tokenizer"] == str(tmp_path)
    assert document["tokens"] == len(tokenizer(TEXT).input_ids) - 1
    assert document["bytes"] == len(TEXT.encode()) - 2  # the first token, Th, has nothing before it


def test_sampling_follows_its_seed(folder: Path) -> None:
    def sample(*arguments: str) -> str:
        done = run("generate", str(folder), "--prompt", "ab", "--bytes", "--tokens", "16", *arguments)
        assert done.code == 0, done.err
        return done.out

    hot = ("--temperature", "3.0")
    assert sample(*hot, "--seed", "1") == sample(*hot, "--seed", "1") != sample(*hot, "--seed", "2")
    assert sample(*hot, "--top-p", "1e-6") == sample()  # nothing but the likeliest is left


def test_an_end_of_text_token_ends_it(folder: Path) -> None:
    model = load_model(folder, "cpu")
    whole = generate(model, Bytes(260), PROMPT, tokens=12)
    ids = torch.tensor([list(PROMPT.encode())])
    made: list[int] = model.generate(ids, 12)[0, ids.shape[1] :].tolist()
    assert whole.tokens == 12
    model.config = dataclasses.replace(model.config, eos_token_id=made[3])
    said: list[str] = []
    short = generate(model, Bytes(260), PROMPT, tokens=12, say=said.append)
    assert short.tokens == made.index(made[3]) + 1
    assert "".join(said) == short.text


def test_a_model_that_has_diverged_says_so(folder: Path) -> None:
    model: Any = load_model(folder, "cpu")
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ValueError, match="logits after 2 tokens are not numbers"):
            generate(model, Bytes(260), "ab", temperature=temperature)


@pytest.mark.parametrize("together", [True, False])
def test_statistics_begin_a_line_of_their_own(together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the text goes to the same file; a text that goes elsewhere is left as it was made."""
    made = Generated("text", 1, 1, 2.0, {"attention": 8})
    places = [tmp_path / "out", tmp_path / ("out" if together else "err")]
    with places[0].open("a") as out, places[1].open("a") as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        Continuation("folder", "prompt", False, lambda say: (say("text"), made)[1] if say else made).show()
    assert places[0].read_text().startswith("text\n1 tokens in 2.00 s" if together else "text")
    assert (places[0].read_text() == "text") != together
