"""Vertical Attention: every block reads a softmax-weighted sum of the normalised outputs of all earlier blocks.

Kojima, Iwasawa, Yokota, Miyao, Suzuki, Matsuo: Vertical Attention: Automatic Exploration of Inter-Layer Connections in
Transformer-based Language Models, OpenReview A6uabXKiXc (submitted to ICLR 2026, rejected). **This file is a reading**:
neither the paper's text nor any code was found, only its abstract and three reviews. Equality with the golden
files shows that the arithmetic below is what runs, and nothing about the paper.

    X_0 = embedding
    h_l = Σ_{i<l} softmax(s_l)_i X_i / ‖X_i‖     static scalars s_l, shared by all tokens; one norm per token and source
    X_l = Block_l(h_l)                           an ordinary pre-norm block, its residual starts from h_l
    out = X_L                                    not normalised, not mixed

    X_0 ─┬─ ÷‖·‖ ─ s_1 ─► h_1 ─► Block_1 ── X_1 ─┬─ ÷‖·‖ ─ s_2 ─► h_2 ─► Block_2 ── X_2 ...
         └───────────────────────────────────────┴───────────▲

Where this comes from: the abstract has parameterised modules at the beginning of each layer of LLaMA-style models; the
reviewers, who read the paper, say that the weights are scalars that do not depend on the input, that they pass through
a softmax, that the hidden vectors are normalised by their norm, and that the whole is the same as ELC-BERT's strict
normalisation, applied to a decoder. A later paper (arXiv 2603.16039) files the method under content-dependent routing.
That label is disputed by the method's reviewers, and this file follows the reviewers.

Not known, and how it is read here:
- which norm divides the activations, with what epsilon and factor: `norm` is l2, rms or none, `eps` stands beside the
  squares;
- whether the ordinary residual inside a layer is kept: `inner_residual`; without it a block stores A + MLP(h + A), the
  form of the ELC-BERT code that the reviewers compare it with;
- the initial scalars: `init` is zeros (the average) or newest (one on the newest source, as ELC-BERT's base variant);
- whether a source is a layer's output before or after its residual add (here: after), whether layers are blocks or
  sub-layers (blocks), whether the embedding is a source (yes), whether the head reads a mixture (no, the last block).

With l2 a mixture has length at most one, so that the sub-layers' increments dominate what a block stores; rms keeps
sources at unit mean square and, without the inner residual, is ELC-BERT's `normalized` up to the removal of the mean,
the normalised slot 0 and the un-normalised output. With norm="none" and inner_residual=False it is ELC-BERT's `zero`.

Mixers, parallel sites and placement are read as in `elc_bert`; with the inner residual a mixer at the head of a block
adds to h_l like any other sub-layer. No finite scalars make a softmax one-hot, and a normalised source is not the plain
residual: the neutral class is none, use `Blend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoaxis.base.method import history_card
from twoaxis.base.options import NotNegative, Options
from twoaxis.depth.slot_mix import SlotMix
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class VerticalAttentionConfig(Options):
    """Options of Vertical Attention; each one is a thing that is not known about the paper."""

    norm: Literal["l2", "rms", "none"] = "l2"
    """What a source is divided by: its length, its root mean square, nothing."""
    inner_residual: bool = True
    """Whether a block's residual starts from the mixture; else the block stores its increments alone."""
    init: Literal["zeros", "newest"] = "zeros"
    """Start of the scalars: all zero, or one on the newest source."""
    eps: NotNegative = 1e-6
    """Added to the sum (l2) or mean (rms) of squares; zero is the bare norm, and a zero vector then gives NaN."""


class VerticalAttention(SlotMix):
    """Static softmax mixtures of normalised block outputs."""

    name = "vertical_attention"
    Config = VerticalAttentionConfig
    config: VerticalAttentionConfig
    variants = (
        {},
        {"norm": "rms", "init": "newest"},
        {"norm": "none", "inner_residual": False},
        {"norm": "l2", "inner_residual": False},
    )
    aliases = ("va",)
    card = history_card(
        title="Vertical Attention (a reading)",
        purpose="a convex combination of normalised earlier blocks, as far as reviews of the paper tell",
        source="a block's output, divided by its norm; slot 0 is the embedding",
        value="the source over its norm",
        normaliser="softmax of learned scalars",
        adaptivity="static, say its reviewers; by content, says a later paper",
        window="all earlier blocks and the embedding",
        granularity="per block",
        injection="replaces the input of each block; the block's residual starts from it",
        sharing="nothing over depth; one scalar per block and source for all tokens and channels",
        depth_state="every block's output",
        paper="Kojima et al.: Vertical Attention, OpenReview A6uabXKiXc (ICLR 2026 submission, rejected)",
        year=2025,
    )

    def __init__(self, config: VerticalAttentionConfig, layout: Layout) -> None:
        start = 1.0 if config.init == "newest" else 0.0
        super().__init__(config, layout, skip=config.inner_residual, rejoin=True, read_out=False, start=start)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block over the list of sources X_0, X_1, ..., each divided by its norm."""
        config, sources = self.config, []
        for block in range(self.layout.blocks):
            squares = x.square().sum(-1, keepdim=True)
            squares = squares / self.layout.width if config.norm == "rms" else squares
            sources.append(x if config.norm == "none" else x / torch.sqrt(squares + config.eps))
            h = torch.tensordot(self.logits[str(block)].softmax(0), torch.stack(sources), 1)
            sites, x = self.sites_of(block), torch.zeros_like(h)  # x is the sum of the block's increments
            ahead = next((i for i, site in enumerate(sites) if site.kind != "mixer"), 0)
            for i, site in enumerate(sites):
                y = apply(site, Seen(h + x)).y
                if i < ahead:
                    h = h + y
                else:
                    x = x + y
            x = h + x if config.inner_residual else x
        return x

    def derive(self, x: Tensor, number: int, boundary: int, own: None) -> Tensor | None:
        """One over the norm of a source, per token."""
        if self.config.norm == "none":
            return None
        squares = widen(x).square()
        total = squares.sum(-1) if self.config.norm == "l2" else squares.mean(-1)
        return torch.rsqrt(total + self.config.eps)

    def flops(self) -> int:
        """The mixtures, and one sum of squares per source."""
        sources = 0 if self.config.norm == "none" else sum(last >= 0 for last in self.plan.last)
        return super().flops() + sources * 2 * self.layout.width
