"""Token shift: every attention also sees the token before, channel by channel as much as it learns to.

    input_t = x_t + μ ⊙ (x_{t-1} - x_t)          x before the first token is 0; μ has a number for each channel

    tokens   t-1     t
              └──μ──(+)──► attention's input

A local mixer of two tokens, inside the attention branch. With μ = 0, its start, the model is the one without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import twoaxis
from twoaxis.base.options import Options
from twoaxis.kernels.taps import depthwise_taps, with_history


@dataclass(frozen=True, kw_only=True)
class TokenShiftConfig(Options):
    """Options of the token shift."""

    share: float = 0.0
    """Initial share of the token before."""


@twoaxis.register("token_shift")
class TokenShift(twoaxis.LocalOperator):
    """A learned share of the token before, on the attention's input."""

    Config = TokenShiftConfig
    variants = ({"share": 0.3}, {})
    window = 2
    neutral = "bitwise"

    def __init__(self, channels: int, config: Any = None, **options: Any) -> None:
        super().__init__(channels, config, **options)
        self.parameter("share", channels, start=self.config.share, neutral=0.0)
        self.reset_parameters()

    @classmethod
    def points(cls, config: Any) -> tuple[str, ...]:
        return ("attention",)

    def step(self, x: Tensor, past: twoaxis.Ring, *, reach: Tensor | None = None) -> tuple[Tensor, twoaxis.Ring]:
        self.check(x, past, reach)
        history, ring = with_history(x, past, self.window)  # what came before, and the memory for the next tokens
        taps = torch.stack([self.share, -self.share], dim=-1)
        return x + depthwise_taps(history, taps, reach).to(x.dtype), ring

    def definition(self, x: Tensor) -> Tensor:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        return x + self.share * (before - x)

    def flops(self) -> int:
        return 5 * self.channels
