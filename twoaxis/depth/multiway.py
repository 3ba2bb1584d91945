"""What the multiway methods share: which site takes q, k and v, and the ways that wait for it behind a mixer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen


class Waiting(NamedTuple):
    """Ways read at the first site of a block that wait for its attention; q is None where it is the residual way."""

    q: Tensor | None
    k: Tensor
    v: Tensor

    def plus(self, y: Tensor) -> Waiting:
        """The output of a sub-layer before the attention joins every waiting way."""
        return Waiting(None if self.q is None else self.q + y, self.k + y, self.v + y)


def attention_sites(layout: Layout) -> dict[int, Site]:
    """For each block that has one: its first site that takes queries, keys and values."""
    found: dict[int, Site] = {}
    for site in layout.sublayers:
        if site.kind in ("attention", "parallel"):
            found.setdefault(site.block, site)
    return found


def qkv_ways(site: Site) -> tuple[str, ...]:
    """What a site with separate queries, keys and values normalises; a parallel one also has its MLP's input."""
    return ("q", "k", "v", "x") if site.kind == "parallel" else ("q", "k", "v")


def defined_block(sites: Sequence[Site], ways: Sequence[Tensor], apply: Apply) -> Tensor:
    """The increments of a block's sub-layers, summed; for definitions.

    Args:
        sites: of the block.
        ways: what it starts from: the residual alone, or the residual, q, k and v.
        apply: runs the pre-norm and the sub-layer of a site.
    """
    total, met = torch.zeros_like(ways[0]), False
    for site in sites:
        takes = site.kind in ("attention", "parallel") and not met and len(ways) > 1
        met = met or takes
        # what came before in the block joins every way that has not been used yet
        read: list[Any] = [way + total for way in (ways if takes else ways[:1])]
        y = apply(site, Seen(*read)).y
        total = total + y
    return total
