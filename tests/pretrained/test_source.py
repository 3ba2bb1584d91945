"""What is missing, broken or foreign is refused with a reason, and nothing is written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file

import twoaxis
from tests.model.tiny_families import tiny
from tests.support.foreign import byte_llama, byte_tokenizer, save
from twoaxis.model.graft import graft
from twoaxis.pretrained.measure import difference, make_text
from twoaxis.pretrained.source import open_source


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_llama(), tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    copy = tmp_path / "source"
    copy.mkdir()
    for file in whole.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop(folder: Path, name: str) -> None:
    (folder / name).unlink()


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:])


def pickled(folder: Path) -> None:
    drop(folder, "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'false'\ntR.")


def lose_a_shard(folder: Path) -> None:
    drop(folder, "model.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")


NORM = "model.layers.1.input_layernorm.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "family": (lambda f: change_config(f, model_type="lama"), "no family 'lama' of causal .*did you mean 'llama'"),
    "no type": (lambda f: change_config(f, model_type=None), "no family None of causal language models"),
    "twoaxis": (lambda f: change_config(f, model_type="twoaxis"), "a twoaxis model already"),
    "no stream": (lambda f: change_config(f, model_type="bert"), "do not fit its configuration"),
    "code": (lambda f: change_config(f, auto_map={"AutoModel": "mine.Model"}), "code of its own"),
    "type of a list": (lambda f: change_config(f, model_type=[]), r"config\.json: .* no family \[\] of causal"),
    "no width": (lambda f: change_config(f, hidden_size=-(2**70)), r"config\.json is .*hidden_size must be at least 1"),
    "parts": (lambda f: change_config(f, text_config={"a": 1}), "source says neither its layers nor its width"),
    "bad length": (
        lambda f: (f / "tokenizer_config.json").write_text('{"model_max_length": {}}'),
        "the tokenizer of .*source cannot be used: TypeError",
    ),
    "no heads": (
        lambda f: change_config(f, num_key_value_heads=0),
        r"config\.json is .*num_key_value_heads must",
    ),
    "bad dtype": (
        lambda f: change_config(f, dtype=1.5),
        r"config\.json is .*dtype must be the name of a dtype",
    ),
    "bad settings": (lambda f: (f / "generation_config.json").write_text("[]"), "the weights of .* cannot be read"),
    "no config": (lambda f: drop(f, "config.json"), "has no config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "list config": (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
    "wrong type": (lambda f: change_config(f, hidden_size="many"), "not a configuration that transformers takes"),
    "no weights": (lambda f: drop(f, "model.safetensors"), "has no weights"),
    "pickle": (pickled, r"in a pickle \(pytorch_model.bin\), which is never loaded"),
    "shard": (lose_a_shard, "lacks 1 of 2 files of weights: 'model-00002-of-00002.safetensors'"),
    "truncated": (truncate, "the weights of .* cannot be read"),
    "garbled": (garble, "the weights of .* cannot be read"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "the weights of .* cannot be read"),
    "missing": (lambda f: change_weights(f, lambda t: t.pop(NORM)), f"missing: {NORM}"),
    "unexpected": (
        lambda f: change_weights(f, lambda t: t.update({"model.more": torch.ones(2)})),
        "unexpected: model.more",
    ),
    "shape": (lambda f: change_weights(f, lambda t: t.update({NORM: torch.ones(31)})), "cannot be read|mismatched"),
    "quantised": (lambda f: change_config(f, quantization_config={"quant_method": "awq"}), r"quantised \(awq\); give"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "merge it into the weights first"),
    "tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer of .* cannot be read"),
    "foreign tokenizer": (
        lambda f: byte_tokenizer(100).save_pretrained(f),
        r"the tokenizer of \S+ has 356 tokens, the model's vocab_size is 300",
    ),
    "not finite": (
        lambda f: change_weights(f, lambda t: t[NORM].fill_(float("inf"))),
        "the logits are not finite",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_source_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    damage, message = BROKEN[name]
    damage(folder)
    with pytest.raises(ValueError, match=message):
        twoaxis.retrofit(folder, stream="denseformer", out=tmp_path / "out", tokens=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_the_copy_itself_is_whole(folder: Path, tmp_path: Path) -> None:
    made = twoaxis.retrofit(folder, stream="denseformer", out=tmp_path / "out", tokens=8)
    assert made.record.measured["source"]["relative"] < 1e-6
    assert (tmp_path / "out" / "retrofit.json").is_file()


def test_a_plain_model_that_training_saved_is_its_family_s_again(tmp_path: Path) -> None:
    theirs, ids = byte_llama(tie_word_embeddings=True), torch.arange(12)[None]
    expected = theirs(ids).logits
    graft(theirs).save_pretrained(tmp_path / "plain", max_shard_size="100KB")
    found = open_source(tmp_path / "plain")
    assert (found.config.model_type, len(found.files) > 1) == ("llama", True)
    assert torch.equal(found.load(None)(ids).logits, expected)
    graft(byte_llama(), stream="denseformer").save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="a twoaxis model already"):
        open_source(tmp_path / "other")


def test_places_that_are_taken_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    for place in (full, full / "file"):
        with pytest.raises(ValueError, match="exists and is not an empty folder"):
            twoaxis.retrofit(tmp_path / "nothing here", out=place)
    assert (full / "file").read_text() == "mine"
    with pytest.raises(ValueError, match="full/file is a file, not a folder"):
        twoaxis.retrofit(tmp_path / "nothing here", out=full / "file" / "out")


def test_names_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="no folder or file nobody/nothing, and the hub could not be asked for it"):
        open_source("nobody/nothing")
    for name in ("nothing", "/nobody/nothing", "./a/b", "a/b/c", "../b"):
        with pytest.raises(ValueError, match="it is no name on the hub"):
            open_source(name)
    text = tmp_path / "text.txt"
    text.write_text("x")
    with pytest.raises(ValueError, match=r"is a file but no \.gguf"):
        open_source(text)
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF is not here")
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        open_source(bad)
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        open_source(tmp_path)  # the only GGUF file of a folder without a configuration
    (tmp_path / "worse.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match="has 2 GGUF files; name one of them"):
        open_source(tmp_path)


def test_models_that_are_not_causal_models_of_a_family() -> None:
    with pytest.raises(ValueError, match="takes a path, a name on the hub or a transformers model, got Linear"):
        open_source(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="takes a causal language model, got LlamaModel"):
        open_source(byte_llama().model)
    with pytest.raises(ValueError, match="a twoaxis model already"):
        open_source(graft(byte_llama()))


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_families_with_habits_of_their_own(family: str) -> None:
    """A model that is not called ForCausalLM, and one that says no number of positions."""
    made = twoaxis.retrofit(tiny(family), stream="denseformer", tokens=8)
    assert made.record.measured["source"]["largest"] == 0.0
    assert made.record.source["family"] == family


def test_wrong_arguments(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown dtype 'int8'.*it is one of float32, bfloat16"):
        twoaxis.retrofit(whole, dtype="int8")
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        twoaxis.retrofit(whole, tokens=1)
    short = tmp_path / "short.txt"
    short.write_text("x")
    with pytest.raises(ValueError, match="has 1 tokens; the difference is measured on at least 2"):
        twoaxis.retrofit(whole, text=short)
    with pytest.raises(OSError, match="nowhere"):
        twoaxis.retrofit(whole, text=tmp_path / "nowhere.txt")
    (tmp_path / "latin").write_bytes(b"\xe4\xf6")
    with pytest.raises(ValueError, match="is not UTF-8 text: byte 0"):
        twoaxis.retrofit(whole, text=tmp_path / "latin")
    with pytest.raises(ValueError, match="the placement names block 9"):
        twoaxis.retrofit(whole, stream="denseformer", placement="9")


def test_a_model_that_computes_something_else_is_not_written(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import twoaxis.model.graft as module

    real = module.graft

    def other(model: Any, *args: Any, **kwargs: Any) -> Any:
        made = real(model, *args, **kwargs)
        made.backbone.model.norm.weight.data += 0.1
        return made

    monkeypatch.setattr(module, "graft", other)
    with pytest.raises(ValueError, match=r"does not compute what .* computes: its logits differ by"):
        twoaxis.retrofit(whole, out=tmp_path / "out", tokens=8)
    assert not any(tmp_path.iterdir())


def test_the_difference_is_the_largest_of_all_tokens() -> None:
    theirs = [torch.tensor([[1.0, 4.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    ours = [theirs[0] + torch.tensor([[0.0, 0.5], [0.0, 3.0]]), theirs[1] - 0.1]
    found = difference(ours, theirs)
    assert (found.largest, found.relative, found.agree, found.tokens) == (3.0, 0.75, 2, 3)
    with pytest.raises(ValueError, match="the logits are not finite"):
        difference([theirs[0], theirs[1] * torch.nan], theirs)


def test_a_text_is_cut_where_the_model_ends() -> None:
    for positions, windows in ((None, [256, 44]), (-1, [256, 44]), (200, [200, 100])):
        found = make_text(None, 256, positions, 300)
        assert [window.shape[1] for window in found.tokens] == windows
        assert found.length == 300


def test_a_source_without_a_tokenizer_is_measured_on_bytes(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        drop(folder, name)
    made = twoaxis.retrofit(folder, tokens=20)
    assert made.tokenizer is None
    assert made.record.measured["text"]["name"].endswith("as bytes")
