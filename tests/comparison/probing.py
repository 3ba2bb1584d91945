"""Texts and tiny models with something to find, or nothing, for the tests of probes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WORDS = ("axis", "block", "causal", "depth", "embed", "fold", "gate", "head", "input", "joint", "kernel", "layer")


def write_text(folder: Path, *, documents: int = 40, words: int = 240, random_letters: bool = False) -> Path:
    """Documents in which a word is followed by one of two, or letters that follow nothing."""
    folder.mkdir(parents=True)
    for number in range(documents):
        draw = random.Random(number)
        if random_letters:
            text = "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6 * words))
        else:
            place, parts = draw.randrange(len(WORDS)), []
            for _ in range(words):
                parts.append(WORDS[place])
                place = (place + draw.choice((1, 5))) % len(WORDS)
            text = " ".join(parts)
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def byte_model(text: Path, steps: int, seed: int = 0) -> LlamaForCausalLM:
    """A Llama of three blocks over bytes, trained for some steps on the files of a folder."""
    torch.manual_seed(seed)
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    shape |= {"num_attention_heads": 2, "attention_bias": True}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=128, initializer_range=0.1, **shape)
    model = LlamaForCausalLM(config)
    tokens = torch.tensor(list(b"\n".join(file.read_bytes() for file in sorted(text.iterdir()))))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
        rows = torch.stack([tokens[i : i + 64] for i in torch.randint(len(tokens) - 64, (8,)).tolist()])
        loss = cast(Any, model)(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def plant(model: LlamaForCausalLM) -> None:
    """Bury what block 0 found: the attention of block 1 adds a large constant, which only older states are free of.

    It does not depend on what the attention reads, so that no scale of a norm can keep it away.
    """
    with torch.no_grad():
        bias = cast(Any, model).model.layers[1].self_attn.o_proj.bias
        bias += 40 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(5))
