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
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.method import Card, Quantity
from twoaxis.ring import Ring

POINTS = ("site", "attention", "qkv", "mlp", "hidden")

LocalNeutral = Literal["bitwise", "none"]
"""Whether some parameters make a model with the mixer equal to the one without it.

bitwise: to the last bit; the operator's increment is zero at a site of its own, its output is its input elsewhere.
none: no parameters do.
"""


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

    def definition(self, x: Tensor) -> Tensor:
        """Reference implementation of `forward` without documents: dense, in float64, without kernels and rings."""
        raise NotImplementedError(f"{type(self).__name__} does not give its definition")

    def start(self, spare: int = 0) -> Ring:
        """The memory before the first token; `spare` positions more than needed are kept, for trimming."""
        raise NotImplementedError(f"{type(self).__name__} does not define start")

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Set every parameter to its initial value; `std` is the model's for projections."""
        raise NotImplementedError(f"{type(self).__name__} does not define reset_parameters")

    def quantities(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> dict[str, Quantity]:
        """What the operator shows of itself for the arguments of `step`, by name."""
        return {}

    @property
    def neutral(self) -> LocalNeutral:
        """The neutral class of the operator with these options."""
        return "none"

    def neutral_(self) -> None:
        """Set as few parameters as possible so that the model equals the one without the mixer.

        What is set must get a gradient at once, and the others as soon as it has moved: of two factors in series only
        one may be zero.
        """
        raise ValueError(f"{type(self).__name__} with these options has no neutral parameters")

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
    neutral_options: ClassVar[Mapping[str, Any]] = {}
    """Options that have a neutral start, to be taken on a pretrained model in place of defaults that have none."""

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
