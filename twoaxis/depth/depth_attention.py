"""Depth attention: the sequence operator on the transposed tensor (Residual Stream Duality, section 2.2).

Zhang: Residual Stream Duality in Modern Transformer Architectures ("Transformer²"), arXiv 2603.16039 (2026).

    W_l = [ h_{l-K+1} ; ... ; h_l ]                        the last K states of one token, the current one included
    z_l = softmax( h_l W_Q (W_l W_K)ᵀ / sqrt(d_k) ) W_l W_V
    add:      input = h_l + z_l W_O,  the residual continues from it
    replace:  input = z_l W_O,        the residual continues from h_l

    token t      h_0 ──► h_1 ──► h_2 ──► h_3                 time axis: ShortSWA reads t-w+1 .. t of one layer
                  └───────┴───────┴──► z ──(+)──► sub-layer   depth axis: this reads l-K+1 .. l of one token

The projections are shared along depth, as a sequence operator shares its own along time; `shared=False` gives each
site its own, and a state still gets its keys and values once, from the set of the site it arrives at. The operator is
`twoaxis.window_attention` on the depth axis, and going layer by layer is decoding with its ring. The paper leaves
open how z enters the block, hence `inject`. With `add`, W_O starts at zero: neutral to a bit. Sources are states of
the residual stream, not increments. The out site reads the last state plainly unless `read_out` is set: the paper's
read feeds blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published
from twoaxis.base.options import Count, Options, between
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.weighted_sum import source_dots
from twoaxis.ring import Ring
from twoaxis.window import attend


@dataclass(frozen=True, kw_only=True)
class DepthAttentionConfig(Options):
    """Options of depth attention."""

    window: Count | None = 4
    """K: how many states are seen, the current one included; None is all of them."""
    heads: Annotated[int, between(1, 4096)] = 4
    """Query heads."""
    kv_heads: Count | None = None
    """Key and value heads; None is as many as query heads."""
    head_width: Annotated[int, between(1, 2**16)] | None = None
    """Width of a head; None is width / heads."""
    inject: Literal["add", "replace"] = "add"
    """How the read enters the sub-layer."""
    shared: bool = True
    """One set of projections for all depths, as the paper has it."""
    granularity: Literal["sublayer", "block"] = "sublayer"
    """Whether every sub-layer reads and is a state, or every block."""
    read_out: bool = False
    """Whether the head reads over depth too."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")


class Depths(NamedTuple):
    """The running residual and the ring of keys and values over depth."""

    x: Tensor
    ring: Ring


class DepthAttention(Stream):
    """Causal windowed attention over the states of a token."""

    name = "depth_attention"
    Config = DepthAttentionConfig
    config: DepthAttentionConfig
    variants = (
        {"heads": 2, "window": 3},
        {"heads": 2, "window": None, "read_out": True},
        {"heads": 4, "kv_heads": 2, "head_width": 4, "window": 2, "shared": False},
        {"heads": 2, "granularity": "block", "window": 2},
        {"heads": 2, "inject": "replace", "read_out": True},
    )
    card = Card(
        title="Depth attention",
        axis="depth",
        source="residual state before a sub-layer",
        query="the current state",
        key="states in the window",
        value="states in the window",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token and head",
        window="last K states, the current one included",
        granularity="per sub-layer (or block)",
        ways="one",
        injection="added to the state (or replaces the input)",
        sharing="projections shared along depth",
        gating="-",
        depth_state="last K keys and values, and the state",
        token_state="none",
        paper="Zhang, Residual Stream Duality, arXiv 2603.16039",
        year=2026,
        quirks=("The paper leaves open how the read enters the block; both ways are offered.",),
        published=(Published("No experiment is reported for it", "arXiv 2603.16039"),),
    )

    def __init__(self, config: DepthAttentionConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        width, heads = layout.width, config.heads
        if config.head_width is None and width % heads:
            raise ValueError(f"heads ({heads}) must divide the width ({width}), or give head_width")
        self.head_width = config.head_width or width // heads
        self.kv_heads = config.kv_heads or heads
        reading = [site for site in layout.sites if self._reads(site)]
        self.rows = {site.index: 0 if config.shared else row for row, site in enumerate(reading)}
        """Which projections a reading site uses."""
        depths = [site for site in layout.sites if self._is_state(site)]
        last = max((site.index for site in reading), default=-1)
        self.key_rows = {s.index: self._key_row(s) for s in depths if s.index <= last}
        """Which projections make the keys and values of the state that arrives at a site."""
        sets = min(len(reading), 1) if config.shared else len(reading)
        self.query = nn.Parameter(torch.empty(sets, heads * self.head_width, width))
        self.key = nn.Parameter(torch.empty(sets, self.kv_heads * self.head_width, width))
        self.value = nn.Parameter(torch.empty(sets, self.kv_heads * self.head_width, width))
        self.output = nn.Parameter(torch.empty(sets, width, heads * self.head_width))
        self.reading = len(reading)

    def _is_state(self, site: Site) -> bool:
        """Whether the stream's state on arrival at `site` is one of the depths."""
        return site.first or self.config.granularity == "sublayer"

    def _reads(self, site: Site) -> bool:
        """Whether `site` reads over depth."""
        return self.uses(site) and self._is_state(site) and (site.kind != OUT or self.config.read_out)

    def _key_row(self, site: Site) -> int:
        """A state is projected once, by the first set that can see it: its own site's, or the next reading one's."""
        return next(self.rows[i] for i in sorted(self.rows) if i >= site.index)

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """State by state; keys and values of the states so far are lists, of which a read takes the last K."""
        config, keys, values, h = self.config, [], [], x
        for site in self.layout.sites:
            state = site.first or config.granularity == "sublayer"
            h = x  # what the site reads
            if state and (site.kind != OUT or config.read_out):
                row = 0 if config.shared else len(keys)
                q, k, v = (
                    (x @ weight[row].T).unflatten(-1, (-1, self.head_width))  # (B, T, H, D)
                    for weight in (self.query, self.key, self.value)
                )
                group = q.shape[-2] // k.shape[-2]
                keys.append(k.repeat_interleave(group, -2))
                values.append(v.repeat_interleave(group, -2))
                recent = slice(-(config.window or len(keys)), None)
                logits = (q * torch.stack(keys[recent])).sum(-1) / self.head_width**0.5
                z = (logits.softmax(0).unsqueeze(-1) * torch.stack(values[recent])).sum(0)
                read = z.flatten(-2) @ self.output[row].T
                h = x + read if config.inject == "add" else read
            if site.kind != OUT:
                x = (h if config.inject == "add" else x) + apply(site, Seen(h)).y
        return h

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Projections N(0, 1/width); with `add` the output projection is zero, so the start is the plain residual."""
        with torch.no_grad():
            for weight in (self.query, self.key, self.value):
                weight.normal_(0.0, self.layout.width**-0.5, generator=generator)
            if self.config.inject == "add":
                self.output.zero_()
            else:
                self.output.normal_(0.0, self.output.shape[-1] ** -0.5, generator=generator)

    def neutral_(self) -> None:
        """Zero output projections, with `add`."""
        if self.neutral == "none":
            super().neutral_()
        with torch.no_grad():
            self.output.zero_()

    @property
    def neutral(self) -> Neutral:
        """Adding zero changes no bit; a replaced input is never the plain one."""
        return "bitwise" if self.config.inject == "add" or not self.reading else "none"

    def _arrive(self, x: Tensor, ring: Ring, index: int) -> Depths:
        """The state on arrival at site `index`: project it once, when it is one of the depths anybody will read."""
        row = self.key_rows.get(index)
        if row is None:
            return Depths(x, ring)
        k, v = (F.linear(x, w[row]).unflatten(-1, (self.kv_heads, -1)) for w in (self.key, self.value))
        return Depths(x, ring.append(k.unsqueeze(-3), v.unsqueeze(-3)))

    def _open(self, x: Tensor, tokens: Tokens) -> Depths:
        return self._arrive(x, Ring(self.config.window, x.dim() - 1, merge=False), 0)

    def _read(self, value: Depths, site: Site) -> Seen:
        if not self._reads(site):
            return Seen(value.x)
        row = self.rows[site.index]
        q = F.linear(value.x, self.query[row]).unflatten(-1, (self.config.heads, -1)).unsqueeze(-3)
        z = attend(value.ring, q).squeeze(-3).flatten(-2)
        read = F.linear(z, self.output[row])
        return Seen(value.x + read if self.config.inject == "add" else read)

    def _write(self, value: Depths, site: Site, y: Tensor, seen: Seen, c: Seen) -> Depths:
        base = seen.x if self.config.inject == "add" else value.x
        return self._arrive(base + y, value.ring, site.index + 1)

    def _pack(self, value: Depths, site: Site) -> tuple[Tensor, ...]:
        return (value.x, *(t.squeeze(-3) for piece in value.ring.pieces for t in piece))

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Depths:
        seen = sum(i <= site.index for i in self.key_rows)
        self._packed(tensors, 1 + 2 * min(seen, self.config.window or seen), site)
        x, *rest = tensors
        pieces = tuple((k.unsqueeze(-3), v.unsqueeze(-3)) for k, v in zip(rest[::2], rest[1::2], strict=True))
        return Depths(x, Ring(self.config.window, x.dim() - 1, merge=False, seen=seen, pieces=pieces))

    def _weights(self, value: Depths, site: Site) -> Tensor | None:
        if not self._reads(site):
            return None
        q = F.linear(value.x, self.query[self.rows[site.index]])
        q = q.unflatten(-1, (self.kv_heads, -1, self.head_width))
        keys = [piece[0].squeeze(-3) for piece in value.ring.pieces]
        return (source_dots(q, keys) * self.head_width**-0.5).softmax(-1).flatten(-3, -2)

    def sources(self, site: Site) -> tuple[str, ...]:
        """The states `site` reads, oldest first."""
        if not self._reads(site):
            return ()
        names = ["embedding" if i == 0 else f"state before site {i}" for i in sorted(self.key_rows) if i <= site.index]
        return tuple(names if self.config.window is None else names[-self.config.window :])

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Projections like any attention's: decayed, in the model's dtype."""
        names = tuple(name for name, _ in self.named_parameters())
        return (ParameterGroup(names, decay=True, float32=False),)

    def dead(self) -> dict[str, str]:
        """A softmax over one state is one whatever the query: such queries, and keys nobody compares, never learn."""
        asking, compared = set(), set()
        for site in (s for s in self.layout.sites if self._reads(s)):
            states = [i for i in sorted(self.key_rows) if i <= site.index]
            states = states if self.config.window is None else states[-self.config.window :]
            if len(states) > 1:
                asking.add(self.rows[site.index])
                compared.update(self.key_rows[i] for i in states)
        rows = range(self.query.shape[0])
        lone = {f"query[{r}]": "its sites see one state, the softmax is constant" for r in rows if r not in asking}
        alone = {f"key[{r}]": "no site sees its states beside another" for r in rows if r not in compared}
        return lone | alone

    def cost(self) -> Cost:
        """Four projections per reading site and state, a dot product and a multiply-add per head and state, the sum."""
        width, inner, kv = (
            self.layout.width,
            self.config.heads * self.head_width,
            self.kv_heads * self.head_width,
        )
        counts = [len(self.sources(site)) for site in self.layout.sites if self._reads(site)]
        projections = len(counts) * 2 * 2 * width * inner + len(self.key_rows) * 2 * 2 * width * kv
        window = self.config.window or len(self.key_rows)
        return Cost(
            parameters=sum(p.numel() for p in self.parameters()),
            flops=projections + sum(counts) * 4 * inner + (width * len(counts) if self.config.inject == "add" else 0),
            reads=sum(counts),
            live=width + 2 * kv * min(window, len(self.key_rows)),
        )
