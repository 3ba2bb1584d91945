"""The plain stream against transformers' own Llama, Mistral, Qwen2, Qwen3 and SmolLM3, over their switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from tests.model.hf_helpers import TOLERANCE, far, shake
from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_model import TwoAxisForCausalLM
from twoaxis.pretrained.families import map_config, our_name

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTH = 22
"""Longer than the 16 positions above, so that rotary types which change beyond them do change."""

Make = Callable[[], PreTrainedModel]


def llama(**changes: Any) -> Make:
    return lambda: LlamaForCausalLM(LlamaConfig(**{**TINY, **changes}))


def mistral(**changes: Any) -> Make:
    return lambda: MistralForCausalLM(MistralConfig(**{**TINY, **changes}))


def qwen2(**changes: Any) -> Make:
    return lambda: Qwen2ForCausalLM(Qwen2Config(**{**TINY, **changes}))


def qwen3(**changes: Any) -> Make:
    return lambda: Qwen3ForCausalLM(Qwen3Config(**{**TINY, **changes}))


def smollm3(**changes: Any) -> Make:
    return lambda: SmolLM3ForCausalLM(SmolLM3Config(**{**TINY, **changes}))


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
        ours[name] = tensor.unsqueeze(0) if ".norms." in name else tensor
    return ours


def wide_norms(model: PreTrainedModel) -> None:
    """Let their norms compute in the model's own dtype.

    They cast to float32 inside whatever the model's dtype, which leaves errors of 1e-7 in a float64 model.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)  # type: ignore[method-assign]


def pair(make: Make, dtype: torch.dtype) -> tuple[PreTrainedModel, TwoAxisForCausalLM]:
    """One of their models and ours with the same weights."""
    torch.manual_seed(0)
    theirs = make()
    shake(theirs, by=0.2)
    theirs = cast(Any, theirs).to(dtype).eval()
    if dtype == torch.float64:
        wide_norms(theirs)
    ours = cast(Any, TwoAxisForCausalLM(map_config(theirs.config))).to(dtype).eval()
    ours.load_state_dict(mapped_weights(theirs.state_dict()), strict=True)
    return theirs, ours


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(1, 61, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal(name: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(MODELS[name], dtype)
    for length in (7, LENGTH):  # within and beyond the trained positions
        given = tokens()[:, :length]
        assert far(ours(given).logits, theirs(given).logits) <= TOLERANCE[dtype]


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_cached_logits_equal(name: str, dtype: torch.dtype) -> None:
    theirs, ours = pair(MODELS[name], dtype)
    given, their_past, our_past = tokens(), None, None
    for chunk in given.split([9, 1, 1, 5, 1, 1, 4], dim=1):
        a = theirs(chunk, past_key_values=their_past, use_cache=True)
        b = ours(chunk, past_key_values=our_past, use_cache=True)
        their_past, our_past = a.past_key_values, b.past_key_values
        assert far(b.logits, a.logits) <= TOLERANCE[dtype]


@torch.no_grad()
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
@pytest.mark.parametrize("positions", [False, True], ids=["running", "counted"])
@pytest.mark.parametrize("name", MODELS)
def test_left_padded_logits_equal(name: str, positions: bool, cached: bool) -> None:
    theirs, ours = pair(MODELS[name], torch.float64)
    given = tokens()
    mask = torch.ones_like(given)
    mask[0, :6] = 0
    counted = (mask.cumsum(-1) - 1).clamp_min(0)
    their_past, our_past, start = None, None, 0
    for length in (13, 1, 1, LENGTH - 15) if cached else (LENGTH,):
        at = slice(start, start + length)
        start += length
        common: dict[str, Any] = {"attention_mask": mask[:, :start], "use_cache": cached}
        if positions:
            common["position_ids"] = counted[:, at]
        a = theirs(given[:, at], past_key_values=their_past, **common)
        b = ours(given[:, at], past_key_values=our_past, **common)
        their_past, our_past = a.past_key_values, b.past_key_values
        real = mask[:, at].bool()
        assert far(b.logits[real], a.logits[real]) <= 1e-10


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
