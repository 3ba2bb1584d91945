"""Retrofitted with the plain stream, every family computes what transformers' own classes compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, SmolLM3Config

import twoaxis
from tests.model.hf_helpers import TOLERANCE
from tests.model.test_hf_families import LENGTH, MODELS
from tests.pretrained.helpers import convert, tokens
from tests.support.foreign import TINY, llama, pretrained
from tests.support.numbers import far
from twoaxis.pretrained.families import FAMILIES, check_config, map_config, our_name

ONE_EACH = ("llama", "llama tied", "mistral window 4", "qwen2 layer_types", "qwen3 tied", "smollm3 layers")
"""Every family, and both kinds of head; over the switches of a family the same mapping is held to the source's
numbers by tests/model/test_hf_families.py."""


@pytest.mark.parametrize("name", ONE_EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@torch.no_grad()
def test_the_logits_are_the_sources(name: str, dtype: torch.dtype) -> None:
    theirs = pretrained(MODELS[name], dtype)
    made = twoaxis.retrofit(theirs, tokens=8)
    assert made.record.added_parameters == 0
    assert made.record.measured["source"]["relative"] <= TOLERANCE[dtype]
    given = tokens(length=LENGTH)
    assert far(made.model(given).logits, theirs(given).logits) <= TOLERANCE[dtype]


def test_weights_are_copied_from_a_model_at_hand_and_it_is_left_alone() -> None:
    theirs = pretrained(llama(tie_word_embeddings=True)).train()
    before = {name: p.clone() for name, p in theirs.named_parameters()}
    made = twoaxis.retrofit(theirs, stream="denseformer", tokens=8)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter += 1.0
    assert theirs.training
    assert not made.model.training
    assert made.model.lm_head.weight is made.model.model.embed_tokens.weight
    assert all(torch.equal(p, before[name]) for name, p in theirs.named_parameters())


def test_a_scale_stands_in_every_way() -> None:
    theirs = pretrained(llama())
    model, _ = convert(theirs, "muddformer")
    source = theirs.get_parameter("model.layers.2.input_layernorm.weight")
    for way in ("", "norm_k.", "norm_v."):
        assert torch.equal(model.get_parameter(f"model.trunk.layers.2.input_layernorm.{way}weight"), source)


def test_fields_that_are_not_understood_are_refused_by_name_and_value() -> None:
    cases: dict[str, tuple[type[PreTrainedConfig], Any]] = {
        "logit_scale": (LlamaConfig, 0.5),
        "sliding_window": (LlamaConfig, 8),
        "rope_interleaved": (LlamaConfig, True),
        "is_encoder_decoder": (Qwen2Config, True),
        "embedding_multiplier": (SmolLM3Config, 12.0),
    }
    for name, (kind, value) in cases.items():
        config = kind(**{**TINY, name: value})
        with pytest.raises(ValueError, match=f"{name}={value!r}"):
            check_config(config)


def test_what_is_ignored_is_said_and_the_rest_passes() -> None:
    harmless: dict[str, Any] = {"rope_interleaved": False, "is_llama_config": True, "unsloth_fixed": True}
    config = LlamaConfig(**TINY, **harmless, attention_dropout=0.1, pretraining_tp=2)
    notes = check_config(config)
    assert len(notes) == 2
    assert notes[0].startswith("pretraining_tp=2 is ignored: ")
    assert notes[1].startswith("attention_dropout=0.1 is ignored: ")
    for name in MODELS:
        assert check_config(pretrained(MODELS[name]).config) == [], name


def test_other_architectures_and_names_are_refused() -> None:
    with pytest.raises(ValueError, match="LlamaForSequenceClassification; retrofit takes LlamaForCausalLM"):
        check_config(LlamaConfig(**TINY, architectures=["LlamaForSequenceClassification"]))
    with pytest.raises(ValueError, match=r"model_type 'gpt2' is none .*llama \(Llama, SmolLM, SmolLM2\), mistral"):
        check_config(GPT2Config())
    for key in ("model.layers.0.self_attn.q_proj.lora_A", "model.layers.x.mlp.up_proj.weight", "score.weight"):
        with pytest.raises(ValueError, match="no place in a two-axis model"):
            our_name(key)
    assert our_name("model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3", "smollm3"}


def test_a_padding_token_outside_the_vocabulary_is_dropped() -> None:
    assert map_config(LlamaConfig(**{**TINY, "pad_token_id": -1})).pad_token_id is None
    assert map_config(LlamaConfig(**TINY)).pad_token_id == 0
