"""ELC-BERT (Every Layer Counts): every block reads a learned convex combination of all earlier block outputs.

Georges Gabriel Charpentier, Samuel: Not all layers are equally as important: Every Layer Counts BERT, arXiv 2311.02265
(BabyLM at CoNLL 2023). Code: ltgoslo/elc-bert, all four variants agreed with; the equations are the code's.

    H_0 = embedding        x_n = Σ_{s≤n} softmax(θ_n)_s H_s         slot s+1 is the output of block s
    A_n = Att_n(x_n)

    base                     H_{n+1} = A_n + MLP_n(A_n)
    zero, weighted_output    H_{n+1} = A_n + MLP_n(x_n + A_n)
    normalized               H_{n+1} = LN( A_n + MLP_n(x_n + A_n) )   a LayerNorm without scale and bias

    out = H_L, but for weighted_output Σ_{s≤L} softmax(φ)_s H_s

    H_0 ─┬─ θ_0 ─► x_0 ─┬─► Att ── A_0 ─┬──────────────(+)── H_1 ─┬─ θ_1 ─► x_1 ─► ...
         │              └╌╌ not base ╌╌╌┴(+)──► MLP ────┘         │    ▲
         └────────────────────────────────────────────────────────┴────┘

No variant has an identity skip from x_n to H_{n+1}: the mixture replaces the residual stream, old information arrives
through the history alone. In base the MLP does not see x_n at all. So the variants differ in the form of the block, not
just in their start, and none of them starts as a plain Transformer: base begins with logit one (not weight one) on the
newest slot, the others with the average. No logits bring the skip back: the neutral class is none, use `Blend`.

In the original, slot 0 is a LayerNormed embedding and each attention ends in a LayerNorm of its own, so that all slots
have about unit RMS, and both MLP matrices of layer n start smaller by sqrt(1/(2(n+1))). All of this belongs to the
model and not to the stream. It keeps the logits, whose gradients sum to zero over a block's slots, out of weight decay;
its LAMB then takes plain Adam steps at the full rate. Its activation checkpointing fails in backward, because the
layers share one growing list.

Readings where the original is silent, because its layers are all one attention and one MLP:
- A block of any sub-layers stores the sum of their increments; each one after the first reads that sum so far, in the
  variants other than base with x_n added.
- A `parallel` site is both sub-layers on one read: H_{n+1} = Att_n(x_n) + MLP_n(x_n), so that base and zero agree.
- Mixers ahead of a block's first other sub-layer refine its input: x_n becomes x_n + Mixer_n(x_n), and the mixer is in
  the history only through what attention and MLP make of it. In a block of mixers alone they are its sub-layers.
- Placement: the mixture is read by the first site that uses the method, up to the first sub-layer after those mixers;
  that sub-layer drops the skip if it uses the method; a later one that does not use it never sees x_n. What a mixer
  before the mixture gave is added to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import history_card
from twoaxis.base.options import Options, Positive
from twoaxis.depth.slot_mix import SlotMix
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.precision import widen


@dataclass(frozen=True, kw_only=True)
class ElcBertConfig(Options):
    """Options of ELC-BERT; the default is the variant the paper reports against its baseline."""

    variant: Literal["base", "zero", "normalized", "weighted_output"] = "zero"
    """Form of the block, start of the logits and read of the head; see the module's docstring."""
    eps: Positive = 1e-7
    """Of the LayerNorm of `normalized`."""


class ElcBert(SlotMix):
    """Convex combinations of block outputs in place of the residual."""

    name = "elc_bert"
    Config = ElcBertConfig
    config: ElcBertConfig
    variants = ({}, {"variant": "base"}, {"variant": "normalized"}, {"variant": "weighted_output"})
    aliases = ("elc",)
    card = history_card(
        title="ELC-BERT",
        purpose="each block reads a convex combination of all earlier ones in place of the residual",
        source="a block's output, without its input; slot 0 is the embedding",
        value="the slot itself",
        normaliser="softmax of learned scalars",
        adaptivity="static",
        window="all earlier blocks and the embedding",
        granularity="per block",
        injection="replaces the input of each block; there is no identity skip",
        sharing="nothing over depth; one scalar per block and slot for all tokens and channels",
        depth_state="every block's output",
        paper="Georges Gabriel Charpentier, Samuel: Every Layer Counts BERT, arXiv 2311.02265",
    )

    def __init__(self, config: ElcBertConfig, layout: Layout) -> None:
        super().__init__(
            config,
            layout,
            skip=False,
            rejoin=config.variant != "base",
            read_out=config.variant == "weighted_output",
            start=1.0 if config.variant == "base" else 0.0,
        )

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block over the list of slots H_0, H_1, ...: what a block stores is the sum of its increments."""
        variant, slots = self.config.variant, [x]
        for block in range(self.layout.blocks):
            sites = self.sites_of(block)
            ahead = next((i for i, site in enumerate(sites) if site.kind != "mixer"), 0)
            given = torch.tensordot(self.logits[str(block)].softmax(0), torch.stack(slots), 1)
            for site in sites[:ahead]:
                given = given + apply(site, Seen(given)).y
            total = torch.zeros_like(given)
            for i, site in enumerate(sites[ahead:]):
                hidden = variant == "base" and i > 0
                total = total + apply(site, Seen(total if hidden else given + total)).y
            if variant == "normalized":
                total = F.layer_norm(total, (self.layout.width,), eps=self.config.eps)
            slots.append(total)
        if variant != "weighted_output":
            return slots[-1]
        return torch.tensordot(self.logits[str(self.layout.blocks)].softmax(0), torch.stack(slots), 1)

    def finish(self, x: Tensor) -> Tensor:
        """In `normalized` a block ends in a LayerNorm without scale and bias."""
        if self.config.variant != "normalized":
            return x
        return F.layer_norm(widen(x), (self.layout.width,), eps=self.config.eps).to(x.dtype)

    def flops(self) -> int:
        """The mixtures, and for `normalized` mean, centring, mean square and scaling of each block's output."""
        norms = len(self.drops) if self.config.variant == "normalized" else 0
        return super().flops() + norms * 5 * self.layout.width
