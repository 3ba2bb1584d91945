"""The parts of a model that parallelism treats on their own: its stream and its blocks, whatever they are called."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from twoaxis.depth.stream import Stream


class Parts(NamedTuple):
    """Parts of a model.

    Attributes:
        stream: the residual stream.
        blocks: of its decoder, in order.
        home: the module that holds the list of blocks.
        name: what it calls the list.
    """

    stream: Stream
    blocks: nn.ModuleList
    home: nn.Module
    name: str


def find_parts(model: nn.Module) -> Parts:
    """The parts of a `Decoder` or of any transformers model that a stream was put on."""
    stream = next((module for module in model.modules() if isinstance(module, Stream)), None)
    if stream is None:
        raise ValueError(f"{type(model).__name__} has no residual stream of ours: put one on it first")
    inside = set(stream.modules())
    for home in model.modules():
        for name, child in home.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == stream.layout.blocks and home not in inside:
                return Parts(stream, child, home, name)
    raise ValueError(
        f"{type(model).__name__} has no list of {stream.layout.blocks} blocks, as its stream was built for"
    )
