"""MUDDFormer: queries, keys, values and the residual each get their own per-token mix of all earlier block outputs.

Xiao, Meng, Li, Yuan: MUDDFormer, arXiv 2502.12170 (ICML 2025). Code: Caiyun-AI/MUDDFormer, both its PyTorch (inference)
and its JAX (training) forms agreed with.

    X_0 = embedding, X_b = complete output of block b-1, residual included     slot b
    before block b ≥ 1 and before the head, over the n = b + 1 slots and C ways:
    u      = X_b / rms(X_b)                                                     the newest slot only
    w[c,j] = ( GELU(u W1) W2 )[c n + j] + a[c,j]                                a scalar per token, way and slot
    S_c    = Σ_j w[c,j] X_j                                                     q, k, v, r = S_0 .. S_3
    block:   h = r + Attention(norm q, norm k, norm v);   X_{b+1} = h + FFN(norm h)

    X_0 ────┬──────────┬──► S_v ─► norm ─┐
    X_1 ────┼──────────┼──► S_k ─► norm ─┤
     ...    │          ├──► S_q ─► norm ─┴─ attn ─┐
    X_b ─┬──┴──────────┴──► S_r ─────────────────(+)─┬────────────(+)──► X_{b+1}
         └─ rms ─ W1 ─ GELU ─ W2 ─► w                └─norm── FFN ─┘

The weights are free real numbers: no softmax, no sign. Block 0 reads the embedding in every way; the head reads one.
At the initial values (W2 = 0, a one on the newest slot) it is the plain residual bit for bit. W1 then has no gradient
in the first step and moves from the second on.

With `prenorm` the sums run over H_j = norm(X_j), one learned scale per slot, and the generator's norm learns a scale.
With `postnorm` the mix is added to X_b instead of replacing it, and the residual way's mix is normalised first, with a
scale that starts at 0.001. The published pair is both (the JAX configuration, for deep narrow models); then a starts at
zero. The paper normalises the mix of every way, the code that of the residual way only, which is what stands here.

`prenorm` alone puts a normalised residual in place of the plain one, so it has no neutral setting. `postnorm` alone
starts at a = 0 here: the code would start it at the one-hot, which doubles the stream. `expand_last` and `round64` size
the generator as in the released models, which have 1.5 to 1.8 times the parameters of the paper's formula (round64
always adds: a hidden width of 64 becomes 128); the released PyTorch classes start from random a, for inference only.
ways="one" is the paper's DDFormer, and DenseFormer with dynamic=False. FFN sizes that grow with depth are an option of
the model, not of the stream.

Readings where paper and code are silent: a mixer's output joins every way that waits for the attention; a block without
attention reads one way; `placement` decides about the residual way at the first site of a block and about q, k, v at
its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Normal, OneAt, Suggestion, history_card
from twoaxis.base.options import Options, Positive
from twoaxis.depth.history import HistoryStream, View, Weights, defined_block
from twoaxis.depth.plan import Plan, Read, qkv_ways
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Layout
from twoaxis.kernels.history import rms_logits
from twoaxis.kernels.precision import full_precision, product, widen

POST_START = 0.001
"""Where the scale of the post-norm starts."""


@dataclass(frozen=True, kw_only=True)
class MuddFormerConfig(Options):
    """Options of MUDDFormer; the defaults are the paper's equations. Released models set expand_last and round64."""

    ways: Literal["qkvr", "one"] = "qkvr"
    """A mix for each of q, k, v and the residual, or one for all of them."""
    dynamic: bool = True
    """Weights per token; False leaves the static ones."""
    expand_last: bool = False
    """The head's generator is as wide inside as if it had four ways."""
    round64: bool = False
    """Round the generator's hidden width up to the next multiple of 64, always adding."""
    prenorm: bool = False
    """Mix normalised slots."""
    postnorm: bool = False
    """Add the mix to the newest slot, normalised in the residual way."""
    gelu: Literal["erf", "tanh"] = "erf"
    """Exact as in the PyTorch code, or the approximation the JAX code trains with."""
    eps: Positive = 1e-6
    """Inside every mean square."""
    generator_scale: bool | None = None
    """The generator's norm learns a scale, as in the JAX code; None is as prenorm."""
    generator_eps: Positive | None = None
    """Inside the generator's mean square; None is eps. The JAX code has 1e-6 there whatever its eps."""
    first_norms: Literal["shared", "separate"] = "shared"
    """Block 0, whose ways are equal: one pre-norm scale as in the PyTorch code, or one per way as in the JAX code."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.generator_scale and not self.dynamic:
            raise ValueError("generator_scale=True is of the generator of dynamic weights, got dynamic=False")
        sized = [f for f in ("expand_last", "round64") if getattr(self, f)]
        if sized and not self.dynamic:
            raise ValueError(f"{sized[0]}=True sizes the generator of dynamic weights, got dynamic=False")

    @property
    def scales_generator(self) -> bool:
        """Whether the generator's norm learns a scale."""
        return self.prenorm if self.generator_scale is None else self.generator_scale


class MuddFormer(HistoryStream):
    """Multiway dynamic dense connections."""

    derives = ("pre_scale",)

    name = "muddformer"
    Config = MuddFormerConfig
    config: MuddFormerConfig
    variants = (
        {},
        {"ways": "one"},
        {"dynamic": False},
        {"ways": "one", "dynamic": False},
        {"expand_last": True, "round64": True, "gelu": "tanh", "first_norms": "separate", "generator_scale": True},
        {"prenorm": True},
        {"prenorm": True, "postnorm": True, "generator_eps": 1e-5},
    )
    aliases = ("mudd",)
    card = history_card(
        title="MUDDFormer",
        purpose="separate sums of earlier block outputs for queries, keys, values and the residual, weighted per token",
        source="complete block outputs and the embedding",
        query="the newest block output, through a small MLP",
        value="the raw source, or normalised with prenorm",
        adaptivity="a scalar per token, way and source",
        window="all blocks",
        granularity="per block",
        ways="q, k, v and the residual",
        injection="replaces the four inputs of a block, and what the head reads",
        sharing="none over depth",
        depth_state="one vector per block",
        paper="Xiao et al.: MUDDFormer, arXiv 2502.12170",
    )
    suggestions = (
        Suggestion(),
        Suggestion(
            "last blocks",
            "the same in the last two blocks alone, where the speed-runs found it affordable",
            lambda shape: {"placement": f"{shape.blocks - 2}-{shape.blocks - 1}" if shape.blocks > 1 else "0"},
        ),
    )

    def __init__(self, config: MuddFormerConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.follow(Plan.blocks(layout, self._slots))
        self.mixes = {layout.sites[i].block: read.ways for i, read in self.plan.reads.items()}
        """For each block that mixes the slots: the ways it mixes, x being the residual's."""
        width, plain = layout.width, OneAt(value=0.0 if config.postnorm else 1.0)
        for b, ways in self.mixes.items():
            self.parameter(f"static.{b}", len(ways), b + 1, start=plain, neutral=plain, decay=True)
        dynamic = self.mixes if config.dynamic else {}
        for b in dynamic:
            self.parameter(f"generator_in.{b}", width, self._hidden(b), start=Normal(width**-0.5), decay=True)
        for b, ways in dynamic.items():
            self.parameter(f"generator_out.{b}", self._hidden(b), len(ways) * (b + 1), neutral=0.0, decay=True)
        for b in dynamic:
            self.parameter(f"generator_scale.{b}", width, start=1.0, decay=True, needed=config.scales_generator)
        for slot in range(max(self.mixes, default=-1) + 1):
            self.parameter(f"pre_scale.{slot}", width, start=1.0, decay=True, needed=config.prenorm)
        for b, ways in self.mixes.items():
            normed = config.postnorm and "x" in ways
            self.parameter(f"post_scale.{b}", width, start=POST_START, decay=True, needed=normed)
        # zero times a slot adds nothing to a bit; a normalised slot in place of the residual is never plain
        self.neutral = "none" if self.mixes and config.prenorm and not config.postnorm else "bitwise"

    def _slots(self, first: Site) -> Read | None:
        """All slots, in the ways that the block beginning at `first` mixes."""
        attention = self.attention.get(first.block)
        separate = self.config.ways == "qkvr" and attention is not None and self.uses(attention)
        ways = (("q", "k", "v") if separate else ()) + (("x",) if self.uses(first) else ())
        return Read(range(first.block + 1), ways) if ways and first.block else None

    def _hidden(self, block: int) -> int:
        """K: hidden width of the generator before `block`."""
        ways = 4 if self.config.expand_last and block == self.layout.blocks else len(self.mixes[block])
        hidden = ways * (block + 1)
        return (hidden // 64 + 1) * 64 if self.config.round64 else hidden

    def store(self, x: Tensor, number: int, own: None) -> tuple[Tensor, ...]:
        """With prenorm the sums run over the normalised slot."""
        if not self.config.prenorm:
            return (x,)
        return (self._normed(x, self.pre_scale[str(number)]),)

    def _normed(self, x: Tensor, scale: Tensor) -> Tensor:
        """`x` over its root mean square, in float32 at least."""
        return F.rms_norm(widen(x), x.shape[-1:], widen(scale), self.config.eps).to(x.dtype)

    @full_precision
    def route(self, view: View, site: Site) -> Weights:
        """The generator on the newest slot, and the static weights."""
        config, key, x = self.config, str(site.block), view.state.x
        if not config.dynamic:
            return Weights(static=self.static[key])
        assert x is not None
        inner = widen(self.generator_in[key]).mT  # (K, D)
        if config.scales_generator:
            inner = inner * widen(self.generator_scale[key])
        eps = config.eps if config.generator_eps is None else config.generator_eps
        u = rms_logits(x, inner.unsqueeze(1), eps=eps).squeeze(-2)
        hidden = F.gelu(u, approximate="tanh" if config.gelu == "tanh" else "none")
        static = widen(self.static[key])
        return Weights(token=product(hidden, widen(self.generator_out[key])).unflatten(-1, static.shape) + static)

    def enter(self, way: str, read: Tensor, view: View, site: Site) -> Tensor:
        """With postnorm the mix is added to the newest slot, that of the residual way normalised first."""
        if not self.config.postnorm:
            return read
        if way == "x":
            read = self._normed(read, self.post_scale[str(site.block)])
        assert view.state.x is not None
        return view.state.x + read

    def ways(self, site: Site) -> tuple[str, ...]:
        """q, k and v where they are mixed separately, and in block 0, whose ways are equal, if the option says so."""
        if self.config.first_norms == "separate" and site.block == 0 and site == self.attention.get(0):
            return qkv_ways(site) if self.uses(site) and self.config.ways == "qkvr" else ("x",)
        return super().ways(site)

    def flops(self) -> int:
        """Generate and mix, and the norms: a mean square and a product, plus one for a learned scale."""
        config, per_channel = self.config, 4 * (max(self.mixes, default=-1) + 1) * self.config.prenorm
        for block, ways in self.mixes.items():
            per_channel += 2 * len(ways) * (block + 1)
            if config.dynamic:
                per_channel += 2 * self._hidden(block) + (4 if config.scales_generator else 3)
            if config.postnorm:
                per_channel += len(ways) + (4 if "x" in ways else 0)
        return self.layout.width * (per_channel + self.additions())

    def definition(self, x: Tensor, apply: Apply) -> Tensor:
        """Block by block over the list of block outputs X_0, X_1, ...; block 0 reads the embedding in every way."""
        outputs: list[Tensor] = []
        for block in range(self.layout.blocks + 1):
            outputs.append(x)
            *qkv, r = self._defined_mixes(outputs) if block else [x]
            x = r
            if block < self.layout.blocks:
                x = x + defined_block(self.sites_of(block), [r, *qkv], apply)
        return x

    def _defined_mixes(self, outputs: list[Tensor]) -> list[Tensor]:
        """S_c of every way, the residual's last, for `definition`."""
        config, x, key = self.config, outputs[-1], str(len(outputs) - 1)
        slots = torch.stack(outputs)  # (n, B, T, D)
        if config.prenorm:
            slots = torch.stack([_defined_rms(t, config.eps) * self.pre_scale[str(j)] for j, t in enumerate(outputs)])
        weights = self.static[key].expand(*x.shape[:-1], -1, -1)  # (B, T, C, n)
        if config.dynamic:
            u = _defined_rms(x, config.eps if config.generator_eps is None else config.generator_eps)
            if config.scales_generator:
                u = u * self.generator_scale[key]
            hidden = F.gelu(u @ self.generator_in[key], approximate="tanh" if config.gelu == "tanh" else "none")
            weights = weights + (hidden @ self.generator_out[key]).unflatten(-1, weights.shape[-2:])
        mixes = list(torch.einsum("btcn,nbtd->cbtd", weights, slots))
        if config.postnorm:
            mixes[-1] = _defined_rms(mixes[-1], config.eps) * self.post_scale[key]
            mixes = [x + mix for mix in mixes]
        return mixes


def _defined_rms(x: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square, for `definition`."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
