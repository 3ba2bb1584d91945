"""Rotary positions, the half-split (Llama) convention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.kernels.precision import routing_dtype


class Rope(NamedTuple):
    """Cosines and sines of the angles, ([B,] T, 1, D/2): made once per pass and shared by all layers and heads."""

    cos: Tensor
    sin: Tensor


def make_rope(
    positions: Tensor, width: int, theta: float, dtype: torch.dtype, scaling: Mapping[str, Any] | None = None
) -> Rope:
    """Angles position · theta^(-2i/D) for heads of `width`, in float32 at least.

    Args:
        positions: (T,) or (B, T) integers.
        width: D, even.
        theta: the base.
        dtype: of the activations that will be rotated.
        scaling: how they are stretched, as transformers has it: `linear` divides every frequency by `factor`; `llama3`
            those of wavelengths of which fewer than `low_freq_factor` fit into the original context, none of which more
            than `high_freq_factor` do, and in between a share of each.
    """
    wide, half = routing_dtype(dtype), width // 2
    frequency = theta ** (-torch.arange(half, device=positions.device, dtype=wide) / half)
    if scaling is not None:
        kept: Tensor | float = 0.0
        if scaling["rope_type"] == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            periods = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            kept = ((periods - low) / (high - low)).clamp(0.0, 1.0)
        frequency = frequency * (kept + (1 - kept) / scaling["factor"])
    angle = (positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(-2)
    return Rope(angle.cos().to(dtype), angle.sin().to(dtype))


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Rotate the pairs (i, i + D/2) of (B, T, H, D)."""
    cos, sin = rope.cos.to(x.dtype), rope.sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
