"""What the tests of local mixers share: random parameters and a small decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from twoaxis import Decoder, ModelConfig


def randomise(module: nn.Module, spread: float = 0.5, seed: int = 1) -> None:
    """Every parameter N(0, spread), in float64, so that nothing is neutral by accident."""
    module.double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, spread, generator=generator)


def small_decoder(**options: Any) -> Decoder:
    """Two blocks of width 8 in float64 with random parameters, grouped-query attention included."""
    shape: dict[str, Any] = {
        "vocab_size": 17,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 12,
    }
    model = Decoder(ModelConfig(**(shape | options)))
    randomise(model)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 17, (batch, length), generator=torch.Generator().manual_seed(seed))
