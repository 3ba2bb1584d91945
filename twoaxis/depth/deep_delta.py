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
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.method import Card, NamedRange, ParameterGroup, Published, Quantity
from twoaxis.base.options import Options, between
from twoaxis.depth.rows import Rows
from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.precision import full_precision, widen
from twoaxis.kernels.rewrite import delta_rewrite, read_channels
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


_STACKED = (
    *("gate_in", "gate_weight", "gate_bias", "value_weight", "value_bias", "key_map"),
    *("compress_weight", "compress_read"),
)
"""Parameters with a row per site or block."""


class Matrix(NamedTuple):
    """The state X, (B, T, D) or (B, T, D, d_v), the sequence side, and the rings later tokens will need.

    With d_v > 1 the columns of X lie in memory one after another: `x.mT` is what operations run over.
    """

    x: Tensor
    tokens: Tokens
    kept: tuple[Ring, ...]
    rows: Rows


class Compressed(NamedTuple):
    """What a compressing read leaves for the write: X to go on with, and the ring of TC."""

    x: Tensor
    ring: Ring | None


class DeepDelta(Stream):
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
    card = Card(
        title="Deep Delta Learning",
        axis="depth",
        source="the state itself",
        query="-",
        key="the sub-layer's output, normalised",
        value="a gated map of the read",
        literal_qkv=False,
        normaliser="unit direction",
        adaptivity="per token",
        window="the current state only",
        granularity="per sub-layer",
        ways="one",
        injection="rewrites the shortcut",
        sharing="compressor shared inside a block",
        gating="β in (0, 2), one per token",
        depth_state="d x d_v numbers, no history",
        token_state="none; EC keeps 3 embeddings, TC 3 states per sub-layer",
        paper="Zhang et al., Deep Delta Learning",
        year=2026,
        quirks=(
            "No parameters give x + F(x); use Blend on a pretrained model.",
            "The value reads the un-normalised input, has a bias and a sigmoid; the paper has none of the three.",
            "Compressors start so small that the pre-norm's epsilon dominates the first reads (d_v > 1).",
        ),
        published=(
            Published(
                "124M, 49B tokens, validation loss: baseline 2.8543, d_v=1 2.8482, CC 2.8329, TC 2.8299 (one run each)",
                "Deep Delta Learning, main table",
            ),
            Published(
                "353M: baseline 2.6053, d_v=1 2.6039, CC 2.5758, TC 2.5905 (one run each); the authors call the "
                "d_v=1 gain "
                "not statistically resolved",
                "Deep Delta Learning, main table",
            ),
        ),
    )
    gate_in: nn.Parameter | None
    gate_weight: nn.Parameter
    gate_bias: nn.Parameter
    value_weight: nn.Parameter
    value_bias: nn.Parameter
    key_map: nn.Parameter
    compress_weight: nn.Parameter
    compress_read: nn.Parameter
    readout_weight: nn.Parameter
    readout_read: nn.Parameter
    expand_weight: nn.Parameter

    @classmethod
    def controls(cls, config: DeepDeltaConfig) -> tuple[dict[str, Any], ...]:
        """The same state and gates without erasing; the expanded state without the delta rule."""
        if config.update != "delta":
            return ()
        return ({"update": "write"}, {"update": "add"}) if config.value_channels > 1 else ({"update": "write"},)

    def __init__(self, config: DeepDeltaConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        d, dv = layout.width, config.value_channels
        writing = [site for site in layout.used() if site.kind != OUT]
        n = len(writing) if config.update != "add" else 0
        self.rows = {site.index: row for row, site in enumerate(writing)}
        self.wide = dv > 1
        self.by_token = self.wide and config.compress == "token"
        compressing = sorted({site.block for site in writing}) if self.wide else []
        self.block_rows = {block: row for row, block in enumerate(compressing)}
        self.reads_out = self.wide and self.uses(layout.out)
        self.expands = config.expand == "conv" and bool(layout.used())
        """Whether EC runs: a stream that is switched off everywhere opens with copies."""
        taps = (config.token_taps,) if self.by_token else ()

        def parameter(name: str, *shape: int, needed: bool = True) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(*shape)) if needed and 0 not in shape else None)

        hidden = config.gate_hidden if config.gate == "two_layer" else d
        parameter("gate_in", n, hidden, d, needed=config.gate == "two_layer")
        parameter("gate_weight", n, hidden)
        parameter("gate_bias", n)
        parameter("value_weight", n, dv, d, needed=config.value != "constant")
        parameter("value_bias", n, dv, needed=config.value != "constant")
        parameter("key_map", n, d, d, needed=config.map == "v")
        parameter("compress_weight", len(compressing), d, dv, *taps, needed=self.wide)
        parameter("compress_read", len(compressing), dv, needed=self.wide)
        parameter("readout_weight", d, dv, *taps, needed=self.reads_out)
        parameter("readout_read", dv, needed=self.reads_out)
        parameter("expand_weight", d, dv, config.expand_taps, needed=self.expands)

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

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """The original's start: matrices N(0, 0.5/sqrt(d)), reads 1/d_v, EC the identity, the gate at gate_start."""
        d, dv = self.layout.width, self.config.value_channels
        share = min(max(self.config.gate_start / 2, 1e-6), 1 - 1e-6)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name == "gate_bias":
                    parameter.fill_(math.log(share / (1 - share)))
                elif name == "value_bias":
                    parameter.uniform_(-(d**-0.5), d**-0.5, generator=generator)
                elif name in ("compress_read", "readout_read"):
                    parameter.fill_(1 / dv)
                elif name == "expand_weight":
                    parameter.zero_()[..., -1] = 1.0
                else:
                    parameter.normal_(0.0, 0.5 * d**-0.5, generator=generator)

    @property
    def neutral(self) -> Neutral:
        """Only the additive control has a plain setting."""
        if self.config.update != "add" and self.rows:
            return "none"
        return "rounding" if self.wide else "bitwise"

    def neutral_(self) -> None:
        """For the additive control: compressors average the current token's channels, the input is not convolved."""
        if self.neutral == "none":
            super().neutral_()
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name in ("compress_read", "readout_read"):
                    parameter.fill_(1 / self.config.value_channels)
                elif name == "expand_weight" or self.by_token:
                    parameter.zero_()[..., -1] = 1.0
                else:
                    parameter.zero_()[..., self._channel_offset] = 1.0

    # Expansion and compression.

    @property
    def _channel_offset(self) -> int:
        """p: which tap of CC's kernel meets its own channel."""
        dv = self.config.value_channels
        return dv - 1 if self.config.channel_padding == "causal" else (dv - 1) // 2

    def _fold(self, weight: Tensor, read: Tensor) -> Tensor:
        """CC's convolution and read as one weight: w_eff[m,i] = Σ_q read[q] w[i, m-q+p]  (d_v, D)."""
        dv, p = self.config.value_channels, self._channel_offset
        # taps[m,j] = read[m-j+p], zero outside: windows of the read between zeros, each turned round
        taps = F.pad(read, (dv, dv)).unfold(0, dv, 1)[p + 1 : p + 1 + dv].flip(1)
        return (taps.unsqueeze(-1) * weight.mT).sum(1)

    def _compress(self, value: Matrix, weight: Tensor, read: Tensor, call: int) -> tuple[Tensor, Compressed]:
        """The state as a vector (B, T, D), and what the write needs; `call` counts TC's convolutions."""
        weight, read = widen(weight), widen(read)
        if not self.by_token:
            x, state = read_channels(value.x.mT, self._fold(weight, read))
            return x, Compressed(state.mT, None)
        history, ring = with_history(value.x.mT, self._past(value.tokens, call), self.config.token_taps)
        kernel = (weight * read.unsqueeze(-1)).transpose(0, 1).flatten(0, 1)  # (d_v D, taps)
        terms = depthwise_taps(history.flatten(-2), kernel, value.tokens.reach)
        x = terms.unflatten(-1, (len(read), -1)).sum(-2).to(value.x.dtype)
        return x, Compressed(value.x, ring)

    def _past(self, tokens: Tokens, call: int) -> Ring | None:
        """The ring of one convolution; EC's comes first, then TC's in the order of the sites, the read-out's last."""
        return tokens.past[call] if tokens.past else None

    def _calls_before(self, site: Site) -> int:
        """Convolutions along tokens that run before the one at `site`."""
        rows = sum(index < site.index for index in self.rows) if self.by_token else 0
        return rows + self.expands

    def _open(self, x: Tensor, tokens: Tokens) -> Matrix:
        rows = self._rows()
        if not self.wide:
            return Matrix(x, tokens, (), rows)
        if (self.by_token or self.expands) and x.dim() != 3:
            raise ValueError(f"a stream that mixes tokens needs (batch, time, width), got {x.dim()} dimensions")
        if tokens.past and len(tokens.past) != (want := len(self.memory_windows())):
            raise ValueError(f"past has {len(tokens.past)} rings, this stream keeps {want}")
        if not self.expands:
            copies = x.unsqueeze(-2).expand(*x.shape[:-1], self.config.value_channels, x.shape[-1])
            return Matrix(copies.mT, tokens, (), rows)
        history, ring = with_history(x, self._past(tokens, 0), self.config.expand_taps)
        columns = [depthwise_taps(history, kernel, tokens.reach) for kernel in widen(self.expand_weight).unbind(1)]
        return Matrix(torch.stack(columns, -2).to(x.dtype).mT, tokens, (ring,) if tokens.keep else (), rows)

    def _rows(self) -> Rows:
        return Rows.of(self, _STACKED)

    def memory_windows(self) -> tuple[int, ...]:
        """Taps of every convolution along tokens: EC's, then TC's in the order of the sites, the read-out's last."""
        calls = (self.config.expand_taps,) if self.expands else ()
        return calls + ((self.config.token_taps,) * (len(self.rows) + self.reads_out) if self.by_token else ())

    # Reads and writes.

    def _read(self, value: Matrix, site: Site) -> Seen:
        if not self.wide:
            return Seen(value.x)
        if not self.uses(site):
            # equal channels give exactly that channel: the plain residual stays plain to a bit
            base = value.x[..., 0]
            return Seen(base + (value.x - base.unsqueeze(-1)).mean(-1))
        call = self._calls_before(site)
        if site.kind == OUT:
            return Seen(self._compress(value, self.readout_weight, self.readout_read, call)[0])
        rows, row = value.rows.now(self).rows, self.block_rows[site.block]
        weight, read = rows["compress_weight"][row], rows["compress_read"][row]
        x, left = self._compress(value, weight, read, call)
        return Seen(x, aux=left)

    def _write(self, value: Matrix, site: Site, y: Tensor, seen: Seen, c: Seen) -> Matrix:
        x, kept = value.x, value.kept
        if isinstance(seen.aux, Compressed):
            x = seen.aux.x
            if value.tokens.keep and seen.aux.ring is not None:
                kept = (*kept, seen.aux.ring)
        row = self.rows.get(site.index)
        if row is not None and self.config.update != "add":
            x = self._rewrite(x, row, y, seen.x, c.x, value.rows.now(self))
        else:
            x = x + (y.unsqueeze(-1) if self.wide else y)
        return Matrix(x, value.tokens, kept, value.rows)

    @full_precision
    def _rewrite(self, state: Tensor, row: int, y: Tensor, x_in: Tensor, c: Tensor, rows: Rows) -> Tensor:
        """X + β k ⊗ (v - kᵀX), in float32 at least."""
        config = self.config
        h, source = (y, x_in) if config.map == "k" else (self._key(c, row, rows), y)
        gate, value = self._gate_logits(c, row, rows), self._value_logits(source, row, rows)
        options: dict[str, Any] = {
            "k_eps": config.k_eps,
            "bound": config.value_scale if config.value == "sigmoid" else None,
            "erase": config.update == "delta",
        }
        after = delta_rewrite(state.mT if self.wide else state.unsqueeze(-2), h, gate.squeeze(-1), value, **options)
        return after.mT if self.wide else after.squeeze(-2)

    def direction(self, row: int, y: Tensor, c: Tensor) -> Tensor:
        """k (..., D) of the site with parameter row `row`, from the sub-layer's output or the normalised read."""
        k = widen(y) if self.config.map == "k" else self._key(c, row, self._rows())
        return k * torch.rsqrt(k.square().sum(-1, keepdim=True) + self.config.k_eps**2)

    def gate(self, row: int, c: Tensor) -> Tensor:
        """β (...) of the site with parameter row `row`, from the normalised read."""
        return 2.0 * torch.sigmoid(self._gate_logits(c, row, self._rows()).squeeze(-1))

    def values(self, row: int, x: Tensor) -> Tensor:
        """v (..., d_v) of the site with parameter row `row`."""
        v = self._value_logits(x, row, self._rows())
        return self.config.value_scale * torch.sigmoid(v) if self.config.value == "sigmoid" else v

    def _key(self, c: Tensor, row: int, rows: Rows) -> Tensor:
        return F.linear(widen(c), widen(rows.rows["key_map"][row]))

    def _gate_logits(self, c: Tensor, row: int, rows: Rows) -> Tensor:
        """(..., 1) the gate before its sigmoid."""
        inner = widen(c)
        if (gate_in := rows.get("gate_in", row)) is not None:
            inner = torch.tanh(F.linear(inner, widen(gate_in)))
        weight, bias = widen(rows.rows["gate_weight"][row]), widen(rows.rows["gate_bias"][row])
        return F.linear(inner, weight.unsqueeze(0), bias.unsqueeze(0))

    def _value_logits(self, x: Tensor, row: int, rows: Rows) -> Tensor:
        """(..., d_v) the values before their sigmoid, or the values where they have none."""
        x = widen(x)
        if self.config.value == "constant":
            return x.new_full((*x.shape[:-1], self.config.value_channels), self.config.value_constant)
        return F.linear(x, widen(rows.rows["value_weight"][row]), widen(rows.rows["value_bias"][row]))

    @full_precision
    def _quantities(
        self, value: Matrix, site: Site, y: Tensor | None, seen: Seen, c: Seen | None
    ) -> dict[str, Quantity]:
        """The gate, and how far what the state holds along k is from v before and after the write."""
        if y is None or c is None or self.config.update == "add" or not self.uses(site):
            return {}
        row = self.rows[site.index]
        k, v = self.direction(row, y, c.x), self.values(row, widen(seen.x if self.config.map == "k" else y))
        found = {"gate": Quantity(self.gate(row, c.x), regimes=REGIMES)}
        after = self._rewrite(value.x, row, y, seen.x, c.x, value.rows.now(self))
        for when, state in (("before the write", value.x), ("after the write", after)):
            x = widen(state) if self.wide else widen(state).unsqueeze(-1)
            found[f"discrepancy, {when}"] = Quantity((torch.einsum("...d,...dv->...v", k, x) - v).norm(dim=-1))
        return found

    # Sequence side, stage boundaries, declarations.

    def _memory(self, value: Matrix) -> tuple[Ring, ...]:
        if not value.tokens.keep:
            raise ValueError("nothing was kept for later tokens: open the pass with keep=True")
        if not (self.by_token and self.reads_out):
            return value.kept
        call = self._calls_before(self.layout.out)
        return (*value.kept, with_history(value.x.mT, self._past(value.tokens, call), self.config.token_taps)[1])

    def _pack(self, value: Matrix, site: Site) -> tuple[Tensor, ...]:
        return (value.x.mT if self.wide else value.x,)

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Matrix:
        self._packed(tensors, 1, site)
        return Matrix(tensors[0].mT if self.wide else tensors[0], tokens, (), self._rows())

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """Nothing is published; matrices are decayed like any linear layer's, biases, reads and EC are not."""
        names = [name for name, _ in self.named_parameters()]
        free = ("gate_bias", "value_bias", "compress_read", "readout_read", "expand_weight")
        groups = [
            ParameterGroup(tuple(n for n in names if n not in free), decay=True),
            ParameterGroup(tuple(n for n in names if n in free)),
        ]
        return tuple(g for g in groups if g.names)

    def cost(self) -> Cost:
        """Direction, gate, value, read, compare and write of d x d_v numbers, less the plain sum; the compressors."""
        d, dv, config = self.layout.width, self.config.value_channels, self.config
        n = 0 if config.update == "add" else len(self.rows)
        per_site = 2 * d  # the direction's length; scaling and gate go into one number per channel of the state
        per_site += 2 * d if config.gate == "linear" else 2 * d * config.gate_hidden
        per_site += 0 if config.value == "constant" else 2 * d * dv
        per_site += (2 * d * dv if config.update == "delta" else 0) + 2 * d * dv - d
        per_site += 2 * d * d if config.map == "v" else 0
        calls = (len(self.rows) + self.reads_out) if self.wide else 0
        taps = config.token_taps if self.by_token else 1
        flops = n * per_site + (len(self.layout.sublayers) - n) * (dv - 1) * d + calls * 2 * d * dv * taps
        if self.wide:  # where a site reads plainly: the mean of the channels
            flops += (len(self.layout.sites) - len(self.layout.used())) * (2 * dv + 1) * d
        flops += 2 * d * dv * config.expand_taps if self.expands else 0
        kept = (config.expand_taps - 1) * d if self.expands else 0
        kept += calls * (taps - 1) * d * dv
        parameters = sum(p.numel() for p in self.parameters())
        return Cost(parameters=parameters, flops=flops, reads=0, live=d * dv, kept=kept)


def _causal_conv(x: Tensor, weight: Tensor) -> Tensor:
    """Depthwise convolution of (B, T, C) over the current and earlier tokens, weights (C, taps); for `definition`."""
    padded = F.pad(x.mT, (weight.shape[-1] - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), groups=len(weight)).mT
