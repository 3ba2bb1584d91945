"""DenseFormer: a learned weighted sum of all earlier block outputs after each block.

Pagliardini, Mohtashami, Fleuret, Jaggi: DenseFormer, arXiv 2402.02622 (2024). Code: epfml/DenseFormer (the package).

    X_0 = embedding        X_j = Block_j(Y_{j-1})                     slot j
    Y_j = Σ_s α_{j,s} X_s  over s ≤ j with s ≡ j (mod dilation)       if period divides j
    Y_j = X_j                                                         otherwise

    X_0 ──► Block_1 ──► X_1 ──► Block_2 ──► X_2 ──► ...
     │                   │  ▲                │  ▲
     └───────────────────┴──┘ α_1            │  │
     └───────────────────┴───────────────────┴──┘ α_2

The slots hold block outputs before the average. Weights are free real scalars: no softmax, no bias, negative allowed.
The average after block j is what the first site of block j+1 reads (for the last block: what the head reads), so the
residual inside a block continues from it. Slots of other residue classes are never touched, and a slot is dropped
after its last reader. At the initial values (one on the newest slot, zero elsewhere) it is the plain residual bit
for bit. The original puts the weights into the weight-decay group, where they decay towards zero, the diagonal
included; `parameter_groups` says so too.

What surprises: the two official implementations disagree about period and dilation; this is the package, which matches
the paper: experiments(k, p) = package(dilation=k*p, period=p). With 48 blocks, dilation 4 and period 5 the last three
blocks are not averaged. Before the first full dilation an average is a single learned gain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twoaxis.base.method import OneAt, Suggestion, history_card
from twoaxis.base.options import Count, Options
from twoaxis.depth.history import HistoryStream, View, Weights
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen


@dataclass(frozen=True, kw_only=True)
class DenseFormerConfig(Options):
    """Options of DenseFormer; the paper recommends dilation 4, period 5 for deep models."""

    dilation: Count = 1
    """Average every `dilation`-th slot, counted back from the newest."""
    period: Count = 1
    """Average after every `period`-th block."""


class DenseFormer(HistoryStream):
    """Depth-weighted averages of block outputs."""

    name = "denseformer"
    neutral = "bitwise"
    Config = DenseFormerConfig
    config: DenseFormerConfig
    variants = ({}, {"dilation": 2}, {"dilation": 2, "period": 3}, {"dilation": 5, "period": 2})
    card = history_card(
        title="DenseFormer",
        purpose="a learned weighted sum of earlier block outputs, the same for all tokens",
        source="block output before its average; slot 0 is the embedding",
        value="raw slots",
        normaliser="none: free real scalars",
        adaptivity="static scalars",
        window="all earlier blocks of one residue class (dilation), every period-th block reads",
        granularity="per block",
        injection="replaces the input of the next block",
        depth_state="block outputs with a reader ahead",
        paper="Pagliardini, Mohtashami, Fleuret, Jaggi, DenseFormer, arXiv 2402.02622",
    )
    suggestions = (
        # from 24 blocks on, the dilation and period that its paper recommends
        Suggestion(options=lambda shape: {"dilation": 4, "period": 5} if shape.blocks >= 24 else {}),
    )

    def __init__(self, config: DenseFormerConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.follow(Plan.blocks(layout, self._slots))
        for i, read in self.plan.reads.items():
            self.parameter(f"alpha.{layout.sites[i].block}", read.total, start=OneAt(), neutral=OneAt(), decay=True)

    def _slots(self, first: Site) -> Read | None:
        """Every `dilation`-th slot up to the newest, before every `period`-th block."""
        j, k = first.block, self.config.dilation
        return Read(range(j % k, j + 1, k)) if j and j % self.config.period == 0 and self.uses(first) else None

    def route(self, view: View, site: Site) -> Weights:
        """One scalar per slot."""
        return Weights(static=self.alpha[str(site.block)].unsqueeze(0))

    def flops(self) -> int:
        """One multiply-add per channel and slot read; a slot that is read alone is only scaled."""
        counts = [read.total for read in self.plan.reads.values()]
        return self.layout.width * sum(2 * n - (n == 1) for n in counts)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block; X_0, X_1, ... are the slots, Y_j is what block j + 1 starts from."""
        slots = [x]
        for j in range(1, self.layout.blocks + 1):
            for site in self.sites_of(j - 1):
                x = x + apply(site, Seen(x)).y
            slots.append(x)
            if j % self.config.period == 0:
                averaged = [
                    slot for s, slot in enumerate(slots) if s % self.config.dilation == j % self.config.dilation
                ]
                x = torch.tensordot(self.alpha[str(j)], torch.stack(averaged), 1)
        return x
