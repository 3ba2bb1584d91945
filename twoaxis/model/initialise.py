"""Initial values: one function for our decoder and for models of transformers that are trained from scratch."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection
from typing import Any, Literal, cast

import torch
from torch import nn

from twoaxis.depth.stream import Stream
from twoaxis.model.sublayers import RMSNorm
from twoaxis.sequence.mixer import LocalOperator

OUTPUTS = ("o_proj", "down_proj")
"""Names of the linear layers whose product joins the stream, in the decoder and in most families."""
CONV1D = "Conv1D"
"""Class of GPT-2's linear layers, whose weight is (in, out)."""


@torch.no_grad()
def initialise(
    model: nn.Module,
    seed: int,
    init: Literal["paper", "paired"] = "paper",
    *,
    std: float | None = None,
    outputs: Collection[str] = OUTPUTS,
    special: Callable[[str, nn.Module], object] | None = None,
) -> None:
    """Set the parameters of a model with a stream.

    | tensor                                  | start                                                            |
    |-----------------------------------------|------------------------------------------------------------------|
    | embedding, head, linear layers          | N(0, std)                                                        |
    | linear layers that end a sub-layer      | N(0, std / sqrt(2 blocks)) · stream.output_scale, which          |
    |                                         | init="paired" leaves out                                         |
    | biases of linear layers                 | 0                                                                |
    | our norms                               | 1                                                                |
    | local mixers, the stream                | their own `reset_parameters`                                     |
    | anything else, and linear layers that   | as the family says, drawn for each module by its name; experts'  |
    | a family starts otherwise               | output projections scaled as above                               |

    Every tensor draws from a generator seeded by `seed` and the tensor's name, so models of one seed share the initial
    values of everything they have in common, whatever stream or mixer they have.

    Args:
        model: the model.
        seed: of the values.
        init: whether the stream's paper has a say in the output projections.
        std: standard deviation; None is the `initializer_range` of the model's configuration.
        outputs: names, whole or last, of the linear layers that end a sub-layer.
        special: starts a family's own module of a name anew; None where there are none.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        return  # there are no numbers, and drawing none takes most of the time of building a deep model there
    spread: float = getattr(cast(Any, model).config, "initializer_range", 0.02) if std is None else std
    stream = next(module for module in model.modules() if isinstance(module, Stream))
    scale = stream.output_scale if init == "paper" else 1.0
    small = spread / math.sqrt(2 * stream.layout.blocks) * scale
    done = {id(parameter) for parameter in stream.parameters()}
    for path, module in model.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if id(p) not in done}
        if module is stream:
            stream.reset_parameters(named_generator(seed, "stream", next(model.parameters())))
        elif isinstance(module, LocalOperator):
            generator = named_generator(seed, label(path), next(module.parameters()))
            module.reset_parameters(generator=generator, std=spread)
            done |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, nn.Linear | nn.Embedding) or type(module).__name__ == CONV1D:
            ends = path in outputs or path.rpartition(".")[2] in outputs
            for name, parameter in own.items():
                if special is not None and bool(parameter.any()) == (name != "weight"):
                    continue  # a weight of zeros or a bias of something else: the family has set it on purpose
                if name == "weight":
                    generator = named_generator(seed, label(f"{path}.{name}"), parameter)
                    parameter.normal_(0.0, small if ends else spread, generator=generator)
                else:
                    parameter.zero_()
        elif own and special is not None:
            special(label(path), module)
            for name, parameter in own.items():
                if parameter.dim() == 3 and name in OUTPUTS:
                    parameter.mul_(small / spread)
        done |= {id(parameter) for parameter in own.values()}


def family_start(model: nn.Module, seed: int) -> Callable[[str, nn.Module], None]:
    """For `initialise`: starts a module as the family that it belongs to does, from a generator of its own."""
    paths = {id(module): name for name, module in model.named_modules()}
    owners = [(name, module) for name, module in model.named_modules() if name and hasattr(module, "_init_weights")]

    def start(name: str, module: nn.Module) -> None:
        own: Any = [owner for path, owner in owners if f"{paths[id(module)]}.".startswith(f"{path}.")][-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(named_seed(seed, name))
            own._init_weights(module)

    return start


def label(name: str) -> str:
    """The name of a tensor or module without what it is nested in: the same in the decoder and in every family."""
    found = re.search(r"(?:^|\.)((?:layers|embed_tokens|lm_head|norm|stream)\..*)$", name)
    return (found[1] if found else name).replace("twoaxis_", "")


def named_generator(seed: int, name: str, like: torch.Tensor) -> torch.Generator | None:
    """A generator for one tensor; None on the meta device, which holds no numbers."""
    if like.device.type == "meta":
        return None
    return torch.Generator(device=like.device).manual_seed(named_seed(seed, name))


def named_seed(seed: int, name: str) -> int:
    """A seed for one tensor or module."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1
