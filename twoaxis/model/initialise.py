"""All initialisation of the decoder, in one function."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from twoaxis.sequence.mixer import LocalOperator

if TYPE_CHECKING:
    from twoaxis.model.decoder import Trunk


@torch.no_grad()
def initialise(trunk: Trunk, embedding: nn.Embedding, head: nn.Linear | None, seed: int) -> None:
    """Set every parameter of a decoder.

    | tensor                                   | start                                                   |
    |------------------------------------------|---------------------------------------------------------|
    | embedding (and the tied head)            | N(0, std)                                               |
    | head, if not tied                        | N(0, std)                                               |
    | attention query, key, value; MLP gate, up| N(0, std)                                               |
    | attention output; MLP down               | N(0, std / sqrt(2 blocks)) · stream.output_scale, which |
    |                                          | init="paired" leaves out                                |
    | biases                                   | 0                                                       |
    | norms                                    | 1                                                       |
    | local mixers                             | their own `reset_parameters`                            |
    | the stream                               | its own `reset_parameters`                              |

    Every tensor draws from a generator seeded by `seed` and the tensor's name, so decoders of one seed share the
    initial values of everything they have in common, whatever stream or mixer they have.
    """
    std, blocks = trunk.config.initializer_range, trunk.config.num_hidden_layers
    embedding.weight.normal_(0.0, std, generator=named_generator(seed, "embedding.weight", embedding.weight))
    if head is not None:
        head.weight.normal_(0.0, std, generator=named_generator(seed, "head.weight", head.weight))
    scale = trunk.stream.output_scale if trunk.config.init == "paper" else 1.0
    small = std / math.sqrt(2 * blocks) * scale
    inside = tuple(f"{name}." for name, module in trunk.named_modules() if isinstance(module, LocalOperator))
    for name, module in trunk.named_modules():
        if isinstance(module, LocalOperator):
            module.reset_parameters(std, named_generator(seed, name, next(module.parameters())))
        elif isinstance(module, nn.Linear) and name.startswith("blocks.") and not name.startswith(inside):
            spread = small if name.endswith((".output", ".down")) else std
            module.weight.normal_(0.0, spread, generator=named_generator(seed, f"{name}.weight", module.weight))
            if module.bias is not None:
                module.bias.zero_()
    for name, parameter in trunk.named_parameters():
        inside_block = name.startswith("blocks.") and (".norms." in name or name.endswith((".query_norm", ".key_norm")))
        if inside_block or name.startswith("final_norm."):
            parameter.fill_(1.0)
    trunk.stream.reset_parameters(named_generator(seed, "stream", embedding.weight))


def named_generator(seed: int, name: str, like: torch.Tensor) -> torch.Generator | None:
    """A generator for one tensor; None on the meta device, which holds no numbers."""
    if like.device.type == "meta":
        return None
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator(device=like.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
