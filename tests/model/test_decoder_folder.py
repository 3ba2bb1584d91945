"""A decoder's folder is the graft of its family, which transformers opens; damaged folders are refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.model.graft_helpers import grafted, logits, tokens
from tests.model.test_family import BASE, SHAPES, TOKENS
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.family import graft_document, to_family
from twoaxis.model.graft import TwoAxisForCausalLM
from twoaxis.model.load import load_model
from twoaxis.model.save import save_decoder, why_no_graft
from twoaxis.model.survey import difference, examine


def decoder(**changes: Any) -> Decoder:
    """A decoder with every parameter off its initial value."""
    model = Decoder(ModelConfig.from_dict({**BASE.to_dict(), **changes}), 3).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ways and mixers": {"stream": "muddformer", "mixer": "canon", "mixer_blocks": (0, 2), **SHAPES["qwen3"]},
    "a mixer's site": {"stream": "hyper_connections", "mixer": "short_swa:window=3", **SHAPES["llama"]},
    "tokens": {"stream": "deep_delta:value_channels=2,expand=conv", **SHAPES["smollm3"]},
}


@pytest.mark.parametrize("name", METHODS)
@torch.no_grad()
def test_a_saved_decoder_is_a_decoder_here_and_a_graft_in_transformers(name: str, tmp_path: Path) -> None:
    model = decoder(**METHODS[name])
    save_decoder(tmp_path, model)
    assert all(key.startswith(("backbone.", "stream.")) for key in load_file(tmp_path / "model.safetensors"))
    again = load_model(tmp_path, "cpu")
    assert isinstance(again, Decoder)
    assert torch.equal(again(TOKENS), model(TOKENS))
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is TwoAxisForCausalLM
    assert difference(logits(theirs, TOKENS), model(TOKENS)) < 1e-5
    text = theirs.generate(TOKENS, max_new_tokens=5, num_beams=2, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 19)
    theirs.resize_token_embeddings(70)
    theirs.save_pretrained(tmp_path)  # from here on it is what transformers made of it
    changed = load_model(tmp_path, "cpu")
    assert isinstance(changed, TwoAxisForCausalLM)
    assert torch.equal(logits(changed, TOKENS), logits(theirs, TOKENS))


@pytest.mark.parametrize("name", SHAPES)
def test_what_a_decoder_says_of_its_layers_is_what_the_survey_finds(name: str) -> None:
    config = ModelConfig.from_dict({**BASE.to_dict(), **SHAPES[name]})
    said, found = (
        graft_document(config, torch.float32)["survey"],
        examine(AutoModelForCausalLM.from_config(to_family(config))).to_dict(),
    )
    assert {**said, "digest": None} == {**json.loads(json.dumps(found)), "digest": None}


def test_a_folder_of_a_decoder_needs_transformers_neither_to_be_written_nor_read(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from twoaxis.model.load import load_model\n"
        "from twoaxis.model.save import save_decoder\n"
        "from twoaxis.model.presets import find_shape, preset\n"
        "from twoaxis.model.decoder import Decoder\n"
        "save_decoder(sys.argv[1], Decoder(preset('nano', stream='denseformer')))\n"
        "assert load_model(sys.argv[1], 'cpu').config.stream == find_shape(sys.argv[1]).stream == 'denseformer'\n"
        "assert 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    opened = (
        "import sys\n"
        "from transformers import AutoModelForCausalLM\n"
        "assert 'twoaxis' not in sys.modules\n"
        "print(type(AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", opened, str(tmp_path)], check=True, timeout=120, capture_output=True)
    assert done.stdout.split()[-1] == b"TwoAxisForCausalLM"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_block": True}, "parallel_block=True: the model stays a Decoder"),
        ({"stream": "vertical_attention"}, None),
        ({"stream": "gated_streams:rank=6"}, "normalises its own reads"),
    ],
)
def test_what_keeps_a_decoder_from_being_a_graft_is_said_and_it_is_saved(
    changes: dict[str, Any], why: str | None, tmp_path: Path
) -> None:
    model = decoder(**changes)
    said = why_no_graft(model.config)
    assert (said is None) if why is None else (said is not None and why in said)
    save_decoder(tmp_path, model)
    kind = json.loads((tmp_path / "config.json").read_text())["model_type"]
    assert kind == ("twoaxis" if why is None else "twoaxis_decoder")
    assert torch.equal(load_model(tmp_path, "cpu")(TOKENS), model(TOKENS))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """A change of one field of a document."""

    def change(document: dict[str, Any]) -> None:
        for part in path[:-1]:
            document = document[part]
        if value is ...:
            del document[path[-1]]
        else:
            document[path[-1]] = value

    return change


MUTATIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "format": (put("format", value=7), "format"),
    "no text_config": (put("text_config", value=...), "text_config"),
    "text_config": (put("text_config", value=[]), "text_config"),
    "family": (put("text_config", "model_type", value="lama"), "lama"),
    "no width": (put("text_config", "hidden_size", value=...), "hidden_size|of another shape"),
    "width": (put("text_config", "hidden_size", value="wide"), "hidden_size"),
    "heads": (put("text_config", "num_attention_heads", value=-2), "num_attention_heads"),
    "rope": (put("text_config", "rope_parameters", value=3), "text_config"),
    "rope_theta": (
        put("text_config", "rope_parameters", value={"rope_theta": "x", "rope_type": "default"}),
        "rope_theta",
    ),
    "rope_type": (put("text_config", "rope_parameters", value={"rope_theta": 1e4, "rope_type": "y"}), "rope_type"),
    "pad_token_id": (put("text_config", "pad_token_id", value="x"), "pad_token_id|vocab_size"),
    "dtype": (put("dtype", value="float9"), "float9"),
    "stream": (put("stream", value="densformer"), "densformer"),
    "stream of a number": (put("stream", value=3), "stream"),
    "stream_options": (put("stream_options", value={"perod": 1}), "perod"),
    "mixer_blocks": (put("mixer_blocks", value=[9]), "mixer_blocks|mixer"),
}


GRAFTS = ("pad_token_id", "dtype")
"""Fields that a decoder does not read."""


@pytest.mark.parametrize("kind", ["decoder", "graft"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_configuration_is_refused_with_file_and_field(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "decoder":
        save_decoder(tmp_path, decoder(stream="denseformer"))
    else:
        grafted("llama", "denseformer").save_pretrained(tmp_path)
    file, (change, field) = tmp_path / "config.json", MUTATIONS[name]
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))
    if kind == "decoder" and name in GRAFTS:
        assert isinstance(load_model(tmp_path, "cpu"), Decoder)
        return
    with pytest.raises(ValueError, match=rf"(?s)config\.json.*({field})"):
        load_model(tmp_path, "cpu")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "gone"}}']
)
def test_a_damaged_index_is_refused_by_name(text: str, tmp_path: Path) -> None:
    grafted("llama", "denseformer").save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=INDEX.replace(".", r"\.") if "gone" not in text else "gone"):
        load_model(tmp_path, "cpu")


def test_weights_that_are_cut_off_or_only_in_a_pickle_are_refused(tmp_path: Path) -> None:
    model = grafted("llama", "denseformer")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(tmp_path, "cpu")
    file.unlink()
    with pytest.raises(ValueError, match="has its weights in a pickle"):
        load_model(tmp_path, "cpu")
    assert logits(model, tokens()).isfinite().all()
