"""Every stream and mixer with every variant, as fields of `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from twoaxis.costs.trace import TrainTrace, meta_model, trace_training
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.loss import next_token_loss
from twoaxis.sequence.registry import MIXERS

Fields = dict[str, Any]
SIZES: Any = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
SHAPE = ModelConfig(num_hidden_layers=3, num_key_value_heads=2, **SIZES)

STREAM_VARIANTS: list[Fields] = [
    {"stream": name, "stream_options": dict(options)}
    for name in STREAMS.names()
    for options in STREAMS.find(name).variants
]
MIXER_VARIANTS: list[Fields] = [
    {"mixer": name, "mixer_options": dict(options)} for name in MIXERS.names() for options in MIXERS.find(name).variants
]
FIRST: list[Fields] = [
    fields
    for number, fields in enumerate(STREAM_VARIANTS)
    if not number or STREAM_VARIANTS[number - 1]["stream"] != fields["stream"]
]
"""One variant of each stream."""
FIRST_MIXERS: list[Fields] = [{"mixer": n, "mixer_options": dict(MIXERS.find(n).variants[0])} for n in MIXERS.names()]
WIDE_DELTA: Fields = {
    "stream": "deep_delta",
    "stream_options": {"value_channels": 2, "compress": "token", "expand": "conv"},
}


def label(fields: Fields) -> str:
    """For the names of tests."""
    name = fields.get("stream") or fields.get("mixer") or str(fields)
    options = fields.get("stream_options") or fields.get("mixer_options") or {}
    return " ".join([name, *(f"{key}={value}" for key, value in options.items())])


def passes(config: ModelConfig, batch: int, tokens: int) -> Callable[[Any], None]:
    """A function that runs one forward and backward pass inside a context."""
    model = Decoder(config)
    given = torch.randint(0, config.vocab_size, (batch, tokens + 1), generator=torch.Generator().manual_seed(0))

    def run(context: Any) -> None:
        model.zero_grad(set_to_none=True)
        with context:
            next_token_loss(model, given).backward()

    return run


def counted(config: ModelConfig, batch: int, tokens: int) -> TrainTrace:
    """The same, counted without running it."""
    return trace_training(meta_model(config, "float32"), batch, tokens, "cpu")
