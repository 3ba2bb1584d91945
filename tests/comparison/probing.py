"""Texts and tiny models with something to find, or nothing, for the tests of comparisons on a source."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twoaxis.model.graft import graft

WORDS = ("axis", "block", "causal", "depth", "embed", "fold", "gate", "head", "input", "joint", "kernel", "layer")
SHAPE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
SHAPE |= {"vocab_size": 256, "max_position_embeddings": 128, "initializer_range": 0.1}


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


def trained_source(text: Path, folder: Path, steps: int = 150, stream: str | None = None) -> Path:
    """A Llama over bytes, trained on the files of a folder; with a stream that is taken away from it afterwards."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model: Any = plain
    if stream is not None:
        model = graft(plain, stream, start="paper")
        for parameter in model.stream.requires_grad_(False).parameters():  # the other weights learn to need it
            parameter.add_(torch.randn(parameter.shape))
    tokens = torch.tensor(list(b"\n".join(file.read_bytes() for file in sorted(text.iterdir()))))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
        rows = torch.stack([tokens[i : i + 64] for i in torch.randint(len(tokens) - 64, (8,)).tolist()])
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    left = LlamaForCausalLM(LlamaConfig(**SHAPE))
    left.load_state_dict(plain.state_dict())
    left.save_pretrained(folder)
    return folder
