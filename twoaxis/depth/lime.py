"""LIMe, layer-integrated memory: attention reads keys and values of all earlier layers through a learned router.

Gerasimov, Aksenov, Balagansky, Sinii, Gavrilov: You Do Not Fully Utilize Transformer's Representation Capacity, arXiv
2502.09245 (2025). Code: the authors' repository; lucidrains/x-transformers (`integrate_layers`).

    over="heads"    k̃_{l,h} = Σ_{i ≤ l} Σ_{h'} R_l[h, (i, h')] k_{i,h'}        the same R_l for values; R free reals
    over="states"   w = normaliser( θ_l ),   or per token   normaliser( A_l norm(m_l) + b_l )
                    input_l = Σ_{i ≤ l} w_i m_i                               for each way (k and v, q as well, or x)

    x ──┬──attn──(+)──mlp──(+)──┬──attn──(+)──mlp──(+)── out                  x goes on as ever
        │ m_1                   │ m_2 ▲
        └───────────────────────┴──w──┘          m: residual states on arrival, or keys and values after projection

The paper's own form is `over="heads"`: a router per layer over the keys and values of every layer and head so far,
which start as the identity on the layer's own and U(-sqrt(3/n), sqrt(3/n)) on the others, n columns in all; it needs
to know `kv_heads`. Keys are mixed after rotary positions, which is the same: all of a token's keys turn alike, unless
some layers have no positions. `over="states"` mixes residual states before the attention projects them, which needs
no knowledge of its heads: with softmax weights per token for q, k and v at every sub-layer it is x-transformers', and
with static softmax weights near the first version of the paper, which had a mixture per head.

Everywhere the plain residual goes on by itself, the first site that takes part has nothing to mix and reads plainly,
and so does the head. Without a normaliser the start is one on the newest source, which is the plain model to a bit
(with `over="heads"` that is `neutral_`, not the published start); a softmax never gives weights of one and zero.

Readings: under a static softmax the newest logit starts at `start`, the others at zero (the paper's first version
draws them all small); weights per token start as nn.Linear's. Held to x-transformers: outputs and gradients of its
decoder. The form over heads is held to its definition alone: the authors' code was read, not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import OneAt, Suggestion, Uniform, history_card
from twoaxis.base.options import Count, NotNegative, Options, Positive
from twoaxis.depth.history import Exchanged, HistoryStream, View, Weights
from twoaxis.depth.plan import Plan, Read, attention_plan, qkv_ways
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.history import rms_logits
from twoaxis.kernels.precision import product, widen

WAYS = {"x": ("x",), "kv": ("k", "v"), "qkv": ("q", "k", "v")}


@dataclass(frozen=True, kw_only=True)
class LimeConfig(Options):
    """Options of LIMe."""

    over: Literal["states", "heads"] = "states"
    """What is mixed: residual states before the attention, or its keys and values by head, as in the paper."""
    kv_heads: Count | None = None
    """Key and value heads of the attention; for `over="heads"` alone."""
    weights: Literal["static", "token"] = "static"
    """One set of weights for all tokens, or weights per token made of the newest state."""
    normaliser: Literal["none", "softmax", "relu"] = "none"
    """What weights pass through."""
    ways: Literal["kv", "qkv", "x"] = "kv"
    """What an attention gets a mixture of states for; x is one for all three."""
    every: Literal["attention", "sublayer"] = "attention"
    """Whether attentions alone mix and are remembered, or all sub-layers."""
    start: NotNegative = 4.0
    """Initial logit of the newest state under a static softmax."""
    eps: Positive = 1e-12
    """Inside the mean square of the state that makes weights per token."""

    def validate(self) -> None:
        """Rules between fields."""
        if (self.over == "heads") != (self.kv_heads is not None):
            raise ValueError(f"over='heads' and kv_heads belong together, got over={self.over!r}, {self.kv_heads=}")
        states = (self.weights, self.normaliser, self.ways, self.every)
        if self.over == "heads" and states != ("static", "none", "kv", "attention"):
            raise ValueError(
                f"over='heads' has one form; leave weights, normaliser, ways and every alone, got {states}"
            )


class OwnHeads(NamedTuple):
    """A start: the identity on the last columns, and numbers up to `bound` on the others."""

    bound: float = 0.0

    def __call__(self, t: Tensor, generator: torch.Generator | None) -> None:
        """Fill a router."""
        t.uniform_(-self.bound, self.bound, generator=generator) if self.bound else t.zero_()
        t[:, -len(t) :] = torch.eye(len(t), dtype=t.dtype, device=t.device)


class Lime(HistoryStream):
    """Attention over learned mixtures of what earlier layers made."""

    goes_on = "own"

    name = "lime"
    Config = LimeConfig
    config: LimeConfig
    variants = (
        {},
        {"over": "heads", "kv_heads": 2},
        {"over": "heads", "kv_heads": 1},
        {"weights": "token", "normaliser": "softmax", "ways": "qkv", "every": "sublayer"},
        {"normaliser": "softmax", "ways": "x"},
        {"weights": "token", "normaliser": "relu", "ways": "x"},
        {"weights": "token", "ways": "qkv"},
    )
    card = history_card(
        title="LIMe",
        purpose="each attention reads learned mixtures of the keys and values of all layers so far",
        source="residual state before an attention, or its keys and values by head",
        value="raw sources",
        normaliser="none, softmax or ReLU",
        adaptivity="static scalars, or per token",
        window="all earlier attentions (or sub-layers), the current one included",
        granularity="per attention (or sub-layer)",
        ways="k and v; q as well, or one",
        injection="replaces the attention's input, or its keys and values; the residual goes on by itself",
        depth_state="every source so far, and the residual",
        paper="Gerasimov et al., You Do Not Fully Utilize Transformer's Representation Capacity, arXiv 2502.09245",
    )
    suggestions = (Suggestion("heads", options=lambda shape: {"over": "heads", "kv_heads": shape.kv_heads}),)

    def __init__(self, config: LimeConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        width, heads, softmax = layout.width, config.kv_heads, config.normaliser == "softmax"
        if heads is not None:
            self.source, self.tensors, self.kv_heads = "kv", 2, heads
        self.follow(self._states() if heads is None else attention_plan(layout, self.uses))
        # weights of one and zero change no bit; a softmax has none such, and behind a ReLU the zeros never learn
        self.neutral = "bitwise" if config.normaliser == "none" or not self.plan.reads else "none"
        newest, drawn = OneAt(value=config.start if softmax else 1.0), Uniform(width**-0.5)
        for index, read in self.plan.reads.items():
            if heads is not None:
                columns = (len(read.numbers) + 1) * heads
                start = OwnHeads((3 / columns) ** 0.5)
                self.parameter(f"router.{index}", heads, columns, start=start, neutral=OwnHeads())
                continue
            sizes, static = (len(read.ways), read.total), config.weights == "static"
            self.parameter(f"theta.{index}", *sizes, start=newest, neutral=OneAt(), needed=static)
            self.parameter(f"router.{index}", *sizes, width, start=drawn, neutral=0.0, needed=not static)
            self.parameter(f"bias.{index}", *sizes, start=drawn, neutral=OneAt(), needed=not static)
            self.parameter(f"norm_weight.{index}", width, start=1.0, needed=not static)

    def _states(self) -> Plan:
        """Each site that takes part reads all states so far; the first has none but its own, which it gets anyway."""
        attentions = set(self.attention.values())
        sites = [s for s in self.layout.sublayers if self.config.every == "sublayer" or s in attentions]
        sites = [s for s in sites if self.uses(s)]
        reads = {}
        for n, site in enumerate(sites):
            if n:
                reads[site.index] = Read(range(n + 1), WAYS[self.config.ways] if site in attentions else ("x",))
        names = ["embedding" if s.index == 0 else f"state before site {s.index}" for s in sites]
        return Plan(self.layout, {s.index: n for n, s in enumerate(sites)}, reads, names)

    def ways(self, site: Site) -> tuple[str, ...]:
        """Of an attention that reads them separately: q, k and v."""
        read = self.plan.reads.get(site.index)
        return qkv_ways(site) if read is not None and "k" in read.ways else ("x",)

    def route(self, view: View, site: Site) -> Weights:
        """The site's weights for each way and state."""
        index = str(site.index)
        if self.config.weights == "static":
            return Weights(static=self._normalised(widen(self.theta[index])))
        w, x = widen(self.router[index]), view.sources[-1]
        queries = (w * widen(self.norm_weight[index])).flatten(0, 1).unsqueeze(1)  # (W S, 1, D)
        logits = rms_logits(x, queries, eps=self.config.eps).squeeze(-2).unflatten(-1, w.shape[:2])
        return Weights(token=self._normalised(logits + widen(self.bias[index])))

    def _normalised(self, logits: Tensor) -> Tensor:
        if self.config.normaliser == "softmax":
            return logits.softmax(-1)
        return logits.relu() if self.config.normaliser == "relu" else logits

    def exchange(self, q: Tensor, k: Tensor, v: Tensor, view: View | None, site: Site) -> Exchanged:
        """Routed keys and values; later layers get the attention's own."""
        heads = self.config.kv_heads
        if k.shape[-2] != heads:
            raise ValueError(f"lime was built for kv_heads={heads}, the attention has {k.shape[-2]} key heads")
        # heads last, so that products with the router copy no source: training memory would grow with depth squared
        stored = (v.mT.contiguous(), k.mT.contiguous())
        if view is None:
            return k, v, stored
        blocks = self.router[str(site.index)].mT.to(k.dtype).split(heads)
        new_v, new_k = (
            self._routed([*earlier, own], blocks)
            for earlier, own in zip((view.sources, [s.also[0] for s in view.kept]), stored, strict=True)
        )
        return new_k, new_v, stored

    def _routed(self, sources: list[Tensor], blocks: tuple[Tensor, ...]) -> Tensor:
        """Σ_i R_i x_i, for sources (..., d, heads) and R transposed."""
        terms = [widen(product(x, w)) for x, w in zip(sources, blocks, strict=True)]
        return sum(terms[1:], terms[0]).to(sources[0].dtype).mT

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The equations, on a list of states or of keys and values."""
        memories: list[Tensor] = []
        kept: list[tuple[Tensor, Tensor]] = []
        met: set[int] = set()
        for site in self.sites:
            attends = site.kind in ("attention", "parallel") and site.block not in met
            met |= {site.block} if attends else set()
            seen = Seen(x)
            if self.config.over == "heads" and attends:
                seen = Seen(x, kv=lambda q, k, v, site=site: self._defined_exchange(kept, k, v, site))
            elif self.config.over == "states" and (attends or self.config.every == "sublayer"):
                memories.append(x)
                if len(memories) > 1:
                    ways = WAYS[self.config.ways] if attends else ("x",)
                    mixed = zip(ways, self._defined_mixtures(memories, str(site.index)), strict=True)
                    read: dict[str, Any] = {"x": x} | dict(mixed)
                    seen = Seen(**read)
            x = x + apply(site, seen).y
        return x

    def _defined_mixtures(self, memories: list[Tensor], index: str) -> list[Tensor]:
        """One mixture of the states per way, for `definition`."""
        if self.config.weights == "static":
            weights = self.theta[index].expand(*memories[-1].shape[:-1], -1, -1)
        else:
            newest = memories[-1]
            normed = newest / (newest.square().mean(-1, keepdim=True) + self.config.eps).sqrt()
            weights = torch.einsum("...d,wsd->...ws", normed * self.norm_weight[index], self.router[index])
            weights = weights + self.bias[index]
        if self.config.normaliser != "none":
            weights = weights.softmax(-1) if self.config.normaliser == "softmax" else F.relu(weights)
        return list(torch.einsum("...ws,s...d->w...d", weights, torch.stack(memories)))

    def _defined_exchange(
        self, kept: list[tuple[Tensor, Tensor]], k: Tensor, v: Tensor, site: Site
    ) -> tuple[Tensor, Tensor, None]:
        """Keys and values of all heads so far side by side, through the router; for `definition`."""
        kept.append((k, v))
        if len(kept) == 1:
            return k, v, None
        router = self.router[str(site.index)]
        mixed = [torch.einsum("hj,...jd->...hd", router, torch.cat(each, dim=-2)) for each in zip(*kept, strict=True)]
        return mixed[0], mixed[1], None
