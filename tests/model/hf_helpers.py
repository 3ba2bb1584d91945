"""Tiny transformers models of every method, for the tests of the transformers classes."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.support.decoders import SMALL, instances
from tests.support.foreign import shake
from twoaxis.model.config import ModelConfig
from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM, TwoAxisOutput

VOCABULARY = SMALL.vocab_size
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def as_hf(config: ModelConfig, **more: Any) -> TwoAxisConfig:
    """The transformers configuration of a decoder's."""
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "max_position_embeddings": 64,
        "parallel_block": config.parallel_block,
        "attention_windows": None if config.attention_windows is None else list(config.attention_windows),
        "tie_word_embeddings": config.tie_word_embeddings,
        "stream": config.stream,
        "stream_options": dict(config.stream_options),
        "placement": config.placement,
        "blend": config.blend,
        "mixer": config.mixer,
        "mixer_options": dict(config.mixer_options),
        "mixer_blocks": None if config.mixer_blocks is None else list(config.mixer_blocks),
    }
    return TwoAxisConfig(**{**fields, **more})


# Untied: a tied head at random weights repeats the last token, whatever the method does.
BASE = dataclasses.replace(SMALL, tie_word_embeddings=False)
TOKEN_DELTA = {"value_channels": 2, "compress": "token", "expand": "conv"}
SWA = {"window": 3, "heads": 2, "start": "normal"}

COMBINED: dict[str, ModelConfig] = {
    "attention_windows": dataclasses.replace(BASE, attention_windows=(3, None, 1)),
    "every window": dataclasses.replace(BASE, attention_windows=(2, 4, 3)),
    "parallel": dataclasses.replace(BASE, parallel_block=True, stream="muddformer", attention_windows=(None, 2, None)),
    "tied": dataclasses.replace(BASE, tie_word_embeddings=True, stream="denseformer"),
    "blend": dataclasses.replace(BASE, blend=True, stream="deep_delta", stream_options=TOKEN_DELTA),
    "placement": dataclasses.replace(BASE, placement="1/attention", stream="attention_residuals"),
    "two axes": dataclasses.replace(
        BASE, stream="deep_delta", stream_options=TOKEN_DELTA, mixer="canon", attention_windows=(2, None, 3)
    ),
    "ways and mixer": dataclasses.replace(
        BASE, stream="muddformer", mixer="short_swa", mixer_options=SWA, mixer_blocks=(0, 2)
    ),
}
"""Options that meet each other: windows with streams that mix tokens, ways with mixers, placement, Blend."""

MEMORY: dict[str, ModelConfig] = {
    "none": BASE,
    "windows": COMBINED["attention_windows"],
    "short_swa": dataclasses.replace(BASE, mixer="short_swa", mixer_options=SWA),
    "short_conv": dataclasses.replace(BASE, mixer="short_conv", mixer_options={"start": "uniform"}),
    "canon": dataclasses.replace(BASE, mixer="canon"),
    "deep_delta TC+EC": dataclasses.replace(BASE, stream="deep_delta", stream_options=TOKEN_DELTA),
    "two axes": COMBINED["two axes"],
    "parallel": COMBINED["parallel"],
}
"""One model for each kind of memory. The transformers classes know no method: they differ by what a model remembers
of earlier tokens, and what holds for every method is a check of the kit."""

MEMORIES = [pytest.param(config, id=name) for name, config in MEMORY.items()]

_firsts: dict[str, ModelConfig] = {}
for _config in dict(instances(tie_word_embeddings=False)).values():
    _firsts.setdefault(_config.mixer or _config.stream, _config)
ONE_EACH: dict[str, ModelConfig] = {
    **_firsts,
    "deep_delta TC+EC": MEMORY["deep_delta TC+EC"],
    **COMBINED,
}
"""One variant of every stream and mixer, and the combinations: for what is different for each method."""


def make(
    config: ModelConfig | TwoAxisConfig, dtype: torch.dtype = torch.float64, seed: int = 0, **more: Any
) -> TwoAxisForCausalLM:
    """A model in evaluation mode, every parameter moved off its initial value.

    At a tiny width the initial ones leave logits so flat that an error would drown in the tolerance. In float32 they
    move less: strongly moved routing is ill-conditioned, and rounding alone would come near the tolerance.
    """
    torch.manual_seed(seed)
    model = TwoAxisForCausalLM(config if isinstance(config, TwoAxisConfig) else as_hf(config, **more))
    shake(model, seed, 0.3 if dtype == torch.float64 else 0.1)
    return cast(Any, model).to(dtype).eval()


_kept: dict[tuple[int, torch.dtype], TwoAxisForCausalLM] = {}


def shared(config: ModelConfig, dtype: torch.dtype = torch.float64) -> TwoAxisForCausalLM:
    """`make`, kept while the same configuration is asked for, for tests that draw many examples and change nothing."""
    key = (id(config), dtype)
    if key not in _kept:
        if len(_kept) > 3:
            _kept.clear()
        _kept[key] = make(config, dtype)
    return _kept[key]


def prompt(seed: int, batch: int = 2, length: int = 12) -> Tensor:
    """Random tokens."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model: TwoAxisForCausalLM, tokens: Tensor, **arguments: Any) -> Tensor:
    """The logits of one call, without a graph."""
    found = output(model, tokens, **arguments).logits
    assert found is not None
    return found


@torch.no_grad()
def output(model: Any, tokens: Tensor | None = None, **arguments: Any) -> TwoAxisOutput:
    """The output of one call, without a graph."""
    found = model(input_ids=tokens, **arguments)
    assert isinstance(found, TwoAxisOutput)
    return found
