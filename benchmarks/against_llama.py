"""A graft with the plain stream against the untouched Llama of transformers, of the same shape."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.scale import Scale
from benchmarks.tables import Table, timed
from benchmarks.timing import Run, interleave


def llamas(scale: Scale) -> Table:
    """Forward, training step and decoding of 16 tokens: the graft through the untouched Llama."""
    row: dict[str, float] = {}
    for column, contenders in _contenders(scale).items():
        row |= timed(interleave(contenders, scale.model_rounds)["graft"], column)
    note = f"The plain stream; {scale.blocks} blocks of width {scale.width}, T = {scale.length}. Below 1 it is faster."
    return Table("A graft against the untouched Llama", note, {"time": row})


def _contenders(scale: Scale) -> dict[str, dict[str, Run]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from twoaxis.model.graft import graft

    length = scale.length
    shape: dict[str, Any] = {
        "vocab_size": scale.vocabulary,
        "hidden_size": scale.width,
        "num_hidden_layers": scale.blocks,
        "num_attention_heads": scale.heads,
        "num_key_value_heads": scale.heads,
        "intermediate_size": scale.hidden,
        "tie_word_embeddings": True,
    }
    models = {
        "transformers Llama": LlamaForCausalLM(LlamaConfig(**shape)).eval(),
        "graft": graft(LlamaForCausalLM(LlamaConfig(**shape)).eval()),
    }
    tokens = torch.randint(0, scale.vocabulary, (1, length))
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
