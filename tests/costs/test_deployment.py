"""Shapes by name, hardware by name, and deployments that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from twoaxis.costs.hardware import DATA, find_profile
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.deployment import Deployment
from twoaxis.model.presets import find_shape
from twoaxis.model.save import save_decoder
from twoaxis.model.variant import make_contender, with_method


def test_configuration_files(tmp_path: Path) -> None:
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    Qwen3Config(hidden_size=64, num_hidden_layers=3, vocab_size=99, **heads).save_pretrained(tmp_path / "qwen")
    found: Any = find_shape(str(tmp_path / "qwen"))
    assert (found.hidden_size, found.num_hidden_layers, found.kv_heads, found.vocab_size) == (64, 3, 2, 99)
    ours = ModelConfig(hidden_size=32, intermediate_size=88, num_hidden_layers=2, stream="denseformer", **heads)
    (tmp_path / "ours").mkdir()
    save_decoder(tmp_path / "ours", Decoder(ours))
    assert find_shape(str(tmp_path / "ours" / "config.json")) == ours
    assert find_shape("8B") == find_shape("llama-3-8b")


def test_methods_on_shapes() -> None:
    shape = find_shape("nano")
    made = with_method(shape, make_contender("denseformer:dilation=2,placement=1-2,blend=true", "canon:set=A"))
    assert (made.stream, made.stream_options) == ("denseformer", {"dilation": 2})
    assert (made.placement, made.blend) == ("1-2", True)
    assert (made.mixer, made.mixer_options) == ("canon", {"set": "A"})
    assert with_method(made, make_contender()) == shape
    assert with_method(shape, make_contender("standard:model.hidden_size=160")).hidden_size == 160


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_stages": 7}, "32 blocks cannot be cut into 7 stages; the nearest number of stages is 8"),
        ({"pipeline_stages": 8, "virtual_stages": 3}, r"\(24 chunks\); the nearest with 8 stages is 2 virtual"),
        ({"pipeline_stages": 16, "virtual_stages": 4}, "nearest number of stages with 4 virtual ones each is 8"),
        ({"pipeline_stages": 5, "virtual_stages": 3}, "the nearest number of chunks is 16"),
        ({"tensor_parallel": 3}, "32 attention heads cannot be spread over 3 devices; the nearest number is 2"),
        ({"tensor_parallel": 64}, "the nearest number is 32"),
    ],
)
def test_deployments_a_shape_does_not_allow(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deployment(**options).check(find_shape("llama-3-8b"))


def test_hardware_has_numbers_and_sources() -> None:
    for name in ("a100", "h100", "h200", "b200"):
        profile = find_profile(name.upper())
        assert "data sheet" in profile.source
        assert profile.matmul.bfloat16 == 2 * profile.matmul.float32
        assert 1e12 < profile.bandwidth < 1e13
    assert find_profile("h100").link == 450e9
    assert json.loads(DATA.read_text())["profiles"]["b200"]["memory"] == 180e9
