"""Named shapes: published parameter counts, any stream on each, errors that list what exists."""

from __future__ import annotations

from typing import Any

import pytest

from twoaxis.model.presets import ALSO, LLAMA_32, PRESETS, preset, preset_fields

BY_HAND = {
    # embedding + blocks · (attention + head norms + SwiGLU + two norms) + final norm
    "pico": 256 * 64 + 8 * (4 * 64**2 + 2 * 16 + 3 * 64 * 176 + 2 * 64) + 64,
    "nano": 256 * 128 + 4 * (4 * 128**2 + 2 * 32 + 3 * 128 * 352 + 2 * 128) + 128,
    "tiny": 256 * 256 + 6 * (4 * 256**2 + 2 * 64 + 3 * 256 * 688 + 2 * 256) + 256,
}


@pytest.mark.parametrize("name", BY_HAND)
def test_parameters_by_hand(name: str) -> None:
    """Those of every preset are counted where operations are."""
    assert PRESETS[name].parameters == BY_HAND[name]


def test_presets_stand_in_the_order_of_their_size() -> None:
    sizes = [p.parameters for p in PRESETS.values()]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1e6
    assert sizes[-1] > 8e9


def test_what_a_shape_keeps_besides_its_size() -> None:
    assert preset("small").head_size == preset("medium").head_size == 128
    assert preset("medium").intermediate_size == 8 * 1024 // 3
    assert preset("3b").rope_scaling == LLAMA_32
    assert preset("llama-3-8b").rope_theta == 500_000.0
    assert preset("qwen3-8b").qk_norm
    assert preset("smollm3-3b").no_rope_blocks == (3, 7, 11, 15, 19, 23, 27, 31, 35)
    assert not preset("8b").tie_word_embeddings


def test_changes_replace_fields_and_leave_the_preset_alone() -> None:
    config = preset("nano", vocab_size=300, num_hidden_layers=2, stream="denseformer", stream_options={"dilation": 2})
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (300, 2, 128)
    assert config.stream_options == {"dilation": 2}
    preset_fields("nano")["vocab_size"] = 1
    assert preset("nano").vocab_size == 256


def test_short_names() -> None:
    for short, name in ALSO.items():
        assert preset(short).to_dict() == preset(name).to_dict()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("nanno", {}, r"unknown preset 'nanno' \(did you mean 'nano'\?\); the presets are pico, nano, tiny, small"),
        ("Llama-3-8B", {}, r"unknown preset 'Llama-3-8B' \(did you mean 'llama-3-8b'\?\)"),
        ("gigantic", {}, r"unknown preset 'gigantic'; the presets are .*qwen3-8b"),
        ("nano", {"hidden_sise": 3}, "no option 'hidden_sise'.*did you mean 'hidden_size'"),
        ("nano", {"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide .*\(4\)"),
        ("nano", {"stream": "streem"}, "unknown stream 'streem'"),
    ],
)
def test_mistakes(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        preset(name, **changes)
