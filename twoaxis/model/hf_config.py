"""`TwoAxisConfig`: an ordinary transformers configuration around `ModelConfig`.

Fields have the names the Llama, Mistral, Qwen and SmolLM families use where they mean the same. They are validated
when the configuration is built, and a field nobody knows is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from twoaxis.base import options
from twoaxis.base.registry import did_you_mean
from twoaxis.depth.site import MOST_BLOCKS
from twoaxis.model.config import ModelConfig

PASSED_ON = {
    # fields that transformers itself reads from a configuration file or from keyword arguments
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "custom_pipelines",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}

COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)
SWITCHES = (
    *("use_cache", "tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "qk_norm"),
    *("parallel_block", "hidden_ramp", "blend"),
)
OPTIONAL = ("intermediate_size", "num_key_value_heads", "head_dim", "mixer", "placement")

ELSEWHERE = ("eos_token_id", "rope_theta", "rope_scaling")
"""Fields of the decoder that transformers treats itself."""

ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}
"""Kinds of rotary positions and what each may be told beyond `ROPE_KEYS`."""


class TwoAxisConfig(PreTrainedConfig):
    """Shape of a two-axis model and its methods."""

    model_type = "twoaxis"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012
    default_theta = 10_000.0

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int | None = None
    """None is 8/3 of the hidden size, rounded up to a multiple of 8."""
    num_hidden_layers: int = 4
    """Blocks."""
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True
    rope_parameters: dict[str, Any] | None = None
    """As in transformers: rope_theta, rope_type and what the type needs."""
    attention_bias: bool = False
    """Biases on the query, key and value projections."""
    attention_output_bias: bool = False
    """A bias on the attention's output projection."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS-normalise queries and keys per head."""
    attention_windows: list[int | None] | None = None
    """Window of each block, the current token included; None, whole or in a place, is the full prefix."""
    no_rope_blocks: list[int] | None = None
    """Blocks without rotary positions."""
    parallel_block: bool = False
    """Attention and MLP side by side."""
    hidden_ramp: bool = False
    """MUDDFormer's re-allocation of the MLPs' widths."""
    init: str = "paper"
    """How the weights start: as the stream's paper prescribes, or "paired", alike for all streams."""
    stream: str = "standard"
    """Name of the residual stream."""
    stream_options: dict[str, Any] | None = None
    placement: str | None = None
    """Which blocks and sites use the stream's method, e.g. "8-11/attention"."""
    blend: bool = False
    """Start as the plain residual whatever the method."""
    mixer: str | None = None
    """Name of the local mixer."""
    mixer_options: dict[str, Any] | None = None
    mixer_blocks: list[int] | None = None
    """Blocks that have the mixer; None is all of them."""

    def __post_init__(self, **kwargs: Any) -> None:
        known = {field.name for field in dataclasses.fields(self)}
        check_types(self)
        allowed = PASSED_ON | set(GenerationConfig._get_default_generation_params())
        for name in kwargs:
            if name not in allowed:
                hint = did_you_mean(name, sorted(known))
                raise ValueError(
                    f"TwoAxisConfig has no field {name!r}{hint}; its own fields are {', '.join(own_fields())}"
                )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"num_attention_heads ({self.num_attention_heads}) must divide hidden_size ({self.hidden_size}), "
                    "or give head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        self.rope_parameters = self.rope_parameters and dict(self.rope_parameters)  # transformers fills in this copy
        super().__post_init__(**kwargs)
        check_rope(self)
        with torch.device("meta"):
            (shape := self.decoder_config()).make_stream()
        self.stream, self.mixer = shape.stream, shape.mixer
        self.stream_options = dict(shape.stream_options) or self.stream_options
        self.mixer_options = dict(shape.mixer_options) or self.mixer_options

    def decoder_config(self) -> ModelConfig:
        """The same shape for the decoder's own classes; raises a ValueError with the numbers where it is impossible."""
        names = [field.name for field in dataclasses.fields(ModelConfig) if field.name not in ELSEWHERE]
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return ModelConfig.from_dict(given)


LARGEST = {"vocab_size": 2**27, "num_hidden_layers": MOST_BLOCKS, "max_position_embeddings": 2**40}
"""Of counts that may not be beyond a million or so; a larger number is a slip, and would take all memory."""


def check_types(config: TwoAxisConfig) -> None:
    """Refuse values that no later check would name by the field they came in."""
    for name in COUNTS:
        value = getattr(config, name)
        if name in OPTIONAL and value is None:
            continue
        options.check_type(name, value, Annotated[int, options.between(1, LARGEST.get(name, 2**20))])
    for name in SWITCHES:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    for name in ("rms_norm_eps", "initializer_range"):
        value = getattr(config, name)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    for name in ("stream_options", "mixer_options", "rope_parameters"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{name} must be a dictionary or None, got {value!r}")
    for name in ("attention_windows", "no_rope_blocks", "mixer_blocks"):
        value = getattr(config, name)
        if value is not None and not isinstance(value, list | tuple):
            raise ValueError(f"{name} must be a list or None, got {value!r}")
    for name in ("stream", "mixer", "placement", "hidden_act"):
        value = getattr(config, name)
        if not isinstance(value, str) and not (value is None and name in OPTIONAL):
            raise ValueError(f"{name} must be a name, got {value!r}")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
    windows = config.attention_windows
    if windows is not None and len(windows) != config.num_hidden_layers:
        raise ValueError(
            f"attention_windows has {len(windows)} entries, num_hidden_layers is {config.num_hidden_layers}"
        )
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ValueError(
            f"pad_token_id ({config.pad_token_id}) is outside the {config.vocab_size} tokens of vocab_size"
        )


def check_rope(config: TwoAxisConfig) -> None:
    """Refuse rotary positions that transformers would notice in the first pass only, or warn about."""
    given = config.rope_parameters or {}
    kind, size = given.get("rope_type"), config.head_dim
    if kind not in ROPE_TYPES:
        raise ValueError(f"unknown rope_type {kind!r}; it is one of {', '.join(ROPE_TYPES)}")
    for name in ("rope_theta", "factor"):
        value = given.get(name, 1.0)
        if value is not None and (not isinstance(value, int | float) or not value > 0):
            raise ValueError(f"rope_parameters has {name}={value!r}; it must be a positive number")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor is {given['partial_rotary_factor']!r}; heads are rotated whole, so it is 1"
        )
    unknown = set(given) - {*ROPE_KEYS, *ROPE_TYPES[kind]}
    if unknown:
        raise ValueError(f"rope_parameters of type {kind!r} have no {sorted(unknown)[0]!r}")
    try:
        config.validate_rope()
    except KeyError as error:
        raise ValueError(str(error.args[0])) from None
    for name in ("short_factor", "long_factor"):
        if name in given and size is not None and len(given[name]) != size // 2:
            raise ValueError(f"{name} has {len(given[name])} entries; heads of {size} channels need {size // 2}")


def own_fields() -> list[str]:
    """The fields TwoAxisConfig adds to what every transformers configuration has."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(TwoAxisConfig) if field.name not in inherited]
