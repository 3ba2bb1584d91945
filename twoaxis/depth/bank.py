"""The state of Attention Residuals: the sources so far and what is derived from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEW_ROWS = 16
"""Up to as many sequences decoded at once, calls take more time than numbers."""


class Slot(NamedTuple):
    """A finished source.

    Attributes:
        number: its number.
        x: its value.
        shared: the value by heads, as reads take it.
        logits: (..., H) for each of the reading sites from `row` on, where queries are static; none where a read makes
            its own.
        row: of the first of them.
    """

    number: int
    x: Tensor
    shared: Tensor
    logits: tuple[Tensor, ...]
    row: int


class Ahead(NamedTuple):
    """The first phase from row `row` on: normalised reads (None once used) and log-sum-exps (..., H, n)."""

    reads: tuple[Tensor | None, ...]
    lse: Tensor
    row: int


class Bank(NamedTuple):
    """Finished sources, what left the window, the running partial, and what is derived from them.

    `total` is the plain residual, kept only if some site reads plainly. `ahead` is set in two-phase evaluation only.
    `queries` are the folded static queries of all sites, made once per pass. `single` says that reads are those of one
    token at a time, which derive nothing.
    """

    slots: tuple[Slot, ...]
    overflow: Tensor | None
    part: Tensor | None
    total: Tensor | None
    ahead: Ahead | None
    queries: Tensor | None = None
    single: bool = False


def spent(ahead: Ahead | None, row: int | None) -> Ahead | None:
    """Forget the batched read of the site with this row: it has just been used."""
    if ahead is None or row is None:
        return ahead
    return ahead._replace(reads=tuple(None if i == row - ahead.row else r for i, r in enumerate(ahead.reads)))


def decodes(x: Tensor) -> bool:
    """Whether this is one token of a few sequences, without gradients and in eager mode."""
    few = x.dim() > 1 and x.shape[-2] == 1 and x.numel() <= FEW_ROWS * x.shape[-1]
    return few and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
