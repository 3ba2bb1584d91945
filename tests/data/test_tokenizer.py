"""Tokenizers for training: what they make adds up to the text, and text cannot pose as a special token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.data.text_samples import text
from twoaxis.data import tokenizer as tokenizing
from twoaxis.data.tokenizer import END, Bytes, Pretrained, check_spelling, load, load_pretrained, pieces, train_bpe
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.model.load import load_codec
from twoaxis.model.presets import preset

TEXTS = [text(seed, 300) for seed in range(20)]
BPE = train_bpe(TEXTS, 320)


@given(documents=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=4))
def test_tokens_stand_for_the_bytes_of_the_text(documents: list[str]) -> None:
    for tokenizer in (Bytes(), BPE):
        made = tokenizer.encode(documents, sizes=True)
        assert len(made) == len(documents)
        for document, tokens in zip(documents, made, strict=True):
            assert tokens.sizes is not None
            assert len(tokens.sizes) == len(tokens.ids)
            assert tokens.sizes.sum() == len(document.encode())
            assert (tokens.ids[-1], tokens.sizes[-1]) == (tokenizer.end, 0)
            assert tokenizer.end not in tokens.ids[:-1]
            assert tokenizer.decode(tokens.ids[:-1].tolist()) == document
        bare = tokenizer.encode(documents, sizes=False)
        assert all(np.array_equal(a.ids, b.ids) and b.sizes is None for a, b in zip(made, bare, strict=True))


def test_bytes() -> None:
    (made,) = Bytes().encode(["aü"], sizes=True)
    assert made.ids.tolist() == [97, 0xC3, 0xBC, 0]
    assert made.sizes is not None
    assert made.sizes.tolist() == [1, 1, 1, 0]
    assert Bytes().vocabulary == 256


def test_the_vocabulary_that_was_asked_for() -> None:
    assert (BPE.vocabulary, BPE.end, BPE.begin) == (320, 0, [])
    assert train_bpe(["ab"], 1000).vocabulary == 258  # there is nothing more to learn in it
    assert train_bpe(TEXTS, 257).vocabulary == 257


def test_the_same_texts_give_the_same_tokenizer_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for parallel in ("false", "true"):
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
        assert train_bpe(TEXTS, 320).key == BPE.key
    assert train_bpe(TEXTS[1:], 320).key != BPE.key


def test_text_that_spells_the_end_does_not_end() -> None:
    (made,) = BPE.encode([f"one {END} two"], sizes=True)
    assert made.ids.tolist().count(0) == 1
    assert made.sizes is not None
    assert made.sizes.sum() == len(f"one {END} two")
    assert BPE.tokenizer(END).input_ids == [0]  # and the tokenizer is left as it was


def test_long_documents_are_cut_at_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "PIECE", 50)
    for document in (*TEXTS[:3], "x" * 120, "", "a" * 49 + "\n" + "b" * 50):
        parts = list(pieces(document))
        assert "".join(parts) == document
        assert max(map(len, parts)) <= 50
        assert all(part.endswith("\n") or len(part) == 50 for part in parts[:-1])
        (made,) = BPE.encode([document], sizes=True)
        assert made.sizes is not None
        assert made.sizes.sum() == len(document.encode())
        assert BPE.decode(made.ids[:-1].tolist()) == document


def test_a_model_folder_with_the_tokenizer(tmp_path: Path) -> None:
    config = preset("nano", vocab_size=320, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
    TwoAxisForCausalLM(config).save_pretrained(tmp_path)
    BPE.save(tmp_path)
    codec = load_codec(tmp_path, 320)
    (made,) = BPE.encode([TEXTS[0]], sizes=True)
    assert made.sizes is not None
    assert codec.encode(TEXTS[0]) == (made.ids[:-1].tolist(), made.sizes[:-1].tolist())
    again = load(str(tmp_path))
    assert isinstance(again, Pretrained)
    assert again.key == BPE.key


def test_a_tokenizer_with_a_beginning_and_no_bytes(tmp_path: Path) -> None:
    made = Tokenizer(models.WordLevel({"<s>": 0, "the": 1, "stream": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="?").save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert isinstance(loaded, Pretrained)
    assert (loaded.begin, loaded.end, loaded.vocabulary) == ([0], None, 4)
    (tokens,) = loaded.encode(["the größe stream\n"], sizes=True)
    assert tokens.ids.tolist() == [0, 1, 3, 2]
    assert tokens.sizes is not None
    assert tokens.sizes.tolist() == [0, 3, 8, 8]  # what stands between words belongs to the word after it


def test_spellings_that_cannot_be(tmp_path: Path) -> None:
    assert check_spelling("bpe:2048") == 2048
    assert check_spelling("bytes") is None
    cases = {
        "bpe": "tokenizer 'bpe' has no size; write bpe:SIZE",
        "bpe:big": "'bpe:big' has no size",
        "bpe:256": "'bpe:256' is too small: 256 bytes and the end-of-text token are 257",
        "": "tokenizer is empty",
        str(tmp_path): "has no tokenizer",
    }
    for spec, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load(spec)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_pretrained(tmp_path)


def test_a_name_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the tokenizer 'nobody/nothing-of-this-name' cannot be loaded: ") as caught:
        load("nobody/nothing-of-this-name")
    assert str(caught.value).endswith("a tokenizer is bytes, bpe:SIZE, a folder, or a name on the hub")
