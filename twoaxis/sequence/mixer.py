"""The mixer contract: local operators along the sequence, and the points of a block where they act.

    point       where                                               what the operator returns
    site        a sub-layer of its own, before the attention        the increment
    attention   inside the attention branch, after the pre-norm     the changed input
    qkv         after the q, k, v projections, before RoPE          the changed projections, side by side
    mlp         inside the MLP branch, after the pre-norm           the changed input
    hidden      the MLP's hidden channels, before the gate          the changed channels

A method is one file with a subclass of `LocalOperator`: its options, its parameters, `window`, `points` and `step`. A
`Mixer` is that class with options: it says where in a block operators stand and builds them.

An operator at `site` is a sub-layer like any other: a source for history methods, with its own pre-norm. At the other
points it lives inside a sub-layer and the stream does not see it. What it remembers between tokens is a `Ring`, so
any cut of a sequence into chunks gives the same numbers. `definition` is the same operator a second time, as its paper
has it; `twoaxis check` and `twoaxis verify` compare the two, values and every gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.base.method import Declared, Quantity
from twoaxis.base.options import from_fields
from twoaxis.ring import Ring

POINTS = ("site", "attention", "qkv", "mlp", "hidden")


class LocalCost(NamedTuple):
    """What one local operator adds."""

    parameters: int  # numbers learned
    flops: int  # floating-point operations per token and forward pass; a multiply-add is 2
    kept: int  # numbers per sequence kept between tokens when decoding


class LocalOperator(Declared):
    """A local operator at one point of one block: (B, T, C) to (B, T, C).

    Args:
        channels: C.
        config: the options; or give them as keywords, as in `ShortConv(768, kernel=3, activation="none")`.
        **options: in place of a config.
    """

    window: int
    """How many tokens it sees, the current one included; `__init__` sets it."""

    def __init__(self, channels: int, config: Any = None, **options: Any) -> None:
        super().__init__()
        if config is not None and options:
            raise ValueError(f"give a config or options, not both: got {', '.join(options)}")
        if not isinstance(channels, int) or isinstance(channels, bool) or channels < 1:
            raise ValueError(f"channels must be a positive integer, got {channels!r}")
        self.config: Any = from_fields(self.Config, options, self.name) if config is None else config
        self.channels = channels

    # What a method fills in.

    @classmethod
    def points(cls, config: Any) -> tuple[str, ...]:
        """Where in a block operators with these options act, in the order of a block."""
        raise NotImplementedError(f"{cls.__name__} does not define points")

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        """Mix the next tokens of a sequence of which `past` remembers what is needed; arguments as `forward`."""
        raise NotImplementedError(f"{type(self).__name__} does not define step")

    def definition(self, x: Tensor) -> Tensor:
        """Reference implementation of `forward` without documents: dense, in float64, without kernels and rings."""
        raise NotImplementedError(f"{type(self).__name__} does not give its definition")

    def flops(self) -> int:
        """Floating-point operations per token and forward pass; a multiply-add is 2."""
        raise NotImplementedError(f"{type(self).__name__} does not define flops")

    def quantities(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> dict[str, Quantity]:
        """What the operator shows of itself for the arguments of `step`, by name."""
        return {}

    # What callers use.

    def forward(self, x: Tensor, *, reach: Tensor | None = None) -> Tensor:
        """Mix (B, T, C) along time, from the beginning of the sequence.

        Args:
            x: the input.
            reach: (B, T) how many earlier positions belong to the token's document; see `twoaxis.document_reach`.
        """
        return self.step(x, self.start(), reach=reach)[0]

    def start(self, spare: int = 0) -> Ring:
        """The memory before the first token; `spare` positions more than needed are kept, for trimming."""
        return Ring(self.window, axis=1, spare=spare)

    def cost(self) -> LocalCost:
        """What the operator adds: its parameters counted, and the memory as a step of one token leaves it."""
        like = next(self.parameters(), torch.empty(0))
        with torch.no_grad():
            _, ring = self.step(like.new_zeros(1, 1, self.channels), self.start(spare=1))
        position = sum(t.numel() for t in ring.tensors())
        return LocalCost(sum(p.numel() for p in self.parameters()), self.flops(), (self.window - 1) * position)

    def check(self, x: Tensor, past: Ring, reach: Tensor | None) -> None:
        """Refuse arguments of `step` that do not fit together."""
        if x.dim() != 3 or x.shape[-1] != self.channels:
            raise ValueError(f"the input has shape {tuple(x.shape)}, {self.name} needs (batch, time, {self.channels})")
        if past.window != self.window:
            raise ValueError(
                f"the ring is of window {past.window}, {self.name} here sees {self.window}: use its start()"
            )
        if reach is not None and reach.shape[-1] != x.shape[1]:
            raise ValueError(f"reach covers {reach.shape[-1]} tokens, the input has {x.shape[1]}")

    def extra_repr(self) -> str:
        """Channels and window."""
        return f"{self.channels}, window={self.window}"


@dataclass(frozen=True)
class Mixer:
    """A local mixer: the class of its operators with options."""

    operator: type[LocalOperator]
    config: Any

    @property
    def points(self) -> tuple[str, ...]:
        """Where in a block it acts, in the order of a block."""
        return self.operator.points(self.config)

    def build(self, point: str, width: int, channels: int | None = None) -> LocalOperator:
        """The operator at `point` of one block.

        Args:
            point: one of `points`.
            width: of the residual stream.
            channels: of the tensor at that point; None is the width.
        """
        if point not in self.points:
            raise ValueError(f"{self.operator.name} acts at {', '.join(self.points)}, not at {point!r}: {self.config}")
        return self.operator(channels or width, self.config)
