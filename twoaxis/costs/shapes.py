"""Shapes of decoders by name: our presets, public models, and configuration files of transformers.

    llama-3-8b, 8b, small      a preset; see `twoaxis.model.presets`
    qwen3-32b, kimi-k3         a public shape that nobody trains on a laptop
    path/to/config.json        a TwoAxisConfig, or Llama, Mistral, Qwen2, Qwen3 or SmolLM3; a folder with one will do

Only configuration files need transformers. A shape is a backbone; its stream and mixer are named apart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from twoaxis.base.registry import did_you_mean
from twoaxis.model.config import SHORT, ModelConfig
from twoaxis.model.presets import ALSO, PRESETS, Preset

if TYPE_CHECKING:
    from twoaxis.model.variant import Contender

PUBLIC: dict[str, Preset] = {
    "olmo-1b": Preset(
        "OLMo 1B, the shape of the Hyper-Connections paper: its norms have no scale, which ours have.",
        1_176_832_000,
        {
            "vocab_size": 50_304,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
        },
    ),
    "qwen3-32b": Preset(
        "Qwen3-32B.",
        32_762_123_264,
        {
            "vocab_size": 151_936,
            "hidden_size": 5120,
            "intermediate_size": 25_600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "qk_norm": True,
        },
    ),
    "llama-3-70b": Preset(
        "Llama 3 70B.",
        70_553_706_496,
        {
            "vocab_size": 128_256,
            "hidden_size": 8192,
            "intermediate_size": 28_672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "kimi-k3": Preset(
        "The depth and width of Kimi-K3, 93 layers of 7168, as a dense decoder: its experts and its latent attention "
        "are not modelled, so only what the stream does is K3's.",
        50_133_758_976,
        {
            "vocab_size": 163_840,
            "hidden_size": 7168,
            "intermediate_size": 18_432,
            "num_hidden_layers": 93,
            "num_attention_heads": 56,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
    ),
}
"""Public shapes beyond the presets; `parameters` as the backbone here has them."""


def shape_names() -> tuple[str, ...]:
    """Every name, the smallest shape first."""
    both = {**PRESETS, **PUBLIC}
    return tuple(sorted(both, key=lambda name: both[name].parameters))


def find_shape(given: str) -> ModelConfig:
    """The decoder of a name or of a configuration file."""
    name = ALSO.get(given.lower(), given.lower())
    if name in PRESETS or name in PUBLIC:
        found = PRESETS.get(name) or PUBLIC[name]
        fields = {key: value for key, value in found.fields.items() if key != "rope_parameters"}
        fields["no_rope_blocks"] = tuple(fields.get("no_rope_blocks", ()))
        return ModelConfig(**fields)  # how positions are rotated costs nothing
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    if "/" in given or given.endswith(".json"):
        raise ValueError(f"there is no configuration file {path}")
    hint = did_you_mean(name, [*PRESETS, *PUBLIC, *ALSO])
    raise ValueError(
        f"unknown shape {given!r}{hint}; give a config.json, a folder with one, or one of {', '.join(shape_names())}"
    )


def _from_file(path: Path) -> ModelConfig:
    try:
        fields = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON document: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"{path} has no model_type: it is not the configuration of a transformers model")
    kind = fields.pop("model_type")
    if kind == "twoaxis":
        from twoaxis.model.hf_config import TwoAxisConfig

        return TwoAxisConfig.from_dict(fields).decoder_config()
    from transformers import AutoConfig

    from twoaxis.model.family import FAMILIES, from_family

    if kind not in FAMILIES:
        raise ValueError(f"model_type {kind!r} has no decoder of ours; the families are {', '.join(FAMILIES)}")
    made = AutoConfig.for_model(kind, **fields)
    cast(Any, made).rope_parameters = None  # how positions are rotated costs nothing
    return from_family(made)


def with_method(shape: ModelConfig, method: Contender) -> ModelConfig:
    """A shape with the stream and the mixer of a contender in place of its own.

    Args:
        shape: the backbone.
        method: as `twoaxis.base.spec.make_contender` reads it; `placement`, `blend` and `mixer_blocks` are understood.
    """
    import dataclasses

    if method.train:
        raise ValueError(
            f"{method.label}: train.{next(iter(method.train))} changes the training, which has no cost here"
        )
    changes: dict[str, Any] = {"stream": method.stream, "stream_options": dict(method.stream_options)}
    changes |= {"mixer": method.mixer, "mixer_options": dict(method.mixer_options)}
    changes |= {"placement": None, "blend": False, "mixer_blocks": None}
    known = {field.name for field in dataclasses.fields(shape)} | set(SHORT)
    for key, value in method.model.items():
        if key not in known:
            hint = did_you_mean(key, sorted(known))
            raise ValueError(f"{method.label}: a decoder has no field {key!r}{hint}")
        value = tuple(value) if isinstance(value, list) else value
        changes[SHORT.get(key, key)] = value
    if changes["mixer"] is None:
        changes |= {"mixer_options": {}, "mixer_blocks": None}
    return dataclasses.replace(shape, **changes)
