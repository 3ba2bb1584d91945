"""Named shapes of decoders, from nano to 8B and beyond, and shapes out of configuration files.

    preset("small", stream="deep_delta:value_channels=4")
    find_shape("kimi-k3"), find_shape("folder/config.json")

A shape is a backbone: widths, depth, heads, vocabulary, norms and rotary positions. It says nothing of the stream or
the mixer, which are the plain residual and none until they are named, and nothing of special tokens, which belong to
a tokenizer. `parameters` is what the plain backbone has, for public shapes the number published with the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from twoaxis.base.files import read_json
from twoaxis.base.registry import did_you_mean
from twoaxis.model.config import ModelConfig
from twoaxis.model.family import FAMILIES, from_family
from twoaxis.model.save import is_decoder, read_config


class Preset(NamedTuple):
    """A named shape.

    Attributes:
        about: where it comes from and what it is for.
        parameters: of the plain backbone, the tied head counted once.
        fields: of `ModelConfig`.
    """

    about: str
    parameters: int
    fields: dict[str, Any]


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _shape(about: str, parameters: int, sizes: tuple[int, ...], **more: Any) -> Preset:
    """A preset from the five sizes that every shape has, and the rest by name."""
    return Preset(about, parameters, dict(zip(SIZES, sizes, strict=True)) | more)


LLAMA_32 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.2 stretches the wavelengths of Llama 3 to sixteen times its context."""

PRESETS = {
    "nano": _shape(
        "Bytes in, bytes out, small enough to train in minutes on two cores.",
        836_992,
        (256, 128, 352, 4, 4),
        max_position_embeddings=1024,
        qk_norm=True,
    ),
    "tiny": _shape(
        "Bytes again, twice as wide and half again as deep.",
        4_812_800,
        (256, 256, 688, 6, 4),
        max_position_embeddings=1024,
        qk_norm=True,
    ),
    "small": _shape(
        "The 124M backbone of Deep Delta Learning: six heads of 128, SwiGLU of floor(8d/3), QK-norm, GPT-2's tokens "
        "padded to 50,304.",
        123_590_400,
        (50_304, 768, 2048, 12, 6),
        max_position_embeddings=1024,
        qk_norm=True,
    ),
    "smollm2-135m": _shape(
        "SmolLM2-135M: thin and deep, thirty blocks of width 576.",
        134_515_008,
        (49_152, 576, 1536, 30, 9),
        num_key_value_heads=3,
        max_position_embeddings=8192,
        initializer_range=1 / 24,
        rope_theta=100000.0,
    ),
    "medium": _shape(
        "The 353M backbone of Deep Delta Learning: eight heads of 128, otherwise as small.",
        353_508_352,
        (50_304, 1024, 2730, 24, 8),
        max_position_embeddings=1024,
        qk_norm=True,
    ),
    "qwen2.5-0.5b": _shape(
        "Qwen2.5-0.5B: biases on queries, keys and values, two key heads.",
        494_032_768,
        (151_936, 896, 4864, 24, 14),
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-06,
        attention_bias=True,
        rope_theta=1000000.0,
    ),
    "qwen3-0.6b": _shape(
        "Qwen3-0.6B: QK-norm, and heads that are wider together than the stream.",
        596_049_920,
        (151_936, 1024, 3072, 28, 16),
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-06,
        qk_norm=True,
        rope_theta=1000000.0,
    ),
    "llama-3.2-1b": _shape(
        "Llama 3.2 1B; also called 1b.",
        1_235_814_400,
        (128_256, 2048, 8192, 16, 32),
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500000.0,
        rope_scaling=LLAMA_32,
    ),
    "qwen3-1.7b": _shape(
        "Qwen3-1.7B.",
        1_720_574_976,
        (151_936, 2048, 6144, 28, 16),
        num_key_value_heads=8,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-06,
        qk_norm=True,
        rope_theta=1000000.0,
    ),
    "smollm3-3b": _shape(
        "SmolLM3-3B: every fourth block has no rotary positions.",
        3_075_098_624,
        (128_256, 2048, 11_008, 36, 16),
        num_key_value_heads=4,
        max_position_embeddings=65_536,
        rms_norm_eps=1e-06,
        no_rope_blocks=tuple(range(3, 36, 4)),
        rope_theta=5000000.0,
    ),
    "llama-3.2-3b": _shape(
        "Llama 3.2 3B; also called 3b.",
        3_212_749_824,
        (128_256, 3072, 8192, 28, 24),
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rope_theta=500000.0,
        rope_scaling=LLAMA_32,
    ),
    "qwen3-4b": _shape(
        "Qwen3-4B.",
        4_022_468_096,
        (151_936, 2560, 9728, 36, 32),
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-06,
        qk_norm=True,
        rope_theta=1000000.0,
    ),
    "mistral-7b": _shape(
        "Mistral 7B v0.3, which has no sliding window.",
        7_248_023_552,
        (32_768, 4096, 14_336, 32, 32),
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        rope_theta=1000000.0,
    ),
    "llama-3-8b": _shape(
        "Llama 3 8B; also called 8b.",
        8_030_261_248,
        (128_256, 4096, 14_336, 32, 32),
        num_key_value_heads=8,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        rope_theta=500000.0,
    ),
    "qwen3-8b": _shape(
        "Qwen3-8B.",
        8_190_735_360,
        (151_936, 4096, 12_288, 36, 32),
        num_key_value_heads=8,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-06,
        tie_word_embeddings=False,
        qk_norm=True,
        rope_theta=1000000.0,
    ),
}
"""Every preset, by the number of its parameters: its tokens, width, hidden width, blocks and heads, then the rest."""

PUBLIC = {
    "olmo-1b": _shape(
        "OLMo 1B, the shape of the Hyper-Connections paper: its norms have no scale, which ours have.",
        1_176_832_000,
        (50_304, 2048, 8192, 16, 16),
    ),
    "qwen3-32b": _shape(
        "Qwen3-32B.",
        32_762_123_264,
        (151_936, 5120, 25_600, 64, 64),
        num_key_value_heads=8,
        head_dim=128,
        rms_norm_eps=1e-06,
        tie_word_embeddings=False,
        qk_norm=True,
    ),
    "llama-3-70b": _shape(
        "Llama 3 70B.",
        70_553_706_496,
        (128_256, 8192, 28_672, 80, 64),
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "kimi-k3": _shape(
        "The depth and width of Kimi-K3, 93 layers of 7168, as a dense decoder: its experts and its "
        "latent attention are not modelled, so only what the stream does is K3's.",
        50_133_758_976,
        (163_840, 7168, 18_432, 93, 56),
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=False,
    ),
}
"""Public shapes that nobody trains on a laptop; `parameters` as the backbone here has them."""

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
    return dict(PRESETS[known].fields)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a named shape.

    Args:
        name: one of `preset_names()`, or a short name: 1b, 3b, 8b.
        **changes: fields of `ModelConfig` that replace or extend the preset's, such as `stream`.
    """
    return ModelConfig.from_dict(preset_fields(name) | changes, "a model")


def shape_names() -> tuple[str, ...]:
    """Every name `find_shape` knows, the smallest shape first."""
    both = {**PRESETS, **PUBLIC}
    return tuple(sorted(both, key=lambda name: both[name].parameters))


def find_shape(given: str) -> ModelConfig:
    """The decoder of a name, of a configuration file, or of a folder with one. Files of families need transformers."""
    name = ALSO.get(given.lower(), given.lower())
    if name in PRESETS or name in PUBLIC:
        return ModelConfig(**(PRESETS.get(name) or PUBLIC[name]).fields)
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read_shape(path)
    if "/" in given or given.endswith(".json"):
        raise ValueError(f"there is no configuration file {path}")
    hint = did_you_mean(name, [*PRESETS, *PUBLIC, *ALSO])
    raise ValueError(
        f"unknown shape {given!r}{hint}; give a config.json, a folder with one, or one of {', '.join(shape_names())}"
    )


def _read_shape(path: Path) -> ModelConfig:
    """The decoder of a config.json: of ours, of a graft, or of a family that computes what a decoder can."""
    document = read_json(path)
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind is None:
        raise ValueError(f"{path} has no model_type: it is not the configuration of a transformers model")
    if is_decoder(document):
        return read_config(path)
    from twoaxis.model.graft_config import TwoAxisConfig, family_config

    if "text_config" in document:
        return TwoAxisConfig.from_dict(document).decoder_config()
    if kind not in FAMILIES:
        raise ValueError(f"{path}: {kind!r} has no decoder of ours; the families that have are {', '.join(FAMILIES)}")
    return from_family(family_config(document))
