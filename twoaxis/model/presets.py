"""Named shapes from nano to 8B, as fields for `TwoAxisConfig`.

    preset("small", stream="deep_delta", stream_options={"value_channels": 4})

A preset is a backbone: widths, depth, heads, vocabulary, norms and rotary positions. It says nothing of the stream or
the mixer, which are the plain residual and none until they are named, and nothing of special tokens, which belong to
a tokenizer. `parameters` is what the plain backbone has, for public shapes the number published with the weights.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.registry import did_you_mean

if TYPE_CHECKING:
    from twoaxis.model.hf_config import TwoAxisConfig


class Preset(NamedTuple):
    """A named shape.

    Attributes:
        about: where it comes from and what it is for.
        parameters: of the plain backbone, the tied head counted once.
        fields: of `TwoAxisConfig`.
    """

    about: str
    parameters: int
    fields: dict[str, Any]


LLAMA_32_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.2 stretches the wavelengths of Llama 3 to sixteen times its context."""

PRESETS: dict[str, Preset] = {
    "nano": Preset(
        "Bytes in, bytes out, small enough to train in minutes on two cores.",
        836_992,
        {
            "vocab_size": 256,
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
            "qk_norm": True,
        },
    ),
    "tiny": Preset(
        "Bytes again, twice as wide and half again as deep.",
        4_812_800,
        {
            "vocab_size": 256,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 6,
            "num_attention_heads": 4,
            "max_position_embeddings": 1024,
            "qk_norm": True,
        },
    ),
    "small": Preset(
        "The 124M backbone of Deep Delta Learning: six heads of 128, SwiGLU of floor(8d/3), QK-norm, GPT-2's tokens "
        "padded to 50,304.",
        123_590_400,
        {
            "vocab_size": 50_304,
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "max_position_embeddings": 1024,
            "qk_norm": True,
        },
    ),
    "smollm2-135m": Preset(
        "SmolLM2-135M: thin and deep, thirty blocks of width 576.",
        134_515_008,
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "initializer_range": 1 / 24,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        },
    ),
    "medium": Preset(
        "The 353M backbone of Deep Delta Learning: eight heads of 128, otherwise as small.",
        353_508_352,
        {
            "vocab_size": 50_304,
            "hidden_size": 1024,
            "intermediate_size": 2730,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "max_position_embeddings": 1024,
            "qk_norm": True,
        },
    ),
    "qwen2.5-0.5b": Preset(
        "Qwen2.5-0.5B: biases on queries, keys and values, two key heads.",
        494_032_768,
        {
            "vocab_size": 151_936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "qwen3-0.6b": Preset(
        "Qwen3-0.6B: QK-norm, and heads that are wider together than the stream.",
        596_049_920,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama-3.2-1b": Preset(
        "Llama 3.2 1B; also called 1b.",
        1_235_814_400,
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_parameters": LLAMA_32_ROPE,
        },
    ),
    "qwen3-1.7b": Preset(
        "Qwen3-1.7B.",
        1_720_574_976,
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "smollm3-3b": Preset(
        "SmolLM3-3B: every fourth block has no rotary positions.",
        3_075_098_624,
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 11_008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-6,
            "no_rope_blocks": list(range(3, 36, 4)),
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
        },
    ),
    "llama-3.2-3b": Preset(
        "Llama 3.2 3B; also called 3b.",
        3_212_749_824,
        {
            "vocab_size": 128_256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_parameters": LLAMA_32_ROPE,
        },
    ),
    "qwen3-4b": Preset(
        "Qwen3-4B.",
        4_022_468_096,
        {
            "vocab_size": 151_936,
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "mistral-7b": Preset(
        "Mistral 7B v0.3, which has no sliding window.",
        7_248_023_552,
        {
            "vocab_size": 32_768,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
    "llama-3-8b": Preset(
        "Llama 3 8B; also called 8b.",
        8_030_261_248,
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        },
    ),
    "qwen3-8b": Preset(
        "Qwen3-8B.",
        8_190_735_360,
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 40_960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "qk_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        },
    ),
}
"""Every preset, by the number of its parameters."""

ALSO = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3-8b"}
"""Short names."""


def preset_names() -> tuple[str, ...]:
    """Every name `preset` knows, the smallest shape first; the short ones are in `ALSO`."""
    return tuple(PRESETS)


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a preset, as a copy of one's own."""
    known = ALSO.get(name, name)
    if known not in PRESETS:
        hint = did_you_mean(name.lower(), [*PRESETS, *ALSO])
        raise ValueError(f"unknown preset {name!r}{hint}; the presets are {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[known].fields)


def preset(name: str, **changes: Any) -> TwoAxisConfig:
    """The configuration of a named shape.

    Args:
        name: one of `preset_names()`, or a short name: 1b, 3b, 8b.
        **changes: fields of `TwoAxisConfig` that replace or extend the preset's, such as `stream`.
    """
    from twoaxis.model.hf_config import TwoAxisConfig

    return TwoAxisConfig(**(preset_fields(name) | changes))
