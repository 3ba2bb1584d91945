"""Rotary positions, the half-split (Llama) convention."""

from __future__ import annotations

import torch
from torch import Tensor

from twoaxis.kernels.precision import routing_dtype


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate the pairs (i, i + D/2) of (B, T, H, D) by position · theta^(-2i/D); angles in float32 at least.

    Args:
        x: queries or keys; D must be even.
        positions: (T,) or (B, T) integers.
        theta: the base.
    """
    half = x.shape[-1] // 2
    wide = routing_dtype(x.dtype)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = (positions.to(wide).unsqueeze(-1) * frequency).unsqueeze(-2)  # (..., T, 1, D/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
