"""The copy limit: the time of a plain copy that moves as many bytes as an operator must at least read and write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from benchmarks.tables import timed
from benchmarks.timing import Run, interleave

Form = Callable[[], Tensor]
"""An operator on tensors it holds."""


def copy(numbers: int) -> Run:
    """Move `numbers` float32 numbers: half of them read, half of them written."""
    source = torch.ones(max(1, numbers // 2))
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def forward(form: Form) -> Run:
    """The operator without a graph."""

    def run() -> None:
        with torch.no_grad():
            form()

    return run


def both(form: Form, leaves: Sequence[Tensor], grad: Tensor) -> Run:
    """The operator and the gradients of `leaves`."""
    return lambda: torch.autograd.grad(form(), leaves, grad)


def against_copy(
    forms: Mapping[str, Form], leaves: Sequence[Tensor], grad: Tensor, moved: tuple[int, int], rounds: int
) -> dict[str, dict[str, float]]:
    """Times the copy limit, forward and with backward, of several forms of one operator, all in the same rounds.

    Args:
        forms: by the name of their row.
        leaves: what gradients are asked for.
        grad: of the result.
        moved: how many numbers must be read or written forward, and forward and backward.
        rounds: of the timing.
    """
    rows: dict[str, dict[str, float]] = {name: {} for name in forms}
    for column, numbers in zip(("forward", "forward + backward"), moved, strict=True):
        runs: dict[str, Run] = {"copy": copy(numbers)}
        for name, form in forms.items():
            runs[name] = forward(form) if column == "forward" else both(form, leaves, grad)
        timings = interleave(runs, rounds)
        for name in forms:
            rows[name] |= timed(timings[name], column)
    return rows
