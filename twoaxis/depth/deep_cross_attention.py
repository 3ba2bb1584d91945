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
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from twoaxis.base.method import Card, Published
from twoaxis.base.options import Count, Options
from twoaxis.depth.multiway import Waiting, attention_sites, defined_block, qkv_ways
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.precision import widen
from twoaxis.kernels.weighted_sum import rms_logits, weighted_sum


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


class Stack(NamedTuple):
    """The slots, and what runs inside a block.

    Attributes:
        slots: the embedding and the newest contributions, oldest first; empty once nobody will read them.
        overflow: the sum of the contributions that have left the window.
        total: the plain residual, kept only while some block will read plainly.
        x: the residual inside a block that reads a GRN; None between blocks and in blocks that read plainly.
        part: the contribution of the current block so far.
        waiting: ways for an attention that is not the first of its block.
    """

    slots: tuple[Tensor, ...]
    overflow: Tensor | None
    total: Tensor | None
    x: Tensor | None = None
    part: Tensor | None = None
    waiting: Waiting | None = None

    def sources(self) -> list[Tensor]:
        """What a GRN reads, oldest first."""
        middle = [] if self.overflow is None else [self.overflow]
        return [self.slots[0], *middle, *self.slots[1:]]


class DeepCrossAttention(Stream):
    """Generalised residual networks over block contributions, one per way."""

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
    card = Card(
        title="DeepCrossAttention (DCA)",
        axis="depth",
        source="block contributions (increments without their input) and the embedding",
        query="-",
        key="-",
        value="the raw source",
        literal_qkv=False,
        normaliser="none; a ReLU on the per-token part",
        adaptivity="static per channel, plus a scalar per token (v3)",
        window="all blocks, or the embedding, a running sum and the last k",
        granularity="per block",
        ways="q, k, v; the residual is q",
        injection="replaces the residual at the start of a block and before the head",
        sharing="w is shared by the slots of one read; nothing over depth",
        gating="-",
        depth_state="one vector per block, or k + 2",
        token_state="none",
        paper="Heddes et al.: DeepCrossAttention, arXiv 2502.06785",
        year=2025,
        quirks=(
            "As published w never gets a gradient: it starts at 0, where the ReLU has slope 0.",
            "Slots are increments, so the plain residual is their sum, not the newest of them.",
            "The gain shrinks with width: -2.82 perplexity at width 64, -0.39 at 1024 (LM1B, 12 layers).",
        ),
        published=(
            Published(
                "LM1B, 24 layers: perplexity 15.14 -> 14.41 (k=2, step rate x0.66), 14.35 (all, x0.46)",
                "arXiv 2502.06785",
            ),
            Published("LM1B, 6 layers: 18.98; v1 18.80, v2 18.43, v3 18.41, DCA 18.06", "arXiv 2502.06785"),
            Published("C4, 449M, k=8: perplexity 17.166 -> 16.764", "arXiv 2502.06785"),
        ),
    )

    def __init__(self, config: DeepCrossAttentionConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.attention = attention_sites(layout)
        firsts = [site for site in layout.sites if site.first]
        self.grns = {site.block: names for site in firsts if (names := self._names(site))}
        """For each block that reads the slots: the ways it reads."""
        self.plain_blocks = frozenset(site.block for site in firsts if not self.uses(site))
        """Blocks whose residual way is the plain one."""
        self.last_read = max(self.grns, default=-1)
        self.last_plain = max(self.plain_blocks, default=-1)
        wide = (layout.width,) if config.version > 1 else ()
        self.static = nn.ParameterDict(
            {str(b): nn.Parameter(torch.empty(len(names), self._count(b), *wide)) for b, names in self.grns.items()}
        )
        dynamic = self.grns if config.version == 3 else {}
        self.query = nn.ParameterDict(
            {str(b): nn.Parameter(torch.empty(len(names), layout.width)) for b, names in dynamic.items()}
        )

    def _names(self, first: Site) -> tuple[str, ...]:
        """The ways that the block beginning at `first` reads from the slots."""
        attention = self.attention.get(first.block)
        if self.config.ways == "qkv" and attention is not None and self.uses(attention):
            return ("q", "k", "v")
        return ("x",) if self.uses(first) else ()

    def _count(self, block: int) -> int:
        """Slots that `block` finds, the overflow included."""
        return block + 1 if self.config.window is None else min(block + 1, self.config.window + 2)

    def _overflows(self, block: int) -> bool:
        return self.config.window is not None and block > self.config.window

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
                b = b + torch.relu(s @ self.query[str(block)][way]).unsqueeze(-1)
            reads.append((b * s).sum(0))
        return reads

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """One for every static weight, zero for w: every read is the sum of the slots."""
        with torch.no_grad():
            for static in self.static.values():
                static.fill_(1.0)
            for query in self.query.values():
                query.zero_()

    def neutral_(self) -> None:
        """The initial values are neutral."""
        self.reset_parameters()

    @property
    def neutral(self) -> Neutral:
        """The sum of block contributions adds in another order than the plain residual does."""
        return "rounding" if self.grns else "bitwise"

    # Reads.

    def _token(self, sources: list[Tensor], block: int) -> Tensor | None:
        """v3's scalars relu(w · s_j): (..., W, S)."""
        if self.config.version < 3:
            return None
        w = self.query[str(block)].unsqueeze(1)
        dots = torch.stack([rms_logits(s, w, None)[..., 0, :] for s in sources], dim=-1)
        return torch.relu(dots) if self.config.relu == "literal" else dots.clamp(min=0.0)

    def _mix(self, value: Stack, block: int) -> tuple[Tensor, ...]:
        sources, static = value.sources(), self.static[str(block)]
        if self.config.version == 1:
            return weighted_sum(sources, static=static)
        return weighted_sum(sources, channel=static, token=self._token(sources, block))

    def _read(self, value: Stack, site: Site) -> Seen:
        block, attention = site.block, self.attention.get(site.block)
        if not site.first:
            x = value.total if value.x is None else value.x
            assert x is not None
            return Seen(x) if value.waiting is None or site != attention else Seen(x, *value.waiting)
        names = self.grns.get(block, ())
        mixed = dict(zip(names, self._mix(value, block), strict=True)) if names else {}
        plain = block in self.plain_blocks
        x = value.total if plain else mixed[names[0]]
        assert x is not None
        if "k" not in mixed:
            return Seen(x)
        waiting = Waiting(mixed["q"] if plain else None, mixed["k"], mixed["v"])
        return Seen(x, *waiting) if site == attention else Seen(x, aux=waiting)

    def ways(self, site: Site) -> tuple[str, ...]:
        """q, k and v at the attention of a block that reads them separately."""
        separate = site == self.attention.get(site.block) and "k" in self.grns.get(site.block, ())
        return qkv_ways(site) if separate else ("x",)

    # Writes.

    def _open(self, x: Tensor, tokens: Tokens) -> Stack:
        return Stack((x,) if self.last_read >= 0 else (), None, x if self.last_plain >= 0 else None)

    def _write(self, value: Stack, site: Site, y: Tensor, seen: Seen, c: Seen) -> Stack:
        ahead = site.block + 1
        total = None
        if value.total is not None and self.last_plain >= (ahead if site.last else site.block):
            total = value.total + y
        slots: tuple[Tensor, ...] = ()
        overflow = part = None
        if self.last_read >= ahead:
            slots, overflow = value.slots, value.overflow
            # sub-layers may answer in a narrower dtype than the stream's; contributions add up in the stream's
            part = y.to(slots[0].dtype) if value.part is None else value.part + y
        if site.last:
            return Stack(slots, overflow, total) if part is None else self._push(slots, overflow, total, part)
        waiting = seen.aux if site.first else value.waiting
        if waiting is not None:
            waiting = None if site == self.attention[site.block] else waiting.plus(y)
        x = None if site.block in self.plain_blocks else seen.x + y
        return Stack(slots, overflow, total, x, part, waiting)

    def _push(self, slots: tuple[Tensor, ...], overflow: Tensor | None, total: Tensor | None, f: Tensor) -> Stack:
        """Add a block's contribution; the oldest one leaves a full window for the running sum."""
        first, *recent = (*slots, f)
        if self.config.window is not None and len(recent) > self.config.window:
            leaving = recent.pop(0)
            overflow = leaving if overflow is None else overflow + leaving
        return Stack((first, *recent), overflow, total)

    # Stage boundaries, inspection, declarations.

    def _pack(self, value: Stack, site: Site) -> tuple[Tensor, ...]:
        return (*value.slots, *(t for t in (value.overflow, value.total) if t is not None))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Stack:
        reads, plain = self.last_read >= site.block, self.last_plain >= site.block
        overflows = reads and self._overflows(site.block)
        slots = self._count(site.block) - overflows if reads else 0
        self._packed(tensors, slots + overflows + plain, site)
        rest = iter(tensors[slots:])
        return Stack(tensors[:slots], next(rest) if overflows else None, next(rest) if plain else None)

    def _weights(self, value: Stack, site: Site) -> Tensor | None:
        """Weights of the block's ways, q before k before v; vector weights as their mean over channels."""
        if not site.first or site.block not in self.grns:
            return None
        sources, static = value.sources(), widen(self.static[str(site.block)])
        mean = static if self.config.version == 1 else static.mean(-1)
        token = self._token(sources, site.block)
        return mean.expand(*sources[0].shape[:-1], *mean.shape) if token is None else mean + token

    def sources(self, site: Site) -> tuple[str, ...]:
        """The slots that the GRNs before `site` read."""
        if not site.first or site.block not in self.grns:
            return ()
        overflows = self._overflows(site.block)
        newest = self._count(site.block) - 1 - overflows
        names = [f"block {b}" for b in range(site.block - newest, site.block)]
        return ("embedding", *(["overflow"] if overflows else []), *names)

    def dead(self) -> dict[str, str]:
        """With the literal ReLU, every w that stands at zero."""
        if self.config.relu == "trainable":
            return {}
        why = "w is zero, where the literal ReLU has slope zero for every input"
        found = {}
        for block, query in self.query.items():
            zero = [row for row, w in enumerate(query) if w.is_meta or not bool(w.any())]
            names = [f"query.{block}"] if len(zero) == len(query) else [f"query.{block}[{row}]" for row in zero]
            found |= dict.fromkeys(names, why)
        return found

    def cost(self) -> Cost:
        """Per way and slot a multiply-add and, in v3, a dot product and the sum of the two weights; the running sum."""
        width, config = self.layout.width, self.config
        counts = {block: self._count(block) for block in self.grns}
        per_slot = 5 if config.version == 3 else 2
        flops = sum(per_slot * width * len(names) * counts[block] for block, names in self.grns.items())
        if config.window is not None:
            flops += width * max(0, self.last_read - config.window - 1)
        flops += width * sum(self._waiting(site) + self._adds(site) - 1 for site in self.layout.sublayers)
        parameters = sum(p.numel() for p in self.parameters())
        live = max(self._held(site) for site in self.layout.sites)
        return Cost(parameters=parameters, flops=flops, reads=sum(counts.values()), live=live * width)

    def _waiting(self, site: Site) -> int:
        """Ways that wait past `site` for its block's attention."""
        attention = self.attention.get(site.block)
        if attention is None or site.index >= attention.index or "k" not in self.grns.get(site.block, ()):
            return 0
        return 3 if site.block in self.plain_blocks else 2

    def _adds(self, site: Site) -> int:
        """Additions of what `site` writes: to the running value, the block's contribution, the plain sum."""
        running = not site.last and site.block not in self.plain_blocks
        part = not site.first and self.last_read > site.block
        return running + part + (self.last_plain >= site.block + site.last)

    def _held(self, site: Site) -> int:
        """Vectors in the state before `site`."""
        if site.index == 0:
            return 1  # the first slot and the plain sum are both the embedding
        block, inside = site.block, not site.first
        held = self._count(block) if self.last_read >= block + inside else 0
        held += self.last_plain >= block
        if not inside:
            return held
        held += (block not in self.plain_blocks) + (self.last_read > block)
        return held + self._waiting(self.layout.sites[site.index - 1])
