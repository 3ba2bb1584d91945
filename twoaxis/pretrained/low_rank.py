"""Low-rank additions to a pretrained model's linear layers (LoRA): the control with as many parameters as a method.

    y = W x + B (A x)        A (r, in) at random, B (out, r) zero: the layer starts as it was

Every linear layer of the decoder's blocks gets one. They live in memory only: `merge_low_rank` adds B A to W before a
model is saved, so that the folder is one of the plain family.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.model.graft_layers import find_layers
from twoaxis.model.initialise import named_generator

NAME = "twoaxis_lora"
"""Of the module beside a layer's weight."""


class LowRank(nn.Module):
    """What is added to the output of a linear layer."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        return F.linear(F.linear(x, self.down), self.up)


def add_low_rank(model: Any, rank: int, seed: int) -> list[str]:
    """Put additions of a rank beside the linear layers of a retrofit; the names of their parameters."""
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"model.lora is the rank of additions to linear layers, at least 1, got {rank!r}")
    found = list(_linears(model))
    if not found:
        raise ValueError(f"model.lora={rank}: {type(model.backbone).__name__} has no linear layers to add to")
    names = []
    for name, module in found:
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)
        made = LowRank(inputs, outputs, rank).to(module.weight.device, module.weight.dtype)
        nn.init.normal_(made.down, std=inputs**-0.5, generator=named_generator(seed, name, made.down))
        module.add_module(NAME, made)
        made.hook = module.register_forward_hook(_add)  # type: ignore[assignment]
        names += [f"{name}.{NAME}.down", f"{name}.{NAME}.up"]
    return names


def _add(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + getattr(module, NAME)(inputs[0])


@torch.no_grad()
def merge_low_rank(model: nn.Module) -> None:
    """Add every product to its weight, and take the additions away."""
    for module in list(model.modules()):
        made: Any = module._modules.pop(NAME, None)
        if made is not None:
            made.hook.remove()
            product, weight = made.up @ made.down, module.get_parameter("weight")
            weight.data = weight + (product if isinstance(module, nn.Linear) else product.T)


def _linears(model: Any) -> Iterator[tuple[str, Any]]:
    """The family's linear layers in the blocks, GPT-2's transposed ones too; none of what a method brought along."""
    layers = find_layers(model.backbone)
    inside = {id(module) for module in layers.modules()}
    for name, module in model.named_modules():
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if linear and id(module) in inside and "twoaxis_" not in name:
            yield name, module
