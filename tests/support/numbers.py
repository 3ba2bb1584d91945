"""Random tensors, and how far one tensor is from another."""

from __future__ import annotations

import torch
from torch import Tensor

TIGHT = 1e-12
"""Bound between two computations of one thing in float64."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    """Normal numbers that depend on the shape and the seed alone, drawn in float64 whatever the dtype."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    return drawn.requires_grad_() if grad else drawn


def far(a: Tensor, b: Tensor, least: float = 1e-30) -> float:
    """The largest difference relative to the largest number of `b`, which counts as `least` at the least."""
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    return ((a - b).abs().max() / b.abs().max().clamp_min(least)).item()


def close(ours: Tensor, theirs: Tensor, bound: float = TIGHT, *, least: float = 1e-3) -> None:
    """Assert that two tensors are equal up to `bound`, by `far`; a missing number is far from everything."""
    error = far(ours, theirs, least)
    assert error <= bound, f"off by {error:.2e} (bound {bound:.0e})"
