"""Folders, tokenizers and bytes: what is read, what is refused, and which token stands for which bytes."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.foreign import trained_tokenizer
from twoaxis.base.machine import pick_device
from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.model.load import (
    ByteCodec,
    Codec,
    TokenizerCodec,
    exact_sizes,
    load_codec,
    load_model,
    need_transformers,
    offset_sizes,
)

TEXT = "Grüße, 世界! A naïve café; some words and more words, 🙂🙃.\n  Indented.\n" * 4
SHAPE: dict[str, Any] = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@functools.cache
def words() -> PreTrainedTokenizerFast:
    """Lower-cased characters and words between spaces: token strings do not spell the text."""
    tokenizer = Tokenizer(models.BPE(unk_token="?"))  # type: ignore[call-arg]
    tokenizer.normalizer = normalizers.Lowercase()  # type: ignore[assignment]
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["?"])  # type: ignore[call-arg]
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")


def codec(kind: str) -> Codec:
    if kind == "bytes":
        return ByteCodec(256)
    return TokenizerCodec(
        words() if kind == "words" else trained_tokenizer(TEXT, "<s>", begin=kind == "with begin"), 320
    )


KINDS = ("bytes", "byte level", "with begin", "words")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.text(st.characters(exclude_categories=("Cs",))), st.sampled_from([TEXT, TEXT[3:40]])))
def test_sizes_add_up_to_the_text(kind: str, text: str) -> None:
    encoded = codec(kind).encode(text)
    assert len(encoded.tokens) == len(encoded.sizes)
    assert all(size >= 0 for size in encoded.sizes)
    if encoded.tokens[1:] or kind == "bytes" or not text:  # a text of spaces alone may have no tokens at all
        assert sum(encoded.sizes) == len(text.encode())


def test_tokens_that_split_a_character_get_their_own_bytes() -> None:
    encoded = codec("byte level").encode("ü🙂")
    strings = trained_tokenizer(TEXT, "<s>").convert_ids_to_tokens(encoded.tokens)
    assert encoded.sizes == [len(string) for string in strings]  # one character of the spelling is one byte
    assert len(encoded.tokens) > 2
    assert sum(encoded.sizes[1:]) == 6 - encoded.sizes[0]


def test_a_beginning_token_stands_for_no_bytes() -> None:
    plain, begun = codec("byte level").encode(TEXT), codec("with begin").encode(TEXT)
    assert begun.tokens == [0, *plain.tokens]
    assert begun.sizes == [0, *plain.sizes]


def test_sizes_from_offsets() -> None:
    assert offset_sizes([1, 1, 3, 5], "üb er") == [2, 0, 2, 2]
    assert offset_sizes([2, 3], "ab c  ") == [2, 4]  # the gap before and the rest behind
    assert offset_sizes([], "") == []
    assert exact_sizes(["Ġa", "Ã", "¼"], " aü") == [2, 1, 1]
    assert exact_sizes(["▁a"], " a") is None
    assert exact_sizes(["a"], "A") is None


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.sampled_from([TEXT, TEXT[5:60], "🙂🙃" * 5, "a\n\nb   c"]))
def test_pieces_join_to_the_decoded_text(kind: str, text: str) -> None:
    made = codec(kind)
    tokens = made.encode(text).tokens
    pieces = made.pieces()
    parts = [pieces.push(token) for token in tokens] + [pieces.finish()]
    expected = text
    if isinstance(made, TokenizerCodec):
        expected = made.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(parts) == expected
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    if kind != "words":
        assert expected == text


def test_broken_characters_come_out_at_the_end() -> None:
    for kind in ("bytes", "byte level"):
        made = codec(kind)
        pieces = made.pieces()
        tokens = made.encode("x🙂").tokens
        assert "".join(pieces.push(token) for token in tokens[:-1]) == "x"
        assert pieces.finish() == "\N{REPLACEMENT CHARACTER}"


def test_tokens_beyond_the_bytes_are_silent() -> None:
    pieces = codec("bytes").pieces()
    assert [pieces.push(t) for t in (0xC3, 300, 0xBC)] == ["", "", "ü"]


def test_tokens_the_model_does_not_have() -> None:
    with pytest.raises(ValueError, match="the model has a vocabulary of 256: they do not belong together"):
        TokenizerCodec(trained_tokenizer(TEXT, "<s>"), 256).encode(TEXT)
    with pytest.raises(ValueError, match="bytes need a vocabulary of at least 256 tokens, the model has 255"):
        ByteCodec(255)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    TwoAxisForCausalLM(TwoAxisConfig(**SHAPE, stream="denseformer")).bfloat16().save_pretrained(folder)
    return folder


def test_a_model_comes_as_it_was_saved(saved: Path) -> None:
    model = load_model(saved, "cpu")
    assert not model.training
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert model.config.stream == "denseformer"
    assert model.device == torch.device("cpu")


def test_the_code_in_a_folder_is_never_run(saved: Path, tmp_path: Path) -> None:
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "modeling_twoaxis.py").write_text("raise RuntimeError('this code was run')")
    trained_tokenizer(TEXT, "<s>", begin=True).save_pretrained(tmp_path)
    load_model(tmp_path, "cpu")
    assert load_codec(tmp_path, 320).encode("some words").tokens[0] == 0


def test_folders_that_are_no_model(saved: Path, tmp_path: Path) -> None:
    def folder(name: str, config: str | None) -> Path:
        made = tmp_path / name
        made.mkdir()
        if config is not None:
            (made / "config.json").write_text(config)
        return made

    (tmp_path / "file").touch()
    good = (saved / "config.json").read_text()
    broken = folder("broken", good)
    (broken / "model.safetensors").write_bytes(b"no weights")
    other = folder("other", json.dumps(json.loads(good) | {"hidden_size": 32, "head_dim": 16}))
    (other / "model.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    cases = {
        tmp_path / "nowhere": "there is no folder .*nowhere",
        tmp_path / "file": "is a file; give the folder",
        folder("bare", None): r"has no config\.json; give a folder that save_pretrained",
        folder("garbage", "{"): r"config\.json cannot be read",
        folder("list", "[]"): "is not a twoaxis model: model_type in its config.json is None",
        folder("llama", '{"model_type": "llama"}'): "is not a twoaxis model: model_type in its config.json is 'llama'",
        folder("empty", good): "has no weights",
        broken: "the weights in .*broken cannot be read",
        other: "does not fit the model; of another shape",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_model(path, "cpu")


def test_folders_without_a_tokenizer(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer .*if its tokens are bytes, say --bytes"):
        load_codec(saved, 320)
    with pytest.raises(ValueError, match=r"has no tokenizer .*save its tokenizer beside it"):
        load_codec(saved, 61)
    assert load_codec(saved, 320, as_bytes=True).encode("ü").tokens == [0xC3, 0xBC]
    (tmp_path / "config.json").write_text((saved / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        load_codec(tmp_path, 320)


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device(None).type in ("cpu", "cuda")
    for name in ("quantum", "cuda:99"):
        with pytest.raises(ValueError, match=f"device '{name}' cannot be used"):
            pick_device(name)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"needs transformers, .* install twoaxis with its extra \[hf\]"):
        need_transformers()
