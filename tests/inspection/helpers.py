"""Small saved models for the tests of what an inspection prints, draws and writes."""

from __future__ import annotations

from typing import Any

import torch

import twoaxis
from twoaxis.data.tokenizer import Bytes
from twoaxis.inspection.inspection import Inspection, inspect

PROMPT = 'Grüße </script><b id="x">&amp;\n'


def make(**changes: Any) -> twoaxis.Decoder:
    """A byte-level model whose stream and mixers are off their initial values."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "initializer_range": 0.2,
    }
    model = twoaxis.Decoder(
        twoaxis.preset("nano", **(shape | {"max_position_embeddings": 64} | changes)), seed=3
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("stream."):
                parameter += 0.2 * torch.randn(parameter.shape)
    return model


def look(prompt: str = PROMPT, **changes: Any) -> Inspection:
    """The inspection of such a model."""
    return inspect(make(**changes), Bytes(), prompt, name="a <model>")
