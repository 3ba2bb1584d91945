"""Canon layers: a short depthwise convolution with residual at up to four points of a block.

Allen-Zhu: Physics of Language Models, Part 4.1, arXiv 2512.17351 (2025). Code: facebookresearch/PhysicsLM4.

    Canon(x)_t = x_t + Σ_{j=0}^{3} W[:, j] ⊙ x_{t-3+j}        x before the first token is 0

    n   = Canon_A( norm(H) )                                  A: D channels
    q,k,v = Canon_B( n W_q, n W_k, n W_v )                    B: (h + 2 h_kv) d_h channels, before RoPE
    A   = H + Attn(q, k, v) W_o
    m   = Canon_C( norm(A) )                                  C: D channels
    g,u = Canon_D( m W_gate, m W_up )                         D: 2 d_ff channels, before the gate
    H'  = A + ( silu(g) ⊙ u ) W_down

    H ─┬─ norm ─[A]─ W_qkv ─[B]─ RoPE ─ attention ─(+)─┬─ norm ─[C]─ W_gate,up ─[D]─ silu·up ─ W_down ─(+)─ H'
       └───────────────────────────────────────────┘   └───────────────────────────────────────────────┘

All four sit inside a branch, after its norm: none writes to the residual stream, and a history method over depth sees
no additional source. Each is the operator of `short_conv`; weights are (C, 1, k), the last tap the current token's.

Start as published: nn.Conv1d's U(-1/sqrt(k), 1/sqrt(k)), not the model's 0.02, so the current token starts as
1 + W[:, k-1] times itself. start="zero" is neutral instead: every layer returns its input, to a bit.

What surprises: the original's multi-token continuation ignores what it remembers, so only one prefill followed by
single tokens is right there, and packed documents leak into each other; here any cut into chunks is exact and documents
are kept apart. The original recipes rotate only a quarter of each head when Canon is on, which is the attention's
business. In linear models "AbCD" means A, C, D, and the model's own convolution on q, k, v in the place of B; that one
is `short_conv` at "qkv".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from twoaxis.base.method import local_card
from twoaxis.base.options import Options, between
from twoaxis.sequence.short_conv import ShortConv, ShortConvConfig

LAYERS = {"A": "attention", "B": "qkv", "C": "mlp", "D": "hidden"}
"""The point of a block where each Canon layer acts."""


@dataclass(frozen=True, kw_only=True)
class CanonConfig(Options):
    """Options of Canon layers."""

    set: str = "ABCD"
    """Which of the layers A, B, C and D a block has, in any order."""
    kernel: Annotated[int, between(1, 4096)] = 4
    """k: tokens seen, the current one included."""
    residual: bool = True
    """Add the input; the authors advise against leaving it out."""
    activation: bool = False
    """SiLU on the convolution's output; the authors advise against it in Transformers."""
    start: Literal["uniform", "zero"] = "uniform"
    """Initial weights: as published, or the neutral zero."""

    def validate(self) -> None:
        """Rules between fields."""
        unknown = [letter for letter in self.set if letter not in LAYERS]
        if unknown:
            raise ValueError(f"set {self.set!r} names {unknown[0]!r}; the Canon layers are A, B, C and D, in capitals")
        if not self.set:
            raise ValueError("set '' names 0 of the 4 Canon layers; leave the mixer out to have none")
        if len({*self.set}) < len(self.set):
            raise ValueError(f"set {self.set!r} has {len(self.set)} letters, {len({*self.set})} of them different")
        if self.start == "zero" and not self.residual:
            raise ValueError("start='zero' without residual silences the branch; it is neutral with residual=True only")

    @property
    def convolution(self) -> ShortConvConfig:
        """The options of each layer's convolution."""
        return ShortConvConfig(
            kernel=self.kernel,
            activation="silu" if self.activation else "none",
            where="branch",
            residual=self.residual,
            start=self.start,
        )


class Canon(ShortConv):
    """The operator of one layer: `Canon(768, kernel=4)`. Where it stands in a block makes it the layer A, B, C or D."""

    name = "canon"
    Config = CanonConfig
    variants = (
        {},
        {"set": "A", "kernel": 1},
        {"set": "DB", "kernel": 3, "activation": True},
        {"set": "AC", "kernel": 2, "residual": False},
    )
    card = local_card(
        title="Canon layers",
        purpose="depthwise convolutions over four tokens at four points of every block, each with its residual",
        adaptivity="static, per channel and lag",
        window="last k tokens (4)",
        granularity="up to four points per block",
        ways="one, the projections q, k, v, or the MLP's hidden channels",
        injection="inside the branches, after the norm or the projections; never on the stream",
        sharing="own weights per point and block, shared over tokens",
        token_state="last k-1 inputs of each point",
        paper="Allen-Zhu, Physics of Language Models: Part 4.1, arXiv 2512.17351",
    )

    @classmethod
    def points(cls, config: CanonConfig) -> tuple[str, ...]:
        """The points of the chosen layers, in the order of a block."""
        return tuple(point for letter, point in LAYERS.items() if letter in config.set)
