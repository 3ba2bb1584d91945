"""The mixer contract: local operators along the sequence, and the points of a block where they act.

    point       where                                               what the operator returns
    site        a sub-layer of its own, before the attention        the increment
    attention   inside the attention branch, after the pre-norm     the changed input
    qkv         after the q, k, v projections, before RoPE          the changed projections, side by side
    mlp         inside the MLP branch, after the pre-norm           the changed input
    hidden      the MLP's hidden channels, before the gate          the changed channels

A mixer at `site` is a sub-layer like any other: a source for history methods, with its own pre-norm. At the other
points it lives inside a sub-layer and the stream does not see it. What it remembers between tokens is a `Ring`, so
any cut of a sequence into chunks gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.card import Card
from twoaxis.window import Ring

POINTS = ("site", "attention", "qkv", "mlp", "hidden")


class LocalCost(NamedTuple):
    """What one local operator adds.

    Attributes:
        parameters: numbers learned.
        flops: floating-point operations per token and forward pass (a multiply-add is 2).
        kept: numbers per sequence kept between tokens when decoding.
    """

    parameters: int
    flops: int
    kept: int


class Local(nn.Module):
    """A local operator at one point of one block."""

    def forward(self, x: Tensor, *, reach: Tensor | None = None) -> Tensor:
        """Mix (B, T, C) along time, from the beginning of the sequence.

        Args:
            x: the input.
            reach: (B, T) how many earlier positions belong to the token's document; see `twoaxis.document_reach`.
        """
        return self.step(x, self.start(), reach=reach)[0]

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        """Mix the next tokens of a sequence of which `past` remembers what is needed."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def start(self, spare: int = 0) -> Ring:
        """The memory before the first token; `spare` positions more than needed are kept, for trimming."""
        raise NotImplementedError(f"{type(self).__name__} does not define start")

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Set every parameter to its initial value; `std` is the model's for projections."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset_parameters")

    def dead(self) -> dict[str, str]:
        """Parameters that can never get a gradient, and why."""
        return {}

    def cost(self) -> LocalCost:
        """What it adds; see `LocalCost`."""
        raise NotImplementedError(f"{type(self).__name__} does not define cost")


class Mixer:
    """A local mixer with its options: says at which points of a block it acts and builds the operators."""

    name: ClassVar[str]
    """What the registry calls it."""
    Config: ClassVar[type]
    """Its options: a frozen keyword-only dataclass."""
    card: ClassVar[Card]
    """Its row of the map of methods."""
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)
    """Options that between them use every part of the mixer: what certificates and conformance tests run."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @property
    def points(self) -> tuple[str, ...]:
        """Where in a block it acts."""
        raise NotImplementedError(f"{type(self).__name__} does not define points")

    def build(self, point: str, width: int, channels: int | None = None) -> Local:
        """The operator at `point`.

        Args:
            point: one of `points`.
            width: of the residual stream.
            channels: of the tensor at that point; None is the width.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define build")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.config})"
