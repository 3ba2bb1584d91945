"""Named shapes of decoders, from nano to 8B and beyond, and shapes out of configuration files.

    preset("small", stream="deep_delta:value_channels=4")
    find_shape("kimi-k3"), find_shape("folder/config.json")

A shape is a backbone: widths, depth, heads, vocabulary, norms and rotary positions. It says nothing of the stream or
the mixer, which are the plain residual and none until they are named, and nothing of special tokens, which belong to
a tokenizer. `parameters` is what the plain backbone has, for public shapes the number published with the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twoaxis.base.files import read_json, user_path
from twoaxis.base.registry import did_you_mean
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder_as_graft import GRAFT
from twoaxis.model.save import is_decoder, read_config

if TYPE_CHECKING:
    from twoaxis.model.graft_config import TwoAxisConfig


class Preset(NamedTuple):
    """A named shape: the parameters of the plain backbone, a tied head counted once, and its fields."""

    parameters: int
    fields: dict[str, Any]


def _shape(parameters: int, sizes: tuple[int, ...], shared: Mapping[str, Any], **more: Any) -> Preset:
    """A preset from its five sizes, the fields that it shares with its relatives, and its own."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return Preset(parameters, {**dict(zip(names, sizes, strict=True)), **shared, **more})


LLAMA_32 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.2 stretches the wavelengths of Llama 3 to sixteen times its context."""
OURS = {"max_position_embeddings": 1024, "qk_norm": True}
LONG = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rope_theta": 5e5, "rope_scaling": LLAMA_32}
QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN3 = QWEN | {"num_key_value_heads": 8, "max_position_embeddings": 40_960, "qk_norm": True}
LARGE = {"num_key_value_heads": 8, "tie_word_embeddings": False}

SMOLLM2 = {"num_key_value_heads": 3, "max_position_embeddings": 8192, "initializer_range": 1 / 24, "rope_theta": 1e5}
SMOLLM3 = {"num_key_value_heads": 4, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6, "rope_theta": 5e6}
QWEN25 = QWEN | {"num_key_value_heads": 2, "max_position_embeddings": 32_768, "attention_bias": True}
MISTRAL = LARGE | {"max_position_embeddings": 32_768, "rope_theta": 1e6}
LLAMA3 = LARGE | {"max_position_embeddings": 8192, "rope_theta": 5e5}

# Small models start from larger values than large ones: 0.02 is too small for a width of 128, see docs on training.
PRESETS = {
    # Eight thin blocks for bytes: deep enough for streams to differ, and trained in half a minute on one core.
    "pico": _shape(419_136, (256, 64, 176, 8, 4), OURS, initializer_range=0.08),
    # Bytes in, bytes out, small enough to train in minutes on two cores.
    "nano": _shape(836_992, (256, 128, 352, 4, 4), OURS, initializer_range=0.06),
    # Bytes again, twice as wide and half again as deep.
    "tiny": _shape(4_812_800, (256, 256, 688, 6, 4), OURS, initializer_range=0.04),
    # The 124M backbone of Deep Delta Learning: heads of 128, SwiGLU of floor(8d/3), GPT-2's tokens padded to 50,304.
    "small": _shape(123_590_400, (50_304, 768, 2048, 12, 6), OURS),
    "smollm2-135m": _shape(134_515_008, (49_152, 576, 1536, 30, 9), SMOLLM2),
    # The 353M backbone of Deep Delta Learning.
    "medium": _shape(353_508_352, (50_304, 1024, 2730, 24, 8), OURS),
    "qwen2.5-0.5b": _shape(494_032_768, (151_936, 896, 4864, 24, 14), QWEN25),
    # Its heads are wider together than the stream.
    "qwen3-0.6b": _shape(596_049_920, (151_936, 1024, 3072, 28, 16), QWEN3, head_dim=128),
    # The shape of the Hyper-Connections paper; OLMo's norms have no scale, which ours have.
    "olmo-1b": _shape(1_176_832_000, (50_304, 2048, 8192, 16, 16), {}),
    "llama-3.2-1b": _shape(1_235_814_400, (128_256, 2048, 8192, 16, 32), LONG),
    "qwen3-1.7b": _shape(1_720_574_976, (151_936, 2048, 6144, 28, 16), QWEN3),
    # Every fourth block has no rotary positions.
    "smollm3-3b": _shape(
        3_075_098_624, (128_256, 2048, 11_008, 36, 16), SMOLLM3, no_rope_blocks=tuple(range(3, 36, 4))
    ),
    "llama-3.2-3b": _shape(3_212_749_824, (128_256, 3072, 8192, 28, 24), LONG),
    "qwen3-4b": _shape(4_022_468_096, (151_936, 2560, 9728, 36, 32), QWEN3, head_dim=128),
    # Version 0.3, which has no sliding window.
    "mistral-7b": _shape(7_248_023_552, (32_768, 4096, 14_336, 32, 32), MISTRAL),
    "llama-3-8b": _shape(8_030_261_248, (128_256, 4096, 14_336, 32, 32), LLAMA3),
    "qwen3-8b": _shape(8_190_735_360, (151_936, 4096, 12_288, 36, 32), QWEN3 | LARGE),
    "qwen3-32b": _shape(
        *(32_762_123_264, (151_936, 5120, 25_600, 64, 64), LARGE), head_dim=128, rms_norm_eps=1e-6, qk_norm=True
    ),
    # The depth and width of Kimi-K3 as a dense decoder: without its experts and its latent attention only what the
    # stream does is K3's.
    "kimi-k3": _shape(50_133_758_976, (163_840, 7168, 18_432, 93, 56), LARGE, head_dim=128),
    "llama-3-70b": _shape(70_553_706_496, (128_256, 8192, 28_672, 80, 64), LARGE),
}
"""Every shape, by the number of its parameters: the published one for public weights."""

ALSO = {"1b": "llama-3.2-1b", "3b": "llama-3.2-3b", "8b": "llama-3-8b"}
"""Short names."""


def preset_names() -> tuple[str, ...]:
    """The names `preset` takes, the smallest shape first."""
    return tuple(PRESETS)


def preset_fields(name: str) -> dict[str, Any]:
    """The fields of a preset, as a fresh copy."""
    known = ALSO.get(name, name)
    if known not in PRESETS:
        hint = did_you_mean(name.lower(), [*PRESETS, *ALSO])
        raise ValueError(f"unknown preset {name!r}{hint}; the presets are {', '.join(PRESETS)}")
    return dict(PRESETS[known].fields)


def preset(name: str, **changes: Any) -> ModelConfig:
    """The configuration of a named shape.

        preset("nano", stream="deep_delta", num_hidden_layers=6)

    Args:
        name: one of `preset_names()`.
        **changes: fields of `ModelConfig` that are to be others.
    """
    return ModelConfig.from_dict(preset_fields(name) | changes, "a model")


def find_shape(given: str) -> ModelConfig | TwoAxisConfig:
    """The model of a name, of a configuration file, or of a folder with one. Files of families need transformers."""
    name = ALSO.get(given.lower(), given.lower())
    if name in PRESETS:
        return preset(name)
    path = user_path(given)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _read_shape(path)
    if "/" in given or given.endswith(".json"):
        raise ValueError(f"there is no configuration file {path}")
    hint = did_you_mean(name, [*PRESETS, *ALSO])
    raise ValueError(
        f"unknown shape {given!r}{hint}; give a config.json, a folder with one, or one of {', '.join(PRESETS)}"
    )


def _read_shape(path: Path) -> ModelConfig | TwoAxisConfig:
    """The model of a config.json: of a decoder of ours, of a graft, or of any family."""
    document = read_json(path)
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind is None:
        raise ValueError(f"{path} has no model_type: it is not the configuration of a transformers model")
    if is_decoder(document):
        return read_config(path)
    from twoaxis.model.graft_config import TwoAxisConfig, check_family, family_config

    family = document.get("text_config") if kind == GRAFT else document
    family = family if isinstance(family, dict) else {}
    try:
        check_family(family.get("model_type"))
        shape = TwoAxisConfig(text_config=family_config(family).get_text_config(decoder=True))
        _ = shape.architecture  # the dry run that everything else needs
        return shape
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
