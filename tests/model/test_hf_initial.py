"""Initial weights of the transformers classes: those of the decoder, tensor by tensor, paired across methods."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("transformers")

from tests.model.hf_helpers import MEMORIES, as_hf
from tests.support.decoders import SMALL
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.hf_model import TwoAxisForCausalLM, TwoAxisModel


def build(config: ModelConfig, seed: int = 0) -> TwoAxisForCausalLM:
    torch.manual_seed(seed)
    return TwoAxisForCausalLM(as_hf(config))


@pytest.mark.parametrize("config", MEMORIES)
def test_weights_are_the_decoders(config: ModelConfig) -> None:
    model = build(config)
    decoder = Decoder(config, model.model.init_seed)
    theirs = {f"model.trunk.{name}": p for name, p in decoder.named_parameters()}
    theirs["model.embed_tokens.weight"] = theirs.pop("model.trunk.embed_tokens.weight")
    theirs["lm_head.weight"] = theirs.pop("model.trunk.lm_head.weight")
    assert {*theirs} == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_the_global_seed_decides() -> None:
    first, again, other = (build(SMALL, seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_spread_is_the_configured_one() -> None:
    torch.manual_seed(0)
    config = as_hf(
        ModelConfig(vocab_size=500, hidden_size=64, num_hidden_layers=8, num_attention_heads=4), initializer_range=0.05
    )
    for model in (TwoAxisModel(config), TwoAxisForCausalLM(config).model):
        assert model.embed_tokens.weight.std().item() == pytest.approx(0.05, rel=0.05)
        down = torch.cat([p.flatten() for n, p in model.named_parameters() if n.endswith("down.weight")])
        assert down.std().item() == pytest.approx(0.05 / 4, rel=0.05)


def test_a_tied_model_starts_near_the_uniform_loss() -> None:
    model = build(SMALL)
    tokens = torch.randint(0, SMALL.vocab_size, (4, 32))
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(math.log(SMALL.vocab_size), rel=0.05)


def test_paired_starts_every_stream_with_the_same_output_projections() -> None:
    plain = Decoder(SMALL, 5).state_dict()
    wide = {"stream": "hyper_connections", "stream_options": {"streams": 4}}
    paper = Decoder(dataclasses.replace(SMALL, **wide), 5).state_dict()
    paired = Decoder(dataclasses.replace(SMALL, **wide, init="paired"), 5).state_dict()
    scaled = [name for name in plain if name.endswith((".output.weight", ".down.weight"))]
    assert len(scaled) == 2 * SMALL.num_hidden_layers
    for name in scaled:
        assert torch.equal(paired[name], plain[name])
        assert torch.allclose(paper[name], 2 * plain[name])
    with pytest.raises(ValueError, match=r"unknown init 'papre'.*it is one of paper, paired"):
        as_hf(SMALL, init="papre")
