"""Our decoder is the graft of a family on the same weights, for every stream and mixer; slow: every variant."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM

from tests.model.graft_helpers import logits, to_family
from twoaxis.base.registry import Registry, spell
from twoaxis.depth.registry import STREAMS
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.decoder_as_graft import decoder_key, graft_key
from twoaxis.model.graft import graft
from twoaxis.model.graft_survey import difference
from twoaxis.sequence.registry import MIXERS

BASE = ModelConfig(vocab_size=61, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
TOKENS = torch.randint(0, 61, (2, 14), generator=torch.Generator().manual_seed(2))
SEEN_BY_THE_TRUNK = {"compress", "ways", "over", "where"}
"""Options that change what a stream remembers and reads, or where a mixer acts; a trunk does not see the others."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "qwen3": {"qk_norm": True, "attention_windows": (3, None, 3), "head_dim": 12},
    "qwen2": {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "smollm3": {"no_rope_blocks": (1,), "attention_windows": (None, 5, 5)},
    "stretched": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
}


def variants(registry: Registry[Any]) -> list[Any]:
    """Every variant of every method; slow where a trunk has seen one like it."""
    return [
        pytest.param(
            spell(name, dict(options)), marks=[pytest.mark.slow] if i and not SEEN_BY_THE_TRUNK & {*options} else []
        )
        for name in registry.names()
        for i, options in enumerate(registry.find(name).variants)
    ]


def both(config: ModelConfig) -> tuple[Decoder, Any]:
    """A decoder with active parameters, and the graft of its family with the same."""
    decoder = Decoder(config, seed=0).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    backbone = AutoModelForCausalLM.from_config(to_family(config))
    made = graft(backbone, config.methods(), start="paper").eval()
    state = {graft_key(name): tensor for name, tensor in decoder.state_dict().items()}
    if config.tie_word_embeddings:
        state["backbone.lm_head.weight"] = state["backbone.model.embed_tokens.weight"]
    made.load_state_dict(state)  # strict: every key has its place
    return decoder, made


@torch.no_grad()
def check(config: ModelConfig) -> None:
    decoder, made = both(config)
    expected = decoder(TOKENS)
    assert difference(logits(made, TOKENS), expected) < 1e-5
    cache = made.make_cache()
    parts = [logits(made, part, past_key_values=cache, use_cache=True) for part in TOKENS.split([5, 1, 8], dim=1)]
    assert difference(torch.cat(parts, dim=1), expected) < 1e-5
    for name in decoder.state_dict():
        assert decoder_key(graft_key(name)) == name


@pytest.mark.parametrize("spelled", variants(STREAMS))
def test_a_decoder_with_any_stream_is_the_graft_of_its_family(spelled: str) -> None:
    config = dataclasses.replace(BASE, stream=spelled)
    heads = config.make_stream().kv_heads
    check(config if heads is None else dataclasses.replace(config, num_key_value_heads=heads))


@pytest.mark.parametrize("spelled", ["gated_streams:rank=6", "depth_kv", "lime:over=heads,kv_heads=2", "muddformer"])
def test_gradients_of_a_decoder_are_those_of_the_graft(spelled: str) -> None:
    """Where a graft acts inside their layers: in the place of norms, on keys and values, on separate ways."""
    config = dataclasses.replace(BASE, stream=spelled, qk_norm=True)
    decoder, made = both(config)
    decoder.double()
    made.double()
    made.set_attn_implementation("eager")
    decoder(TOKENS).square().mean().backward()
    made(TOKENS, use_cache=False).logits.square().mean().backward()
    theirs: dict[str, Any] = {decoder_key(name): parameter.grad for name, parameter in made.named_parameters()}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None
        # a family's norms and softmax compute in float32 whatever the model's dtype
        assert difference(theirs[name], parameter.grad) < 1e-4, name


@pytest.mark.parametrize("spelled", variants(MIXERS))
def test_a_decoder_with_any_mixer_is_the_graft_of_its_family(spelled: str) -> None:
    check(dataclasses.replace(BASE, mixer=spelled, mixer_options={}, mixer_blocks=(0, 2), stream="muddformer"))


@pytest.mark.parametrize("name", SHAPES)
def test_options_find_their_family(name: str) -> None:
    config = dataclasses.replace(BASE, **SHAPES[name])
    assert to_family(config).model_type == ("llama" if name == "stretched" else name)
    check(config)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"parallel_block": True}, "has parallel_block=True: the model stays a Decoder"),
        ({"hidden_ramp": True, "intermediate_size": 512}, "has hidden_ramp=True"),
        ({"attention_windows": (2, 3, None)}, r"has windows of \[2, 3\]"),
        ({"qk_norm": True, "mlp_bias": True}, "qk_norm=True, mlp_bias=True"),
        ({"attention_output_bias": True}, "attention_output_bias=True"),
    ],
)
def test_options_that_no_family_has_are_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        to_family(dataclasses.replace(BASE, **changes))
