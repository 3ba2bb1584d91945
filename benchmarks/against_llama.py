"""The transformers class with the plain stream against transformers' own Llama of the same shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def llamas(blocks: int, width: int, length: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Forward, training step and decoding of 16 tokens: transformers' Llama first, ours second."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from twoaxis.model.hf_config import TwoAxisConfig
    from twoaxis.model.hf_model import TwoAxisForCausalLM

    heads = max(1, width // 64)
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": width,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 8 * width // 3 // 8 * 8,
        "tie_word_embeddings": True,
    }
    models = {
        "transformers Llama": LlamaForCausalLM(LlamaConfig(**shape)).eval(),
        "TwoAxisForCausalLM": TwoAxisForCausalLM(TwoAxisConfig(**shape)).eval(),
    }
    tokens = torch.randint(0, 1024, (1, length))
    caches = {}
    for name, model in models.items():
        with torch.no_grad():
            caches[name] = model(tokens[:, : length // 2], use_cache=True).past_key_values

    def forward(model: Any) -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    def train(model: Any) -> None:
        model.zero_grad()
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    def decode(model: Any, cache: Any) -> None:
        with torch.no_grad():
            for i in range(16):
                model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache.crop(-16)

    return {
        "forward": {name: (lambda m=model: forward(m)) for name, model in models.items()},
        "training step": {name: (lambda m=model: train(m)) for name, model in models.items()},
        "decode 16 tokens": {name: (lambda n=name, m=model: decode(m, caches[n])) for name, model in models.items()},
    }
