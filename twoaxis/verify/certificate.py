"""What a certificate is, and how a set of them is run and shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from twoaxis.show.numbers import error


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

    def line(self) -> str:
        """The certificate in one line, aligned with others."""
        mark = "holds" if self.holds else "FAILS"
        numbers = f"{error(self.error):>8} <= {error(self.bound):<8} {self.instances:4d}x"
        return f"{mark}  {numbers}  {self.family:9s} {self.statement}"


Family = Callable[[int], Iterator[Certificate]]
"""A function from a seed to certificates."""


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest entry; infinite where a number is missing."""
    if ours.shape != theirs.shape:
        return math.inf
    if ours.numel() == 0:
        return 0.0
    difference = (ours.detach() - theirs.detach()).abs().max().item()
    scale = theirs.detach().abs().max().item()
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else difference


def gradient_deviation(first: Tensor, second: Tensor, leaves: list[Tensor], probe: Tensor) -> float:
    """Largest deviation between the gradients of two outputs in every leaf, for one random cotangent."""
    ours = torch.autograd.grad(first, leaves, probe, allow_unused=True, retain_graph=True)
    theirs = torch.autograd.grad(second, leaves, probe, allow_unused=True, retain_graph=True)
    worst = 0.0
    for a, b, leaf in zip(ours, theirs, leaves, strict=True):
        a = torch.zeros_like(leaf) if a is None else a
        b = torch.zeros_like(leaf) if b is None else b
        worst = max(worst, deviation(a, b))
    return worst


def random_tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Independent standard normal float64 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
