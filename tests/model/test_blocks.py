"""`Block` is the unit that other people's tools hold: each is compiled by itself. Sharded: tests/parallel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.decoders import build, instances, sample_tokens
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder


def outcome(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """The logits and every gradient."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens)
    logits.square().mean().backward()
    return [logits.detach(), *(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(config, id=label) for label, config in instances()])
def test_each_block_compiles_without_a_graph_break(config: ModelConfig) -> None:
    """As torchtitan compiles a model: block by block, each one graph; traced here, with autograd's own backward."""
    torch.compiler.reset()
    model, tokens = build(config, 1, perturb=0.1), sample_tokens(0)
    plain = outcome(model, tokens)
    for block in model.layers:
        block.compile(backend="aot_eager", fullgraph=True)
    for ours, expected in zip(outcome(model, tokens), plain, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    torch.compiler.reset()
