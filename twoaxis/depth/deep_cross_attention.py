"""DeepCrossAttention: queries, keys and values each read their own weighted sum of all earlier block contributions.

Heddes, Javanmard, Axiotis, Fu, Bateni, Mirrokni: DeepCrossAttention, arXiv 2502.06785 (ICML 2025). There is no official
code; agreed with lucidrains/deep-cross-attention 0.1.0 where that follows the paper.

    s_0 = embedding,  s_j = contribution of block j-1: its increments, WITHOUT its input
    GRN v1   y = Σ_j b_j s_j                                  a scalar per slot
    GRN v2   y = Σ_j B_j ⊙ s_j                                a vector per slot
    GRN v3   y = Σ_j (B_j + relu(w · s_j)) ⊙ s_j              plus a scalar per token; one w for all slots of a GRN
    block    q, k, v = GRN_q, GRN_k, GRN_v of the slots
             a = Attention(norm q, norm k, norm v);   h = q + a;   f = a + FFN(norm h);   the next slot is f

    s_0 ─┬─ ... ─┬──► GRN_v ──► v ─► norm ─┐
    s_1 ─┼─ ... ─┼──► GRN_k ──► k ─► norm ─┤
     ... │       │                        attn ─ a ─┬─────────────────(+)──► s_{i+1} = f
    s_i ─┴───────┴──► GRN_q ──► q ─► norm ─┘        │                  │
                                └──────────────────(+)── h ─ norm ─ FFN┘

There is no residual stream besides the slots: the residual inside a block is the q read, and what the head gets is
one more GRN over all slots. With `window` k (k-DCA) the slots are the embedding, the sum of what has left the window,
and the last k contributions: at most k + 2 vectors.

At B = 1, w = 0 (the initial values) every read is the sum of the slots: the plain residual up to the order of
summation, with and without a window.

The published w cannot learn. At w = 0 every w · s_j is exactly 0, and torch.relu has slope 0 there, so w has a
gradient of exactly zero for every input, for ever: v3 taken literally is v2. `relu="trainable"` (the default) clamps
instead, the same function with slope 1 at 0: the start is as neutral and w moves from the first step.
`relu="literal"` is the published form, and `dead` names its w.

With scalar weights (v1) the read of block 0 is a multiple of the embedding, and a pre-norm divides the multiple out
again: there k's and v's weight, and in a parallel block q's too, act through the norm's epsilon alone.

Readings where the paper is silent: a mixer's output is part of its block's contribution and joins every way that waits
for the attention; a block without attention has one GRN; `placement` decides about the residual way at the first site
of a block and about q, k, v at its attention, and where only the latter is on the residual stays plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoaxis.base.method import Suggestion, history_card
from twoaxis.base.options import Count, Options
from twoaxis.depth.history import HistoryStream, View, Weights, defined_block
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout
from twoaxis.kernels.history import rms_logits


@dataclass(frozen=True, kw_only=True)
class DeepCrossAttentionConfig(Options):
    """Options of DeepCrossAttention; the defaults are the paper's DCA over all blocks."""

    version: Literal[1, 2, 3] = 3
    """Of the GRN: scalar weights, vector weights, vector weights plus a scalar per token."""
    ways: Literal["qkv", "single"] = "qkv"
    """A GRN for each of q, k and v, or one for all three (the paper's ablations)."""
    window: Count | None = None
    """k of k-DCA: contributions read one by one, the older ones as their sum; None reads all of them one by one."""
    relu: Literal["trainable", "literal"] = "trainable"
    """Slope of v3's ReLU at 0: one, so that w learns from its start at zero, or zero as published: it never does."""


class DeepCrossAttention(HistoryStream):
    """Generalised residual networks over block contributions, one per way."""

    source = "increment"

    name = "deep_cross_attention"
    Config = DeepCrossAttentionConfig
    config: DeepCrossAttentionConfig
    variants = (
        {},
        {"version": 1, "ways": "single"},
        {"version": 2, "ways": "single", "window": 1},
        {"version": 2, "window": 3},
        {"version": 3, "ways": "single", "relu": "literal"},
        {"version": 3, "window": 2},
    )
    aliases = ("dca",)
    card = history_card(
        title="DeepCrossAttention (DCA)",
        purpose="queries, keys and values read their own weighted sums of earlier contributions",
        source="block contributions (increments without their input) and the embedding",
        value="the raw source",
        normaliser="none; a ReLU on the per-token part",
        adaptivity="static per channel, plus a scalar per token (v3)",
        window="all blocks, or the embedding, a running sum and the last k",
        granularity="per block",
        ways="q, k, v; the residual is q",
        injection="replaces the residual at the start of a block and before the head",
        sharing="w is shared by the slots of one read; nothing over depth",
        depth_state="one vector per block, or k + 2",
        paper="Heddes et al.: DeepCrossAttention, arXiv 2502.06785",
    )
    suggestions = (
        Suggestion(
            why="queries, keys and values read their own sums of earlier contributions; the last two one by one",
            options=lambda shape: {"window": 2},
        ),
    )

    def __init__(self, config: DeepCrossAttentionConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.follow(Plan.blocks(layout, self._slots))
        self.grns = {layout.sites[i].block: read for i, read in self.plan.reads.items()}
        """For each block that reads the slots: what it reads."""
        wide = (layout.width,) if config.version > 1 else ()
        for b, read in self.grns.items():
            self.parameter(f"static.{b}", len(read.ways), read.total, *wide, start=1.0, neutral=1.0)
        for b, read in self.grns.items():
            self.parameter(f"token.{b}", len(read.ways), layout.width, neutral=0.0, needed=config.version == 3)
        # the sum of block contributions adds in another order than the plain residual does
        self.neutral = "rounding" if self.grns else "bitwise"

    def _slots(self, first: Site) -> Read | None:
        """The embedding, the sum of what left the window, and the last k contributions."""
        b, k, attention = first.block, self.config.window, self.attention.get(first.block)
        residual = "x" if self.uses(first) else "q"  # the residual is the q way, or stays plain
        separate = self.config.ways == "qkv" and attention is not None and self.uses(attention)
        ways = (residual, "k", "v") if separate else ("x",)
        oldest = 1 if k is None else max(1, b - k + 1)
        read = Read(range(oldest, b + 1), ways, first=True, rest=k is not None and b > k)
        return read if separate or self.uses(first) else None

    def route(self, view: View, site: Site) -> Weights:
        """Scalars (v1) or vectors (v2) per slot, and relu(w . s_j) per token (v3)."""
        static = self.static[str(site.block)]
        if self.config.version == 1:
            return Weights(static=static)
        if self.config.version == 2:
            return Weights(channel=static)
        w = self.token[str(site.block)].unsqueeze(1)
        dots = torch.stack([rms_logits(s, w, eps=None)[..., 0, :] for s in view.sources], dim=-1)  # (..., W, S)
        return Weights(channel=static, token=torch.relu(dots) if self.config.relu == "literal" else dots.clamp(min=0.0))

    def dead(self) -> dict[str, str]:
        """With the literal ReLU, every w that stands at zero."""
        why = "w is zero, where the literal ReLU has slope zero for every input"
        found = {}
        for b in self.grns if self.config.version == 3 and self.config.relu == "literal" else ():
            rows = self.token[str(b)]
            zero = [row for row, w in enumerate(rows) if w.is_meta or not bool(w.any())]
            names = [f"token.{b}"] if len(zero) == len(rows) else [f"token.{b}[{row}]" for row in zero]
            found |= dict.fromkeys(names, why)
        return found

    def flops(self) -> int:
        """Per way and slot a multiply-add and, in v3, a dot product and the sum of the two weights."""
        per_slot = 5 if self.config.version == 3 else 2
        read = sum(len(read.ways) * read.total for read in self.grns.values())
        return self.layout.width * (per_slot * read + self.additions())

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block over the list of slots s_0, s_1, ...; the residual of a block is its first GRN, that of q."""
        slots, window = [x], self.config.window or self.layout.blocks
        for block in range(self.layout.blocks):
            reads = self._defined_grns(slots, window, block)
            slots.append(defined_block(self.sites_of(block), [reads[0], *reads] if len(reads) > 1 else reads, apply))
        return self._defined_grns(slots, window, self.layout.blocks)[0]

    def _defined_grns(self, slots: list[Tensor], window: int, block: int) -> list[Tensor]:
        """The GRNs of a block, for `definition`."""
        embedding, *contributions = slots
        lost, kept = contributions[:-window], contributions[-window:]
        s = torch.stack([embedding, *([torch.stack(lost).sum(0)] if lost else []), *kept])  # (S, B, T, D)
        reads = []
        for way, weight in enumerate(self.static[str(block)]):
            b = weight.reshape(len(s), 1, 1, -1)  # a number or a vector per slot
            if self.config.version == 3:
                b = b + torch.relu(s @ self.token[str(block)][way]).unsqueeze(-1)
            reads.append((b * s).sum(0))
        return reads
