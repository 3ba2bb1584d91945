"""What a certificate is, and how a set of them is run and shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Certificate(NamedTuple):
    """One measured statement.

    Attributes:
        family: which part of the theory it belongs to.
        statement: what is claimed.
        error: the largest deviation measured.
        bound: what the deviation may be; 0 claims equality to the last bit.
        instances: how many random instances were measured.
    """

    family: str
    statement: str
    error: float
    bound: float
    instances: int = 1

    @property
    def holds(self) -> bool:
        """Whether the deviation is a number within the bound."""
        return math.isfinite(self.error) and self.error <= self.bound


Family = Callable[[int], Iterator[Certificate]]
"""A function from a seed to certificates."""


def deviation(ours: Tensor, theirs: Tensor, least: float = 0.0) -> float:
    """Largest difference relative to the largest entry or `least`; infinite where a number is missing."""
    if ours.shape != theirs.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    difference = (ours.detach() - theirs.detach()).abs().max().item()
    scale = max(theirs.detach().abs().max().item(), least)
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else difference


def gradients(out: Tensor, leaves: list[Tensor], probe: Tensor) -> list[Tensor]:
    """Gradients of <out, probe> in every leaf; zeros for a leaf that `out` does not depend on."""
    grads = torch.autograd.grad(out, leaves, probe, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]


def gradient_deviation(
    first: Tensor, second: Tensor, leaves: list[Tensor], probe: Tensor, *, floor: float = 0.0
) -> float:
    """Largest deviation between the gradients of two outputs in every leaf, for one random cotangent.

    Args:
        first: one output.
        second: the other one.
        leaves: what the gradients are taken in.
        probe: the cotangent.
        floor: a leaf's differences are relative to its largest gradient, but at least to this part of the largest of
            all leaves: where terms cancel on paper, only their rounding is left.
    """
    ours, theirs = gradients(first, leaves, probe), gradients(second, leaves, probe)
    least = floor * max((grad.abs().max().item() for grad in theirs if grad.numel()), default=0.0)
    return max((deviation(a, b, least) for a, b in zip(ours, theirs, strict=True)), default=0.0)


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Independent standard normal float64 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
