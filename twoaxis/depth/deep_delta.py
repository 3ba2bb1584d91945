"""Deep Delta Learning: the shortcut itself is a learned rank-one rewrite of the state.

Zhang et al.: Deep Delta Learning (2026). Code: yifanzhang-pro/deep-delta-learning, all variants agreed with.

    x_in = X (d_v = 1)  or  compress(X)                       what the sub-layer reads
    h    = F(norm(x_in))
    k    = h / sqrt(|h|² + k_eps²)                            direction
    β    = 2 σ(w_β · norm(x_in) + b_β)                        gate in (0, 2), one per token
    v    = 4 σ(W_v x_in + b_v)                                value, from the read before its norm
    X⁺   = X + β k ⊗ (v - kᵀX)                                erase along k, write v

    X ──┬───────────────────────────────(I - β k kᵀ)──(+)── X⁺
        ├─compress─┬─norm─┬─ F ─ h ─► k ──────┘        │
        │          │      └──► β ─────────────┘   β k ⊗ v
        │          └───────────► v ───────────────────┘

β = 0 keeps the state, β = 1 makes kᵀX⁺ = v, β = 2 mirrors about v (a Householder reflection); the error kᵀX - v shrinks
by exactly 1 - β|k|². Nothing is remembered over depth.

With value_channels d_v > 1 the state is (d, d_v). It opens as copies of the embedding or, with expand="conv" (EC), as
a short causal convolution of it; it is compressed by a convolution along the value channels (compress="channel", CC)
or along tokens (compress="token", TC), then a read vector; the head has a compressor of its own. One compressor
serves all sub-layers of a block. TC and EC look at earlier tokens: they need `past` when decoding and `reach` for
packed documents.

No parameters make this the plain residual, so the neutral class is none; put it on a pretrained model through `Blend`.
Controls: update="write" writes without erasing, update="add" keeps the expanded state and adds h to every channel.

map="k" is the official form: the sub-layer gives the direction, a linear map the value. map="v" is named in an
earlier version of the paper without code; the reading here: the sub-layer's output gives the value, v = 4 σ(W_v h +
b_v), and a linear map of the normalised read gives the direction.

Quirks kept from the code: the value reads the un-normalised input and has a bias and a sigmoid, where the paper has
neither; the two-layer gate has no first bias; compressor weights start at N(0, 0.5/sqrt(d)), so small that the
pre-norm's epsilon dominates the first reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import NamedRange, Normal, OneAt, Quantity, Suggestion, Uniform, parallel_card
from twoaxis.base.options import Options, between
from twoaxis.depth.parallel import ParallelStreams, Streams
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout, Row, Seen, Tokens
from twoaxis.kernels.precision import full_precision, product, widen
from twoaxis.kernels.rewrite import delta_rewrite
from twoaxis.kernels.streams import read_streams
from twoaxis.kernels.taps import depthwise_taps, with_history
from twoaxis.ring import Ring


@dataclass(frozen=True, kw_only=True)
class DeepDeltaConfig(Options):
    """Options of Deep Delta Learning; the paper's default for d_v > 1 is value_channels=4, expand="conv"."""

    value_channels: Annotated[int, between(1, 4096)] = 1
    """d_v: columns of the state."""
    compress: Literal["channel", "token"] = "channel"
    """CC or TC; only for d_v > 1."""
    expand: Literal["repeat", "conv"] = "repeat"
    """Without or with EC; only for d_v > 1."""
    update: Literal["delta", "write", "add"] = "delta"
    """The delta rule, or one of the controls: write without erasing, plain addition on the expanded state."""
    map: Literal["k", "v"] = "k"
    """Whether the sub-layer's output gives the direction or the value."""
    gate: Literal["linear", "two_layer"] = "linear"
    """Form of the gate's logit."""
    gate_hidden: Annotated[int, between(1, 2**20)] = 128
    """Hidden width of the two-layer gate."""
    gate_start: Annotated[float, between(0, 2)] = 1.0
    """β at the start, between 0 and 2."""
    value: Literal["sigmoid", "linear", "constant"] = "sigmoid"
    """Form of the value."""
    value_scale: float = 4.0
    """Of the sigmoid value."""
    value_constant: float = 2.0
    """The constant value."""
    token_taps: Annotated[int, between(1, 4096)] = 4
    """Taps of TC's convolution."""
    expand_taps: Annotated[int, between(1, 4096)] = 4
    """Taps of EC's convolution."""
    channel_padding: Literal["same", "causal"] = "same"
    """Padding of CC's convolution along the value channels."""
    k_eps: Annotated[float, between(1e-12, 1e3)] = 1e-5
    """In the direction's length."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.value_channels == 1 and self.expand == "conv":
            raise ValueError("expand='conv' needs value_channels > 1, got value_channels=1")


REGIMES = (
    NamedRange("skip", 0.0, 0.1),
    NamedRange("under-relaxed", 0.1, 0.9),
    NamedRange("match", 0.9, 1.1),
    NamedRange("over-relaxed", 1.1, 2.0),
)
"""What a gate does to kᵀX - v: keeps nine tenths of it or more, shrinks it, leaves a tenth at most, turns its sign."""


class DeepDelta(ParallelStreams):
    """Rank-one rewrites of a vector or matrix state."""

    name = "deep_delta"
    Config = DeepDeltaConfig
    config: DeepDeltaConfig
    variants = (
        {},
        {"gate": "two_layer", "gate_hidden": 6, "value": "linear"},
        {"map": "v"},
        {"update": "write", "value": "constant"},
        {"update": "add"},
        {"value_channels": 4, "expand": "conv"},
        {"value_channels": 3, "channel_padding": "causal", "update": "write"},
        {"value_channels": 2, "compress": "token", "token_taps": 3},
        {"value_channels": 2, "compress": "token", "expand": "conv", "map": "v"},
        {"value_channels": 4, "expand": "conv", "update": "add"},
    )
    aliases = ("ddl",)
    card = parallel_card(
        title="Deep Delta Learning",
        purpose="each sub-layer erases and rewrites one direction of the state instead of only adding to it",
        source="the state itself",
        key="the sub-layer's output, normalised",
        value="a gated map of the read",
        normaliser="unit direction",
        adaptivity="per token",
        window="the current state only",
        injection="rewrites the shortcut",
        sharing="compressor shared inside a block",
        gating="β in (0, 2), one per token",
        depth_state="d x d_v numbers, no history",
        token_state="none; EC keeps 3 embeddings, TC 3 states per sub-layer",
        paper="Zhang et al., Deep Delta Learning",
        year=2026,
    )
    suggestions = (
        Suggestion(
            "d_v=1", "each sub-layer erases and rewrites one direction of the state; the state stays as wide as it was"
        ),
        Suggestion(
            "d_v=4",
            "the same on a state of four value channels, the form its authors call the default",
            lambda shape: {"value_channels": 4, "expand": "conv"},
        ),
    )

    @classmethod
    def controls(cls, config: DeepDeltaConfig) -> tuple[dict[str, Any], ...]:
        """The same state and gates without erasing; the expanded state without the delta rule."""
        found = ({"update": "write"}, {"update": "add"}) if config.update == "delta" else ()
        return found if config.value_channels > 1 else found[:1]

    def __init__(self, config: DeepDeltaConfig, layout: Layout) -> None:
        super().__init__(config, layout, config.value_channels)
        d, dv = layout.width, config.value_channels
        self.wide = dv > 1
        self.by_token = self.wide and config.compress == "token"
        self.expands = config.expand == "conv" and bool(layout.used())
        """Whether EC runs: a stream that is switched off everywhere opens with copies."""
        blocks = sorted({site.block for site in self.used})
        self.compressors = [blocks.index(site.block) for site in self.used]
        """Which compressor each site has."""
        self.own_tap = dv - 1 if config.channel_padding == "causal" else (dv - 1) // 2
        """p: which tap of CC's kernel meets its own channel."""

        n, compressors = 0 if config.update == "add" else len(self.used), len(blocks) if self.wide else 0
        hidden, taps = config.gate_hidden if config.gate == "two_layer" else d, (config.token_taps,) * self.by_token
        share = min(max(config.gate_start / 2, 1e-6), 1 - 1e-6)
        valued, parameter = config.value != "constant", self.parameter
        matrix: dict[str, Any] = {"start": Normal(0.5 * d**-0.5), "decay": True}
        even: dict[str, Any] = {"start": 1 / dv, "neutral": 1 / dv}
        compressor: dict[str, Any] = matrix | {"neutral": OneAt() if self.by_token else OneAt(self.own_tap)}
        parameter("gate_in", n, hidden, d, needed=config.gate == "two_layer", **matrix)
        parameter("gate_weight", n, hidden, **matrix)
        parameter("gate_bias", n, start=math.log(share / (1 - share)))
        parameter("value_weight", n, dv, d, needed=valued, **matrix)
        parameter("value_bias", n, dv, needed=valued, start=Uniform(d**-0.5))
        parameter("key_map", n, d, d, needed=config.map == "v", **matrix)
        parameter("compress_weight", compressors, d, dv, *taps, **compressor)
        parameter("compress_read", compressors, dv, **even)
        parameter("readout_weight", d, dv, *taps, needed=self.wide and self.reads_out, **compressor)
        parameter("readout_read", dv, needed=self.wide and self.reads_out, **even)
        parameter("expand_weight", d, dv, config.expand_taps, needed=self.expands, start=OneAt(), neutral=OneAt())
        if config.update == "add" or not self.used:  # reads that average the channels, inputs not convolved
            self.neutral = "rounding" if self.wide else "bitwise"

    def tables(self) -> dict[str, Tensor]:
        """The parameters of the rewrite, and the folded compressor of each site."""
        names = ("gate_in", "gate_weight", "gate_bias", "value_weight", "value_bias", "key_map")
        found = {name: widen(table) for name in names if (table := getattr(self, name)) is not None}
        if self.wide and self.used:
            found["compress"] = self.fold(self.compress_weight, self.compress_read)[self.compressors]
        return found

    # Expansion and compression.

    def fold(self, weight: Tensor, read: Tensor) -> Tensor:
        """A compressor's convolution and read as one weight.

        CC: w[m,i] = Σ_q read[q] weight[i, m-q+p]  (..., d_v, D).  TC: (..., d_v D, taps).
        """
        weight, read = widen(weight), widen(read)
        if self.by_token:
            return (weight * read.unsqueeze(-1).unsqueeze(-3)).transpose(-3, -2).flatten(-3, -2)
        dv, p = self.streams, self.own_tap
        # turned[m,j] = read[m-j+p], zero outside: windows of the read between zeros, each turned round
        turned = F.pad(read, (dv, dv)).unfold(-1, dv, 1)[..., p + 1 : p + 1 + dv, :].flip(-1)
        return product(turned, weight.mT)

    def remember(self, value: Streams, site: Site) -> tuple[Tensor, Ring]:
        """The state behind its predecessors, and the ring after it.

        EC's ring comes first, then TC's in the order of the sites, the read-out's last.
        """
        call = self.expands + sum(index < site.index for index in self.rows)
        return with_history(value.h, value.tokens.past[call] if value.tokens.past else None, self.config.token_taps)

    def split(self, x: Tensor, tokens: Tokens) -> tuple[Tensor, tuple[Ring, ...]]:
        """Copies, or EC's columns."""
        if not self.expands:
            return super().split(x, tokens)
        history, ring = with_history(x, tokens.past[0] if tokens.past else None, self.config.expand_taps)
        columns = [depthwise_taps(history, kernel, tokens.reach) for kernel in widen(self.expand_weight).unbind(1)]
        return torch.stack(columns, -2).to(x.dtype), (ring,)

    def memory_windows(self) -> tuple[int, ...]:
        """Taps of every convolution along tokens: EC's, then TC's in the order of the sites, the read-out's last."""
        calls = (self.config.expand_taps,) if self.expands else ()
        return calls + ((self.config.token_taps,) * (len(self.used) + self.reads_out) if self.by_token else ())

    def _memory(self, value: Streams) -> tuple[Ring, ...]:
        if not value.tokens.keep:
            raise ValueError("nothing was kept for later tokens: open the pass with keep=True")
        read_out = (self.remember(value, self.layout.out)[1],) if self.by_token and self.reads_out else ()
        return value.kept + read_out

    # Reads and writes.

    def take(self, value: Streams, site: Site, p: Row) -> Seen:
        """The state compressed to a vector (..., D); for the write the state to go on with, and the ring of TC."""
        h, folded = value.h, p.get("compress")
        if folded is None:
            return Seen(h.squeeze(-2), aux=(h, None))
        if not self.by_token:
            x, h = read_streams(h, folded)
            return Seen(x, aux=(h, None))
        history, ring = self.remember(value, site)
        terms = depthwise_taps(history.flatten(-2), folded, value.tokens.reach)
        return Seen(terms.unflatten(-1, h.shape[-2:]).sum(-2).to(h.dtype), aux=(h, ring))

    def read_out(self, value: Streams) -> Tensor:
        """The state through a compressor of its own."""
        folded = {"compress": self.fold(self.readout_weight, self.readout_read)} if self.wide else {}
        return self.take(value, self.layout.out, folded).x

    def put(self, value: Streams, site: Site, p: Row, y: Tensor, seen: Seen, c: Seen) -> Streams:
        """X + β k ⊗ (v - kᵀX)."""
        h, ring = seen.aux
        kept = (*value.kept, ring) if value.tokens.keep and ring is not None else value.kept
        return value._replace(h=self.rewrite(h, p, y, seen.x, c.x), kept=kept)

    @full_precision
    def rewrite(self, h: Tensor, p: Row, y: Tensor, x_in: Tensor, c: Tensor) -> Tensor:
        """The state after a site, from the sub-layer's output, its read and its normalised read."""
        config = self.config
        if config.update == "add":
            return h + y.unsqueeze(-2)
        bound, erase = config.value_scale if config.value == "sigmoid" else None, config.update == "delta"
        return delta_rewrite(h, *self._logits(p, y, x_in, c), k_eps=config.k_eps, bound=bound, erase=erase)

    def _logits(self, p: Row, y: Tensor, x_in: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The direction before its length is one, and gate (...) and values (..., d_v) before their sigmoids."""
        config, read = self.config, widen(c)
        direction, source = (y, x_in) if config.map == "k" else (F.linear(read, p["key_map"]), y)
        inner = torch.tanh(F.linear(read, p["gate_in"])) if "gate_in" in p else read
        gate = F.linear(inner, p["gate_weight"].unsqueeze(0), p["gate_bias"].unsqueeze(0)).squeeze(-1)
        if config.value == "constant":
            return direction, gate, read.new_full((*read.shape[:-1], self.streams), config.value_constant)
        return direction, gate, F.linear(widen(source), p["value_weight"], p["value_bias"])

    def terms(self, row: int, y: Tensor, x_in: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """k (..., D), β (...) and v (..., d_v) of the site with row `row`, for looking at them; see `rewrite`."""
        k, gate, v = self._logits(self.row_of(self.used[row], self.take_apart()), y, x_in, c)
        k, v = widen(k), self.config.value_scale * torch.sigmoid(v) if self.config.value == "sigmoid" else v
        return k * torch.rsqrt(k.square().sum(-1, keepdim=True) + self.config.k_eps**2), 2.0 * torch.sigmoid(gate), v

    def sources(self, site: Site) -> tuple[str, ...]:
        """None: the read is no weighted sum."""
        return ()

    @full_precision
    def _quantities(
        self, value: Streams, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """The gate, and how far what the state holds along k is from v before and after the write."""
        if y is None or c is None or self.config.update == "add" or not self.uses(site):
            return {}
        k, gate, v = self.terms(self.rows[site.index], y, seen.x, c.x)
        after = self.rewrite(value.h, self.row_of(site, value.rows), y, seen.x, c.x)
        meaning = "how far the state is moved along its direction; 0 leaves it, 1 replaces what it holds, 2 reflects it"
        found = {"gate": Quantity(gate, regimes=REGIMES, meaning=meaning)}
        meaning = "how far what the state holds along the direction is from the value to be written there"
        for when, h in (("before the write", value.h), ("after the write", after)):
            off = ((widen(h) @ k.unsqueeze(-1)).squeeze(-1) - v).norm(dim=-1)
            found[f"discrepancy, {when}"] = Quantity(off, meaning=meaning)
        return found

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """The matrix X (B, T, D, d_v), compressed, rewritten and read out site by site."""
        config, dv = self.config, self.config.value_channels
        state = torch.stack([x] * dv, dim=-1)
        if config.expand == "conv":
            state = torch.stack([_causal_conv(x, self.expand_weight[:, c]) for c in range(dv)], dim=-1)
        for site in self.sites:
            row, x_in = site.index, state[..., 0]
            if dv > 1:
                x_in = self._defined_compress(state, self.compress_weight[site.block], self.compress_read[site.block])
            c, h = apply(site, Seen(x_in))
            if config.update == "add":
                state = state + h.unsqueeze(-1)
                continue
            direction, source = (h, x_in) if config.map == "k" else (c.x @ self.key_map[row].T, h)
            k = direction / torch.sqrt(direction.square().sum(-1, keepdim=True) + config.k_eps**2)
            inner = c.x if self.gate_in is None else torch.tanh(c.x @ self.gate_in[row].T)
            beta = 2 * torch.sigmoid(inner @ self.gate_weight[row] + self.gate_bias[row])
            if config.value == "constant":
                v = torch.full_like(state[..., 0, :], config.value_constant)
            else:
                v = source @ self.value_weight[row].T + self.value_bias[row]
            if config.value == "sigmoid":
                v = config.value_scale * torch.sigmoid(v)
            error = v if config.update == "write" else v - torch.einsum("btd,btdv->btv", k, state)
            state = state + torch.einsum("bt,btd,btv->btdv", beta, k, error)
        return state[..., 0] if dv == 1 else self._defined_compress(state, self.readout_weight, self.readout_read)

    def _defined_compress(self, state: Tensor, weight: Tensor, read: Tensor) -> Tensor:
        """A convolution along tokens (TC) or value channels (CC), then the read vector; for `definition`."""
        if self.config.compress == "token":
            return _causal_conv(state.flatten(-2), weight.flatten(0, 1)).unflatten(-1, weight.shape[:2]) @ read
        dv = self.config.value_channels
        left = dv - 1 if self.config.channel_padding == "causal" else (dv - 1) // 2
        padded = F.pad(state.flatten(0, 1), (left, dv - 1 - left))  # (BT, D, channels)
        return (F.conv1d(padded, weight.unsqueeze(1), groups=len(weight)) @ read).unflatten(0, state.shape[:2])

    def flops(self) -> int:
        """Direction, gate, value, read, compare and write of d x d_v numbers, less the plain sum; the compressors."""
        d, dv, config, sites = self.layout.width, self.streams, self.config, len(self.used)
        per_site = 2 * d  # the direction's length; scaling and gate go into one number per channel of the state
        per_site += 2 * d * (1 if config.gate == "linear" else config.gate_hidden) + (config.map == "v") * 2 * d * d
        per_site += 2 * d * dv * ((config.value != "constant") + (config.update == "delta") + 1) - d
        per_site = (dv - 1) * d if config.update == "add" else per_site
        calls = (sites + self.reads_out) * self.wide * (config.token_taps if self.by_token else 1)
        return sites * per_site + 2 * d * dv * (calls + self.expands * config.expand_taps) + self.plain_flops()


def _causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution of (B, T, C) over the current and earlier tokens, weights (C, taps); for `definition`."""
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=len(weight)).mT
