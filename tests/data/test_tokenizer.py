"""Tokenizers: what they make adds up to the text, comes back as text, and text cannot pose as a special token."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.data.text_samples import text
from twoaxis.data import tokenizer as tokenizing
from twoaxis.data.options import bpe_size
from twoaxis.data.tokenizer import (
    END,
    Bytes,
    Pretrained,
    Tokenizer,
    exact_sizes,
    load_tokenizer,
    need_transformers,
    offset_sizes,
    pieces,
    train_bpe,
)
from twoaxis.model.decoder import Decoder
from twoaxis.model.presets import preset
from twoaxis.model.save import save_decoder

TEXT = "Grüße, 世界! A naïve café; some words and more words, 🙂🙃.\n  Indented.\n" * 4
TEXTS = [text(seed, 300) for seed in range(20)]
BPE = train_bpe(TEXTS, 320)


def with_begin() -> Pretrained:
    """A byte-level tokenizer that puts a token in front of every text."""
    backend = Backend.from_str(BPE.tokenizer.backend_tokenizer.to_str())
    template = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    backend.post_processor = template  # type: ignore[assignment]
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END)
    return Pretrained(wrapped, "with begin")


def words() -> Pretrained:
    """Lower-cased characters and words between spaces: token strings do not spell the text, and there is no end."""
    backend = Backend(models.BPE(unk_token="?"))  # type: ignore[call-arg]
    backend.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["?"])  # type: ignore[call-arg]
    backend.train_from_iterator([TEXT], trainer)
    return Pretrained(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"), "words")


def fallback() -> Pretrained:
    """Words behind a mark for the space, with tokens for the bytes of what it does not know, as SentencePiece has."""
    vocabulary = {"?": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"▁": 257, "a": 258, "▁a": 259}
    backend = Backend(models.BPE(vocabulary, [("▁", "a")], unk_token="?", byte_fallback=True))  # type: ignore[call-arg]
    backend.pre_tokenizer = pre_tokenizers.Metaspace()  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()]
    )
    return Pretrained(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?"), "fallback")


@functools.cache
def tokenizer(kind: str) -> Any:
    if kind == "byte level":
        return BPE
    return {"bytes": Bytes, "with begin": with_begin, "words": words, "fallback": fallback}[kind]()


KINDS = ("bytes", "byte level", "with begin", "words", "fallback")
EXACT = ("bytes", "byte level", "with begin")
document = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", [False, True])
@given(documents=st.lists(document, max_size=4))
@example(documents=[TEXT, "", "ü🙂"])
def test_tokens_stand_for_the_bytes_of_the_text(kind: str, prompt: bool, documents: list[str]) -> None:
    known: Tokenizer = tokenizer(kind)
    encoded = known.encode(documents, sizes=True, prompt=prompt)
    assert len(encoded) == len(documents)
    for given_text, (ids, sizes) in zip(documents, encoded, strict=True):
        begin, end = list(known.begin), [] if prompt or known.end is None else [known.end]
        assert len(ids) == len(sizes)
        assert ids[: len(begin)].tolist() == begin
        assert ids[len(ids) - len(end) :].tolist() == end
        assert sizes[: len(begin)].sum() == sizes[len(ids) - len(end) :].sum() == 0
        assert sizes.min(initial=0) >= 0
        inside = ids[len(begin) : len(ids) - len(end)]
        if kind in EXACT or len(inside):  # a text of spaces alone may have no tokens at all
            assert sizes.sum() == len(given_text.encode())
        if kind in EXACT:
            assert known.decode(inside.tolist()) == given_text
            assert known.end not in inside
    bare = known.encode(documents, prompt=prompt)
    assert all(np.array_equal(a.ids, b.ids) and not len(b.sizes) for a, b in zip(encoded, bare, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    """Tokens of a text, and any tokens at all, which a model may give and which may be no UTF-8."""
    known = tokenizer(kind)
    if data.draw(st.booleans(), label="text"):
        given_text = data.draw(st.sampled_from([TEXT, TEXT[5:60], "🙂🙃" * 5, "a\n\nb   c"]))
        ids = known.encode([given_text], prompt=True)[0].ids.tolist()
    else:
        given_text = None
        ids = data.draw(st.lists(st.integers(0, known.vocab_size - 1), max_size=20))
    push = known.stream()
    parts = [push(token) for token in ids]
    assert given_text is None or "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    parts.append(push(None))
    if kind == "bytes":
        expected = bytes(ids).decode(errors="replace")
    else:
        expected = known.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    if kind == "fallback" and given_text is None:  # its decoder judges broken bytes by those that come after them
        expected = "".join(parts) if "\N{REPLACEMENT CHARACTER}" in expected else expected
    assert "".join(parts) == expected
    assert given_text is None or kind not in EXACT or expected == given_text


def test_broken_characters_come_out_at_the_end() -> None:
    for kind in ("bytes", "byte level"):
        known = tokenizer(kind)
        push, (encoded,) = known.stream(), known.encode(["x🙂"], prompt=True)
        assert "".join(push(token) for token in encoded.ids[:-1].tolist()) == "x"
        assert push(None) == "\N{REPLACEMENT CHARACTER}"
    push = tokenizer("fallback").stream()
    assert [push(token) for token in (1, 129, 258, None)] == ["\0", "", "\N{REPLACEMENT CHARACTER}a", ""]
    push = Bytes(400).stream()
    assert [push(token) for token in (0xC3, 300, 0xBC)] == ["", "", "ü"]  # a token beyond the bytes is silent


def test_sizes() -> None:
    (encoded,) = Bytes().encode(["aü"], sizes=True)
    assert (encoded.ids.tolist(), encoded.sizes.tolist()) == ([97, 0xC3, 0xBC, 0], [1, 1, 1, 0])
    (encoded,) = BPE.encode(["ü🙂"], sizes=True, prompt=True)
    strings = BPE.tokenizer.convert_ids_to_tokens(encoded.ids.tolist())
    assert encoded.sizes.tolist() == [len(string) for string in strings]  # a character of the spelling is one byte
    assert len(strings) > 2
    assert offset_sizes([1, 1, 3, 5], "üb er") == [2, 0, 2, 2]
    assert offset_sizes([2, 3], "ab c  ") == [2, 4]  # the gap before and the rest behind
    assert offset_sizes([], "") == []
    assert exact_sizes(["Ġa", "Ã", "¼"], " aü") == [2, 1, 1]
    assert exact_sizes(["▁a"], " a") is exact_sizes(["a"], "A") is None
    assert (BPE.vocab_size, BPE.end, BPE.begin) == (320, 0, [])
    assert train_bpe(["ab"], 1000).vocab_size == 258  # there is nothing more to learn in it


def test_the_same_texts_give_the_same_tokenizer_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for parallel in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        assert train_bpe(TEXTS, 320).key == BPE.key
    assert train_bpe(TEXTS[1:], 320).key != BPE.key


def test_text_that_spells_the_end_does_not_end() -> None:
    (encoded,) = BPE.encode([f"one {END} two"], sizes=True)
    assert encoded.ids.tolist().count(0) == 1
    assert encoded.sizes.sum() == len(f"one {END} two")
    assert BPE.tokenizer(END).input_ids == [0]  # and the tokenizer is left as it was
    (encoded,) = BPE.encode([f"one {END}"], prompt=True)
    assert encoded.ids[-1] == 0  # what a prompt spells is meant


def test_long_documents_are_cut_at_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 50)
    for long in (*TEXTS[:3], "x" * 120, "", "a" * 49 + "\n" + "b" * 50):
        parts = list(pieces(long))
        assert "".join(parts) == long
        assert max(map(len, parts)) <= 50
        assert all(part.endswith("\n") or len(part) == 50 for part in parts[:-1])
        (encoded,) = BPE.encode([long], sizes=True)
        assert encoded.sizes.sum() == len(long.encode())
        assert BPE.decode(encoded.ids[:-1].tolist()) == long


def test_the_tokenizer_of_a_model_folder(tmp_path: Path) -> None:
    """It loads as in a process that has not imported our models, and no code of the folder is run."""
    config = preset("nano", vocab_size=330, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    save_decoder(tmp_path, Decoder(config))
    BPE.save(tmp_path)
    (tmp_path / "modeling_twoaxis.py").write_text("raise RuntimeError('this code was run')")
    loaded = load_tokenizer(str(tmp_path), 330)
    assert (loaded.vocab_size, loaded.end) == (330, 0)
    assert load_tokenizer(str(tmp_path)).key == BPE.key
    for ours, theirs in zip(BPE.encode(TEXTS[:3], sizes=True), loaded.encode(TEXTS[:3], sizes=True), strict=True):
        assert np.array_equal(ours.ids, theirs.ids)
        assert np.array_equal(ours.sizes, theirs.sizes)


def test_a_tokenizer_with_a_beginning_and_no_bytes(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "the": 1, "stream": 2, "?": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="?").save_pretrained(tmp_path)
    loaded: Any = load_tokenizer(tmp_path)
    assert (loaded.begin, loaded.end, loaded.vocab_size) == ([0], None, 4)
    (encoded,) = loaded.encode(["the größe stream\n"], sizes=True)
    # what stands between words belongs to the word after it
    assert (encoded.ids.tolist(), encoded.sizes.tolist()) == ([0, 1, 3, 2], [0, 3, 8, 8])


def test_tokenizers_that_there_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    unknown = "nobody/nothing-of-this-name"
    said = (
        f"the tokenizer '{unknown}' cannot be loaded: .*a tokenizer is bytes, bpe:SIZE, a folder, or a name on the hub$"
    )
    for call, message in (
        (lambda: bpe_size("bpe"), "tokenizer 'bpe' has no size; write bpe:SIZE"),
        (lambda: bpe_size("bpe:big"), "'bpe:big' has no size"),
        (lambda: bpe_size("bpe:256"), "'bpe:256' is too small: 256 bytes and the end-of-text token are 257"),
        (lambda: load_tokenizer(""), "tokenizer is empty"),
        (lambda: load_tokenizer(tmp_path), r"has no tokenizer .*; if its tokens are bytes, say --bytes"),
        (lambda: load_tokenizer(tmp_path / "broken"), "cannot be loaded"),
        (lambda: load_tokenizer(unknown), said),
        (lambda: load_tokenizer("bytes", 255), "bytes need a vocabulary of at least 256 tokens, the model has 255"),
        (
            lambda: Pretrained(BPE.tokenizer, "x", 300).encode(TEXTS),
            r"gives token 3\d\d \('.*'\), the vocabulary has 300",
        ),
    ):
        with pytest.raises(ValueError, match=f"(?s){message}"):
            call()
    assert (bpe_size("bpe:2048"), bpe_size("bytes")) == (2048, None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs the package transformers, .*pip install -e"):
        need_transformers()


def test_a_model_in_the_folder_of_its_run_knows_that_its_tokens_are_bytes(tmp_path: Path) -> None:
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": 2, "config": {"tokenizer": "bytes"}}))
    assert load_tokenizer(model, 300).name == load_tokenizer("bytes").name
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": 2, "config": {"tokenizer": "bpe:512"}}))
    with pytest.raises(ValueError, match="has no tokenizer"):
        load_tokenizer(model, 300)


def test_the_tokenizer_of_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(place: str, **more: Any) -> Any:
        made.append((place, more["gguf_file"]))
        return BPE.tokenizer

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", convert)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert load_tokenizer(file, 400).vocab_size == 400
    assert load_tokenizer(str(tmp_path)).vocab_size == BPE.vocab_size
    assert made == [(str(tmp_path), "model.gguf")]
    os.utime(file, (1, 1))
    load_tokenizer(file)
    assert len(made) == 2
