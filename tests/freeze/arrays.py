"""Recorder of arrays: what every variant of every stream and mixer computes, in float64 on a tiny decoder.

    arrays/index.json           label -> file and fields, or the words with which a configuration is refused
    arrays/NNN.safetensors      tokens, ends, logits, loss, chunks, documents, weights/NAME, gradient/NAME, initial/NAME

`initial` are the weights a decoder starts with. `weights` are those moved by random numbers, so that no path is closed
by a parameter that starts at zero; everything else belongs to them. With `--weights` they come from another recording,
so that both sides compute the same thing even where initial values have changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.freeze import names

SEED, LENGTH, CUTS = 0, 12, (5, 1, 4, 2)
SHAPE = {"vocabulary": 61, "width": 16, "blocks": 3, "heads": 2, "kv_heads": 1, "hidden": 24}


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and fields of every configuration; only the frozen tree is asked for its variants."""
    for label, config in names.find("instances")():
        fields = dict(SHAPE)
        if config.mixer is None:
            fields |= {"stream": config.stream, "stream_options": dict(config.stream_options)}
            layouts = {"placed": {"placement": "1-2/attention"}, "blend": {"blend": True}}
        else:
            fields |= {"mixer": config.mixer, "mixer_options": dict(config.mixer_options)}
            layouts = {"placed": {"mixer_blocks": [1]}, "delta": {"stream": "deep_delta"}}
        yield label, fields
        for layout, more in ({"parallel": {"block": "parallel"}} | layouts).items():
            yield f"{label} {layout}", fields | more


def shaken(initial: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights moved by normal numbers, each tensor by its own."""
    made = {}
    for name, tensor in initial.items():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        made[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return made


def measure(fields: dict[str, Any], weights: dict[str, Tensor] | None, first: bool) -> dict[str, Tensor]:
    """Everything that is recorded of one configuration.

    Args:
        fields: of the decoder.
        weights: by today's names; None shakes the initial ones.
        first: whether the initial weights are recorded too.
    """
    model = names.decoder(fields, SEED).double()
    initial = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = weights or shaken(initial)
    names.load_parameters(model, weights)
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(0, SHAPE["vocabulary"], (2, LENGTH), generator=generator)
    ends = torch.rand(2, LENGTH, generator=generator) < 0.25
    logits = model(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    with torch.no_grad():
        made = {
            "tokens": tokens,
            "ends": ends,
            "logits": logits,
            "loss": loss,
            "chunks": names.in_chunks(model, tokens, CUTS)[0],
            "documents": names.with_documents(model, tokens, ends),
        }
    made |= {f"weights/{name}": tensor for name, tensor in weights.items()}
    for name, p in model.named_parameters():  # no gradient and a gradient of zeros are one thing to an optimiser
        made[f"gradient/{name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    made |= {f"initial/{name}": tensor for name, tensor in initial.items()} if first else {}
    return {name: tensor.detach().contiguous() for name, tensor in made.items()}


def record(out: Path, source: Path | None) -> None:
    """Record every configuration of this tree, or those of another recording with its weights."""
    out.mkdir(parents=True, exist_ok=True)
    there = {} if source is None else json.loads((source / "index.json").read_text())
    todo = variants() if source is None else ((label, entry["fields"]) for label, entry in there.items())
    index: dict[str, Any] = {}
    for number, (label, fields) in enumerate(todo):
        weights = None
        if source is not None and "file" in there[label]:
            kept = load_file(source / there[label]["file"])
            weights = {
                names.parameter(name.removeprefix("weights/")): tensor
                for name, tensor in kept.items()
                if name.startswith("weights/")
            }
        try:
            tensors = measure(fields, weights, first=" " not in label)
        except (ValueError, KeyError) as error:
            index[label] = {"fields": fields, "refused": f"{type(error).__name__}: {error}"}
            continue
        index[label] = {"fields": fields, "file": f"{number:03d}.safetensors"}
        save_file(tensors, out / index[label]["file"])
    (out / "index.json").write_text(json.dumps(index, indent=1, default=dataclasses.asdict))


def run(recorder: Callable[[Path, Path | None], None], about: str | None) -> None:
    """The command line of a recorder that can take what it records from another recording."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", type=Path, help="folder of another recording whose weights or variants are used")
    given = parser.parse_args()
    names.check_tree()
    torch.set_num_threads(1)
    recorder(given.out, given.weights)


if __name__ == "__main__":
    run(record, __doc__)
