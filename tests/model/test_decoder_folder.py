"""A decoder's folder is the graft of its family, which transformers opens; damaged folders are refused by name."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, PreTrainedConfig

from tests.model.graft_helpers import grafted, logits, to_family, tokens
from tests.model.test_family import BASE, SHAPES, TOKENS
from tests.support.foreign import byte_llama, save
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import graft_document
from twoaxis.model.graft import TwoAxisForCausalLM
from twoaxis.model.graft_survey import difference, examine
from twoaxis.model.load import load_model
from twoaxis.model.presets import find_shape
from twoaxis.model.save import save_decoder, why_no_graft
from twoaxis.pretrained.source import open_source


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
    assert not again.training
    # as whoever reads a tokenizer does: of two configurations of a text model transformers would take neither
    assert PreTrainedConfig.from_pretrained(tmp_path).get_text_config(decoder=True)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs).__name__ == "TwoAxisForCausalLM"
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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_block": True}, "parallel_block=True: the model stays a Decoder"),
        ({"stream": "vertical_attention"}, None),
        ({"stream": "gated_streams:rank=6"}, None),
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


def changed(document: Any, path: tuple[Any, ...], value: Any) -> str:
    """A JSON document with one field changed, or gone where the value is an ellipsis."""
    document = inside = copy.deepcopy(document)
    for part in path[:-1]:
        inside = inside[part]
    if value is ...:
        del inside[path[-1]]
    else:
        inside[path[-1]] = value
    return json.dumps(document)


ROPE, INSIDE = ("text_config", "rope_parameters"), "text_config"
MUTATIONS: list[tuple[tuple[str, ...], Any, str]] = [
    (("format",), 7, "format"),
    ((INSIDE,), ..., INSIDE),
    ((INSIDE,), [], INSIDE),
    ((INSIDE, "model_type"), "lama", "lama"),
    ((INSIDE, "hidden_size"), ..., "hidden_size|of another shape"),
    ((INSIDE, "rms_norm_eps"), 0.5, "rms_norm_eps"),
    ((INSIDE, "hidden_size"), "wide", "hidden_size"),
    ((INSIDE, "num_attention_heads"), -2, "num_attention_heads"),
    (ROPE, 3, INSIDE),
    (ROPE, {"rope_theta": "x", "rope_type": "default"}, "rope_theta"),
    (ROPE, {"rope_theta": 1e4, "rope_type": "y"}, "rope_type"),
    ((INSIDE, "pad_token_id"), "x", "pad_token_id|vocab_size"),
    (("dtype",), "float9", "float9"),
    (("stream",), "densformer", "densformer"),
    (("stream",), 3, "stream"),
    (("stream_options",), {"perod": 1}, "perod"),
    (("placement",), "", "placement"),
    (("placement",), "9", "placement (is .9.|names block 9)"),
    (("mixer_blocks",), [9], "mixer_blocks|mixer"),
    (("survey", "width"), "x", "width (is|must be an integer, got) 'x'"),
    (("survey", "layers"), [7], "survey"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of decoders, one of them as no family has it, and of grafts, one of them in several files."""
    made = tmp_path_factory.mktemp("folders")
    save_decoder(made / "decoder", decoder(stream="denseformer"))
    save_decoder(made / "parallel", decoder(parallel_block=True).bfloat16())
    grafted("llama", "denseformer").save_pretrained(made / "graft", max_shard_size="20KB")
    grafted("gemma3_text", "two axes").save_pretrained(made / "gemma")
    save(byte_llama(), made / "source")
    return made


@pytest.mark.parametrize("kind", ["decoder", "graft"])
def test_a_changed_configuration_is_refused_with_file_and_field(kind: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / kind, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    for path, value, field in MUTATIONS:
        file.write_text(changed(document, path, value))
        if path[-1] == {"decoder": "dtype", "graft": "rms_norm_eps"}[kind]:  # not read, or the family's to choose
            assert isinstance(load_model(tmp_path, "cpu"), Decoder if kind == "decoder" else TwoAxisForCausalLM)
            continue
        with pytest.raises(ValueError, match=rf"(?s)config\.json.*({field})"):
            load_model(tmp_path, "cpu")


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON document."""
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


WRONG = (None, True, -1, 0, 3, 2**70, 1.5, 1e300, math.nan, math.inf, "x", "", [], {}, [1], [None], {"a": 1}, ...)
WRONG = (*WRONG, "a\nb", "\ud800", "../x", {"quant_method": 3}, {"AutoModelForCausalLM": "other/code--evil.Model"})


def read_source(folder: str) -> None:
    """All that a retrofit reads."""
    found = open_source(folder)
    found.shape()
    found.tokenizer()
    found.load(None)


@pytest.mark.parametrize("times", [40, pytest.param(700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["decoder", "parallel", "graft", "gemma", "source"])
def test_whatever_is_changed_a_folder_loads_or_is_named(kind: str, times: int, folders: Path, tmp_path: Path) -> None:
    """Any field of any of its JSON files with any wrong value, or a file that is cut off: never another error."""
    shutil.copytree(folders / kind, tmp_path, dirs_exist_ok=True)
    draw = random.Random(f"{kind} {times}")
    files = [file for file in sorted(tmp_path.iterdir()) if file.suffix in (".json", ".safetensors")]
    for _ in range(times):
        file = draw.choice([tmp_path / "config.json"] * len(files) + files)
        before = file.read_bytes()
        if file.suffix == ".json" and draw.random() < 0.95:
            document = json.loads(before)
            change = draw.choice(list(places(document))), draw.choice(WRONG)
            file.write_text(changed(document, *change))
        else:
            change = (file.name, draw.randrange(len(before)))
            file.write_bytes(before[: change[1]])
        for read in (read_source if kind == "source" else load_model, find_shape):
            said = str(tmp_path)
            try:
                read(said)
            except ValueError as error:
                said = str(error)
            except Exception as error:
                raise AssertionError(f"{file.name} with {change}") from error
            assert str(tmp_path) in said, change
            assert "\n" not in said, change
        file.write_bytes(before)


def test_folders_that_are_no_model(folders: Path, tmp_path: Path) -> None:
    assert load_model(folders / "parallel", "cpu").embed_tokens.weight.dtype == torch.bfloat16  # one that is
    good = (folders / "decoder" / "config.json").read_text()
    weights = (folders / "decoder" / "model.safetensors").read_bytes()
    wider = ModelConfig.from_dict(BASE.to_dict() | {"hidden_size": 64, "stream": "denseformer"})
    cases: list[tuple[str, str | None, bytes | None, str]] = [
        (
            "misspelt",
            json.dumps(json.loads(good) | {"streem": "x"}),
            weights,
            r"config\.json.*streem.*did you mean 'stream",
        ),
        ("bare", None, None, r"has no config\.json; give the folder of a saved model"),
        ("garbage", "{", None, "is not a JSON document"),
        ("list", "[]", None, "is not a twoaxis model: model_type in its config.json is None"),
        ("llama", '{"model_type": "llama"}', None, "is not a twoaxis model: model_type in its config.json is 'llama'"),
        ("empty", good, None, "has no weights"),
        ("broken", good, b"no weights", "the weights in .*broken.* cannot be read"),
        (
            "other",
            json.dumps(graft_document(wider, torch.float32)),
            weights,
            "not fit its config.json; of another shape",
        ),
    ]
    for name, config, tensors, message in cases:
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
        if tensors is not None:
            (tmp_path / name / "model.safetensors").write_bytes(tensors)
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path / name, "cpu")
    for place, message in (
        (tmp_path / "nowhere", "there is no folder .*nowhere"),
        (__file__, "is a file; give the folder"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(place, "cpu")


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, re.escape(INDEX)) for text in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}')),
        ('{"weight_map": {"a": "gone"}}', "lacks 1 of 1 files of weights: 'gone'"),
        ('{"weight_map": {"a": "b\\nc"}}', r"'b\\nc'"),
        ('{"weight_map": {"a": "../decoder/model.safetensors"}}', r"lacks .* '\.\./decoder"),  # there, but elsewhere
    ],
)
def test_a_damaged_index_is_refused_by_name(text: str, why: str, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "graft", tmp_path / "graft")
    shutil.copytree(folders / "decoder", tmp_path / "decoder")
    (tmp_path / "graft" / INDEX).write_text(text)
    with pytest.raises(ValueError, match=why) as caught:
        load_model(tmp_path / "graft", "cpu")
    assert "\n" not in str(caught.value)


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
