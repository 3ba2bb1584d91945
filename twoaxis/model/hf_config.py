"""`TwoAxisConfig`: an ordinary transformers configuration around `DecoderConfig`.

Fields have the names the Llama, Mistral, Qwen and SmolLM families use where they mean the same. They are validated
when the configuration is built, and a field nobody knows is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from twoaxis.model.config import DecoderConfig

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
        allowed = PASSED_ON | set(GenerationConfig._get_default_generation_params())
        for name in kwargs:
            if name not in allowed:
                close = difflib.get_close_matches(name, sorted(known), n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
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
        super().__post_init__(**kwargs)
        with torch.device("meta"):
            self.decoder_config().make_stream()

    def decoder_config(self) -> DecoderConfig:
        """The same shape for the decoder's own classes; raises a ValueError with the numbers where it is impossible."""
        return DecoderConfig(
            vocabulary=self.vocab_size,
            width=self.hidden_size,
            blocks=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_width=self.head_dim,
            hidden=self.intermediate_size,
            hidden_ramp=self.hidden_ramp,
            block="parallel" if self.parallel_block else "sequential",
            activation=self.hidden_act,
            qkv_bias=self.attention_bias,
            output_bias=self.attention_output_bias,
            mlp_bias=self.mlp_bias,
            qk_norm=self.qk_norm,
            windows=None if self.attention_windows is None else tuple(self.attention_windows),
            nope_blocks=tuple(self.no_rope_blocks or ()),
            norm_eps=self.rms_norm_eps,
            tied=self.tie_word_embeddings,
            std=self.initializer_range,
            stream=self.stream,
            stream_options=self.stream_options or {},
            placement=self.placement,
            blend=self.blend,
            mixer=self.mixer,
            mixer_options=self.mixer_options or {},
            mixer_blocks=None if self.mixer_blocks is None else tuple(self.mixer_blocks),
        )


def own_fields() -> list[str]:
    """The fields TwoAxisConfig adds to what every transformers configuration has."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(TwoAxisConfig) if field.name not in inherited]
