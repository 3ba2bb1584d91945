"""A graft with the plain stream against the untouched Llama of transformers, of the same shape."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.scale import Scale
from benchmarks.tables import Table, timed
from benchmarks.timing import Run, interleave, peak_bytes

BLOCKS, LENGTH, ROUNDS, TOKENS = 8, 256, 25, 16


def llamas(scale: Scale) -> Table:
    """Training step, its memory, and decoding: the graft through the untouched Llama, by width."""
    widths = (scale.width,) if scale.quick else (256, 512)
    length, rounds = (scale.length, scale.model_rounds) if scale.quick else (LENGTH, ROUNDS)
    rows: dict[str, dict[str, float]] = {}
    for width in widths:
        row = rows[f"width {width}"] = {}
        models = _models(width, scale)
        tokens = torch.randint(0, scale.vocabulary, (1, length))
        steps: dict[str, Run] = {name: partial(_train, model, tokens) for name, model in models.items()}
        row |= timed(interleave(steps, rounds)["graft"], "training step")
        memory = {name: peak_bytes(step) for name, step in steps.items()}
        row["memory of a step"] = memory["graft"] / memory["Llama"]
        decoding: dict[str, Run] = {
            name: partial(_decode, model, _filled(model, tokens[:, : length // 2]), tokens)
            for name, model in models.items()
        }
        row |= timed(interleave(decoding, rounds)["graft"], f"decode {TOKENS} tokens")
    note = f"The plain stream; {BLOCKS} blocks, T = {length}, batch 1, median of {rounds} rounds. Below 1 it is faster."
    return Table("A graft against the untouched Llama", note, rows)


def _models(width: int, scale: Scale) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from twoaxis.model.graft import graft

    heads = scale.heads if scale.quick else width // 64
    shape: dict[str, Any] = {"num_hidden_layers": BLOCKS, "num_attention_heads": heads, "num_key_value_heads": heads}
    shape |= {"vocab_size": scale.vocabulary, "hidden_size": width, "intermediate_size": 8 * width // 3}
    plain, taken = (LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=True)).eval() for _ in range(2))
    return {"Llama": plain, "graft": graft(taken)}


def _train(model: Any, tokens: torch.Tensor) -> None:
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()


@torch.no_grad()
def _filled(model: Any, tokens: torch.Tensor) -> Any:
    return model(tokens, use_cache=True).past_key_values


@torch.no_grad()
def _decode(model: Any, cache: Any, tokens: torch.Tensor) -> None:
    for i in range(TOKENS):
        model(tokens[:, i : i + 1], past_key_values=cache, use_cache=True)
    cache.crop(-TOKENS)
