"""The plain stream against transformers' own Llama, Mistral, Qwen2, Qwen3 and SmolLM3, over their switches."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import PreTrainedModel

from tests.model.hf_helpers import TOLERANCE
from tests.support.foreign import Make, llama, mistral, pretrained, qwen2, qwen3, smollm3
from tests.support.numbers import far
from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.pretrained.families import map_config, our_name

LENGTH = 22
"""Longer than the 16 positions the models are made for, so that rotary types which change beyond them do change."""


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE = {
    "factor": 2.0,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

MODELS: dict[str, Make] = {
    "llama": llama(),
    "llama tied": llama(tie_word_embeddings=True),
    "llama all heads": llama(num_key_value_heads=4),
    "llama one key head": llama(num_key_value_heads=1),
    "llama attention_bias": llama(attention_bias=True),
    "llama mlp_bias": llama(mlp_bias=True),
    "llama head_dim": llama(head_dim=6),
    "llama gelu": llama(hidden_act="gelu"),
    "llama gelu_pytorch_tanh": llama(hidden_act="gelu_pytorch_tanh"),
    "llama relu": llama(hidden_act="relu"),
    "llama eps": llama(rms_norm_eps=1e-2),
    "llama theta": llama(**rope("default")),
    "llama linear": llama(**rope("linear", factor=3.0)),
    "llama dynamic": llama(**rope("dynamic", factor=2.0)),
    "llama yarn": llama(**rope("yarn", factor=4.0, original_max_position_embeddings=8)),
    "llama yarn attention": llama(**rope("yarn", factor=4.0, attention_factor=0.7, beta_fast=16.0, beta_slow=2.0)),
    "llama llama3": llama(**rope("llama3", **LLAMA3)),
    "llama longrope": llama(**rope("longrope", **LONGROPE)),
    "mistral window 4": mistral(sliding_window=4),
    "mistral window 2": mistral(sliding_window=2, head_dim=10),
    "mistral full": mistral(sliding_window=None, tie_word_embeddings=True),
    "qwen2": qwen2(),
    "qwen2 tied": qwen2(tie_word_embeddings=True, num_key_value_heads=4),
    "qwen2 max_window_layers": qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "qwen2 layer_types": qwen2(use_sliding_window=True, sliding_window=3, layer_types=SLIDING),
    "qwen2 unused window": qwen2(use_sliding_window=False, sliding_window=3),
    "qwen2 yarn": qwen2(**rope("yarn", factor=2.0, original_max_position_embeddings=8)),
    "qwen3": qwen3(head_dim=12),
    "qwen3 tied": qwen3(head_dim=8, tie_word_embeddings=True, attention_bias=True),
    "qwen3 layer_types": qwen3(head_dim=8, use_sliding_window=True, sliding_window=4, layer_types=SLIDING),
    "smollm3": smollm3(no_rope_layer_interval=2),
    "smollm3 layers": smollm3(no_rope_layers=[0, 1, 1, 0], attention_bias=True, mlp_bias=True),
    "smollm3 windows": smollm3(no_rope_layers=[1, 0, 1, 0], use_sliding_window=True, sliding_window=4),
    "smollm3 tied": smollm3(tie_word_embeddings=True, **rope("default")),
}


def mapped_weights(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict of theirs, for the plain stream: one way per pre-norm."""
    ours: dict[str, Tensor] = {}
    for key, tensor in theirs.items():
        name = our_name(key)
        assert name is not None
        ours[name] = tensor
    return ours


def pair(make: Make, dtype: torch.dtype) -> tuple[PreTrainedModel, TwoAxisForCausalLM]:
    """One of their models and ours with the same weights."""
    theirs = pretrained(make, dtype)
    ours = cast(Any, TwoAxisForCausalLM(map_config(theirs.config))).to(dtype).eval()
    ours.load_state_dict(mapped_weights(theirs.state_dict()), strict=True)
    return theirs, ours


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(1, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


Models = tuple[Any, Any]


def logits_equal(models: Models, bound: float) -> None:
    """Within and beyond the positions they are made for."""
    for length in (7, LENGTH):
        theirs, ours = (model(tokens()[:, :length]).logits for model in models)
        assert far(ours, theirs) <= bound, length


def cached_logits_equal(models: Models, bound: float) -> None:
    pasts: list[Any] = [None, None]
    for chunk in tokens().split([9, 1, 1, 5, 1, 1, 4], dim=1):
        found = [model(chunk, past_key_values=past, use_cache=True) for model, past in zip(models, pasts, strict=True)]
        pasts = [each.past_key_values for each in found]
        assert far(found[1].logits, found[0].logits) <= bound


def padded_logits_equal(models: Models, bound: float, *, counted: bool, cached: bool) -> None:
    """With padding on the left, with running positions or counted ones, in one pass or in several."""
    given = tokens()
    mask = torch.ones_like(given)
    mask[0, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    pasts, start = [None, None], 0
    for length in (13, 1, 1, LENGTH - 15) if cached else (LENGTH,):
        at = slice(start, start + length)
        start += length
        common: dict[str, Any] = {"attention_mask": mask[:, :start], "use_cache": cached}
        if counted:
            common["position_ids"] = positions[:, at]
        found = [model(given[:, at], past_key_values=past, **common) for model, past in zip(models, pasts, strict=True)]
        pasts = [each.past_key_values for each in found]
        real = mask[:, at].bool()
        assert far(found[1].logits[real], found[0].logits[real]) <= bound, (counted, cached)


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal(name: str) -> None:
    models, bound = pair(MODELS[name], torch.float64), TOLERANCE[torch.float64]
    logits_equal(models, bound)
    cached_logits_equal(models, bound)
    for counted in (False, True):
        for cached in (False, True):
            padded_logits_equal(models, bound, counted=counted, cached=cached)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral window 4", "qwen2", "qwen3", "smollm3"])
def test_logits_equal_in_float32(name: str) -> None:
    """As people run them: their norms as they are, and rounding of the size it has."""
    models, bound = pair(MODELS[name], torch.float32), TOLERANCE[torch.float32]
    logits_equal(models, bound)
    cached_logits_equal(models, bound)


@pytest.mark.parametrize("name", ["llama", "mistral window 4", "qwen3", "smollm3"])
def test_greedy_generation_equals(name: str) -> None:
    theirs, ours = pair(MODELS[name], torch.float64)
    given = tokens()[:, :8]
    mask = torch.ones_like(given)
    mask[1, :3] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = theirs.generate(given, **arguments)  # type: ignore[operator]
    assert torch.equal(ours.generate(given, **arguments), expected)  # type: ignore[operator]


def test_gradients_equal() -> None:
    theirs, ours = pair(MODELS["qwen3"], torch.float64)
    given = tokens()
    for model in (theirs, ours):
        model(given, labels=given).loss.backward()
    expected = mapped_weights({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    found = {name: p.grad for name, p in ours.named_parameters()}
    assert set(found) == set(expected)
    for name, gradient in found.items():
        assert gradient is not None
        assert far(gradient, expected[name]) <= 1e-9, name


def test_the_helper_is_sensitive() -> None:
    """A window off by one, a forgotten bias or a rotated NoPE block would be seen."""
    for name, change in {
        "mistral window 4": {"attention_windows": [5] * 4},
        "llama": {"no_rope_blocks": [1]},
        "llama yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    }.items():
        theirs, ours = pair(MODELS[name], torch.float64)
        fields = {**map_config(theirs.config).to_diff_dict(), **change}
        other = TwoAxisForCausalLM(TwoAxisConfig(**{k: v for k, v in fields.items() if k != "model_type"}))
        other.load_state_dict(ours.state_dict())
        other = other.double().eval()
        with torch.no_grad():
            assert far(other(tokens()).logits, theirs(tokens()).logits) > 1e-4, name
