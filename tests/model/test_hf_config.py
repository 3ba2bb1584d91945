"""`TwoAxisConfig`: what it accepts, what it refuses and how, and its trips through dictionaries and files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, LlamaConfig

from tests.model.hf_helpers import COMBINED, as_hf
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_config import TwoAxisConfig, own_fields

FULL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_act": "gelu",
    "max_position_embeddings": 99,
    "initializer_range": 0.03,
    "rms_norm_eps": 1e-4,
    "use_cache": False,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": [3, 4],
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 2.0},
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
    "attention_windows": [3, None, 5],
    "no_rope_blocks": [1],
    "parallel_block": True,
    "hidden_ramp": True,
    "init": "paired",
    "stream": "denseformer",
    "stream_options": {"dilation": 2},
    "placement": "1-2/parallel",
    "blend": True,
    "mixer": "canon",
    "mixer_options": {"set": "AC"},
    "mixer_blocks": [0, 2],
}


def test_every_own_field_is_tried_here() -> None:
    assert set(FULL) == set(own_fields())
    plain = TwoAxisConfig()
    assert all(getattr(plain, name) != value for name, value in FULL.items())


def test_every_field_reaches_the_decoder() -> None:
    found = TwoAxisConfig(**FULL).decoder_config()
    assert found == ModelConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        intermediate_size=256,
        hidden_ramp=True,
        parallel_block=True,
        hidden_act="gelu",
        max_position_embeddings=FULL["max_position_embeddings"],
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        attention_windows=(3, None, 5),
        no_rope_blocks=(1,),
        rms_norm_eps=1e-4,
        tie_word_embeddings=False,
        initializer_range=0.03,
        init="paired",
        stream="denseformer",
        stream_options={"dilation": 2},
        placement="1-2/parallel",
        blend=True,
        mixer="canon",
        mixer_options={"set": "AC"},
        mixer_blocks=(0, 2),
    )


def test_defaults_are_those_of_the_decoder() -> None:
    found, expected = TwoAxisConfig().decoder_config(), ModelConfig()
    filled = dataclasses.replace(expected, num_key_value_heads=4, head_dim=32)
    assert found == filled


def test_round_trips(tmp_path: Path) -> None:
    config = TwoAxisConfig(**FULL, dtype="bfloat16")
    assert config.dtype == torch.bfloat16
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "twoaxis"
    for again in (
        TwoAxisConfig.from_dict(config.to_dict()),
        TwoAxisConfig.from_dict(config.to_diff_dict()),
        TwoAxisConfig.from_pretrained(tmp_path),
        TwoAxisConfig.from_json_file(tmp_path / "config.json"),
        AutoConfig.from_pretrained(tmp_path),
    ):
        assert type(again) is TwoAxisConfig
        assert {name: getattr(again, name) for name in FULL} == FULL
        assert again.dtype == torch.bfloat16
        assert again.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("config", COMBINED.values(), ids=COMBINED)
def test_every_combination_goes_through_a_file(config: ModelConfig, tmp_path: Path) -> None:
    given = as_hf(config)
    given.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.decoder_config() == given.decoder_config()
    # the file has lists where the options may have tuples: the method itself must be the same
    assert str(again.decoder_config().make_stream()) == str(config.make_stream())


def test_overrides_while_loading(tmp_path: Path) -> None:
    TwoAxisConfig(**FULL).save_pretrained(tmp_path)
    assert TwoAxisConfig.from_pretrained(tmp_path, rms_norm_eps=0.5).rms_norm_eps == 0.5
    with pytest.raises(ValueError, match="mixer_blocks names block 2, the model has blocks 0 to 1"):
        TwoAxisConfig.from_pretrained(
            tmp_path, num_hidden_layers=2, attention_windows=None, no_rope_blocks=None, placement=None
        ).decoder_config()


def test_a_file_with_an_unknown_field_is_refused(tmp_path: Path) -> None:
    TwoAxisConfig().save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, "steam": "denseformer"}))
    with pytest.raises(ValueError, match=r"no field 'steam' \(did you mean 'stream'\?\)"):
        TwoAxisConfig.from_pretrained(tmp_path)


def test_rotary_spellings() -> None:
    """theta and scaling are taken where older configurations have them; the caller's dictionary is not changed."""
    older: dict[str, Any] = {"rope_theta": 5e5}
    assert TwoAxisConfig(**older).rope_parameters == {"rope_theta": 5e5, "rope_type": "default"}
    older["rope_scaling"] = {"type": "linear", "factor": 2.0}
    old = TwoAxisConfig(**older)
    assert old.rope_parameters is not None
    assert (old.rope_parameters["rope_type"], old.rope_parameters["factor"]) == ("linear", 2.0)
    given = {"rope_type": "linear", "factor": 2.0}
    assert TwoAxisConfig(rope_parameters=given).rope_parameters == {**given, "rope_theta": 10_000.0}
    assert given == {"rope_type": "linear", "factor": 2.0}


def test_names_agree_with_llama() -> None:
    llama = {field.name: getattr(LlamaConfig(), field.name) for field in dataclasses.fields(LlamaConfig)}
    missing = {"attention_dropout", "pretraining_tp"}  # no dropout here, and no tensor-parallel pretraining
    assert set(llama) - {field.name for field in dataclasses.fields(TwoAxisConfig)} == missing


LONG = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}

BAD: list[tuple[dict[str, Any], str]] = [
    ({"hidden_sise": 3}, r"no field 'hidden_sise' \(did you mean 'hidden_size'\?\); its own fields are vocab_size"),
    ({"sliding_window": 3}, "no field 'sliding_window'"),
    ({"hidden_size": "a"}, "hidden_size must be an integer, got 'a'"),
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, got True"),
    ({"num_attention_heads": 2.0}, r"num_attention_heads must be an integer, got 2\.0"),
    ({"max_position_embeddings": -5}, "max_position_embeddings must be at least 1, got -5"),
    ({"hidden_size": 130}, r"num_attention_heads \(4\) must divide hidden_size \(130\), or give head_dim"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads \(4\)"),
    ({"head_dim": 3}, "even head_dim, got 3"),
    ({"hidden_act": "swish"}, "unknown hidden_act 'swish'.*it is one of silu, gelu"),
    ({"rms_norm_eps": 0.0}, r"rms_norm_eps must be a positive number, got 0\.0"),
    ({"initializer_range": -1.0}, r"initializer_range must be a positive number, got -1\.0"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be True or False, got 'no'"),
    ({"pad_token_id": 256}, r"pad_token_id \(256\) is outside the 256 tokens"),
    ({"attention_windows": [1]}, "attention_windows has 1 entries, num_hidden_layers is 4"),
    ({"attention_windows": [0, 1, 1, 1]}, "at least 1, got 0"),
    ({"attention_windows": [1.5] * 4}, r"integer.* or None, got .*1\.5"),
    ({"attention_windows": 3}, "attention_windows must be a list or None, got 3"),
    ({"no_rope_blocks": [9]}, "names block 9, the model has blocks 0 to 3"),
    ({"intermediate_size": 100, "hidden_ramp": True}, "block 0 of 4 would get 0 of intermediate_size=100"),
    ({"stream": "denseforme"}, r"unknown stream 'denseforme' \(did you mean 'denseformer'\?\)"),
    ({"stream": None}, "stream must be a name, got None"),
    ({"stream_options": [1]}, r"stream_options must be a dictionary or None, got \[1\]"),
    ({"placement": "x/attention"}, "cannot read the placement 'x/attention'"),
    ({"mixer": "canon", "mixer_options": {"set": "Q"}}, "set 'Q' names 'Q'"),
    ({"mixer": "canon", "mixer_blocks": [7]}, "mixer_blocks names block 7, the model has blocks 0 to 3"),
    ({"mixer_options": {"set": "A"}}, "no mixer"),
    ({"rope_parameters": {"rope_type": "nope"}}, "unknown rope_type 'nope'.*it is one of default, linear"),
    ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys .*'linear'.*'factor'"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0; it must be a positive number"),
    ({"rope_parameters": {"rope_typ": "linear"}}, "have no 'rope_typ'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor is 0\.5"),
    ({"rope_parameters": LONG}, "short_factor has 1 entries; heads of 32 channels need 16"),
    ({"rope_theta": -1.0}, r"rope_theta=-1\.0"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[",".join(map(str, f.values()))[:40] for f, _ in BAD])
def test_refused_when_built(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TwoAxisConfig(**fields)


def test_generation_settings_in_a_file_are_not_fields() -> None:
    """transformers drops them from every model configuration; they belong to a GenerationConfig."""
    old: dict[str, Any] = {"temperature": 0.3}
    assert not hasattr(TwoAxisConfig(**old), "temperature")
