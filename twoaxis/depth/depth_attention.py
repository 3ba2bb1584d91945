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
from torch import Tensor

from twoaxis.base.method import Normal, Suggestion, history_card
from twoaxis.base.options import Count, Options, between
from twoaxis.depth.history import History, HistoryStream, View
from twoaxis.depth.plan import Plan, Read
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Layout, Seen
from twoaxis.kernels.history import source_dots, weighted_sum
from twoaxis.kernels.precision import cast


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


class Projections(NamedTuple):
    """The sets of projections, taken apart: autograd puts the gradients of a stack together once."""

    query: tuple[Tensor, ...]
    key: tuple[Tensor, ...]
    value: tuple[Tensor, ...]
    output: tuple[Tensor, ...]


class DepthAttention(HistoryStream):
    """Causal windowed attention over the states of a token."""

    derives = Projections._fields
    tensors = 2

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
    card = history_card(
        title="Depth attention",
        purpose="the sequence operator on the depth axis: attention over a token's last states",
        source="residual state before a sub-layer",
        query="the current state",
        key="states in the window",
        value="states in the window",
        literal_qkv=True,
        normaliser="softmax",
        adaptivity="per token and head",
        window="last K states, the current one included",
        granularity="per sub-layer (or block)",
        injection="added to the state (or replaces the input)",
        sharing="projections shared along depth",
        depth_state="last K keys and values, and the state",
        paper="Zhang, Residual Stream Duality, arXiv 2603.16039",
    )
    suggestions = (
        Suggestion(
            why="the sequence operator on the depth axis: attention over a token's last four states",
            options=lambda shape: {"window": 4, "heads": shape.even_heads, "kv_heads": shape.even_kv_heads},
        ),
    )

    def __init__(self, config: DepthAttentionConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        width, heads, add = layout.width, config.heads, config.inject == "add"
        if config.head_width is None and width % heads:
            raise ValueError(f"heads ({heads}) must divide the width ({width}), or give head_width")
        self.goes_on = "read" if add else "own"
        self.head_width = config.head_width or width // heads
        self.key_heads = config.kv_heads or heads
        reading = [site.index for site in layout.sites if self._reads(site)]
        self.rows = {index: 0 if config.shared else row for row, index in enumerate(reading)}
        """Which projections a reading site uses."""
        last = max(reading, default=-1)
        states = [site.index for site in layout.sites[: last + 1] if self._is_state(site)]
        self.follow(self._windows(states))
        ahead = iter(reading)
        reader, self.key_rows = next(ahead, -1), []
        """By state: which projections make its keys and values, those of the first site that can see it."""
        for index in states:
            reader = reader if reader >= index else next(ahead)
            self.key_rows.append(self.rows[reader])
        sets = min(len(reading), 1) if config.shared else len(reading)
        inner, kv = heads * self.head_width, self.key_heads * self.head_width
        start = Normal(width**-0.5)
        for name, size in (("query", inner), ("key", kv), ("value", kv)):
            self.parameter(name, sets, size, width, start=start, decay=True, float32=False)
        out = 0.0 if add else Normal(inner**-0.5)
        self.parameter("output", sets, width, inner, start=out, neutral=0.0, decay=True, float32=False)
        # adding zero changes no bit; a replaced input is never the plain one
        self.neutral = "bitwise" if add or not self.rows else "none"

    def _is_state(self, site: Site) -> bool:
        """Whether the stream's state on arrival at `site` is one of the depths."""
        return site.first or self.config.granularity == "sublayer"

    def _reads(self, site: Site) -> bool:
        """Whether `site` reads over depth."""
        return self.uses(site) and self._is_state(site) and (site.kind != OUT or self.config.read_out)

    def _windows(self, states: list[int]) -> Plan:
        """The last K states, the one that arrives at the site included."""
        born = {index: n for n, index in enumerate(states)}
        window = self.config.window or len(states)
        reads = {index: Read(range(max(0, born[index] - window + 1), born[index] + 1)) for index in self.rows}
        return Plan(self.layout, born, reads, ["embedding" if i == 0 else f"state before site {i}" for i in states])

    def prepare(self) -> Projections | None:
        """The projections, one by one; None where no site reads."""
        stacks = [getattr(self, name) for name in Projections._fields] if self.rows else []
        return Projections(*(stack.unbind(0) for stack in stacks)) if stacks else None

    def store(self, x: Tensor, number: int, own: Projections) -> tuple[Tensor, ...]:
        """Values and keys of a state, (..., Hkv, D)."""
        row = self.key_rows[number]
        return tuple(_linear(x, w[row]).unflatten(-1, (self.key_heads, -1)) for w in (own.value, own.key))

    def _attention(self, view: View, site: Site) -> Tensor:
        """The softmax over the states, (..., Hkv, G, S)."""
        x = view.state.x
        assert x is not None
        heads = (self.key_heads, -1, self.head_width)
        q = _linear(x, view.state.own.query[self.rows[site.index]]).unflatten(-1, heads)
        keys = [source.also[0] for source in view.kept]
        return (source_dots(q, keys) * self.head_width**-0.5).softmax(-1)

    def mix(self, view: View, site: Site) -> tuple[Tensor, ...]:
        """z: per key head one way for each query head of its group."""
        ways = weighted_sum(view.sources, token=self._attention(view, site))
        return ((ways[0] if len(ways) == 1 else torch.stack(ways, dim=-2).flatten(-3, -2)).flatten(-2),)

    def enter(self, way: str, read: Tensor, view: View, site: Site) -> Tensor:
        """z through its output projection, added to the state or in its place."""
        read, x = _linear(read, view.state.own.output[self.rows[site.index]]), view.state.x
        assert x is not None
        return cast(read, x.dtype) if self.config.inject == "replace" else x + read

    def _weights(self, value: History, site: Site) -> Tensor | None:
        if site.index not in self.rows:
            return None
        return self._attention(self.view(value, site), site).flatten(-3, -2)

    def dead(self) -> dict[str, str]:
        """A softmax over one state is one whatever the query: such queries, and keys nobody compares, never learn."""
        asking, compared = set(), set()
        for index, row in self.rows.items():
            if (read := self.plan.reads[index]).total > 1:
                asking.add(row)
                compared.update(self.key_rows[n] for n in read.numbers)
        rows = set(self.rows.values())
        lone = {f"query[{r}]": "its sites see one state, the softmax is constant" for r in sorted(rows - asking)}
        return lone | {f"key[{r}]": "no site sees its states beside another" for r in sorted(rows - compared)}

    def flops(self) -> int:
        """Four projections per reading site and state, a dot product and a multiply-add per head and state, the sum."""
        width, inner, kv = self.layout.width, self.config.heads * self.head_width, self.key_heads * self.head_width
        counts = [read.total for read in self.plan.reads.values()]
        projections = 4 * width * (inner * len(counts) + kv * len(self.key_rows))
        return projections + 4 * inner * sum(counts) + width * len(counts) * (self.config.inject == "add")

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


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """A projection in the dtype of the state, which may be wider than the model's."""
    return F.linear(x, cast(weight, x.dtype))
