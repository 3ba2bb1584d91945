"""ShortConv: a causal depthwise convolution over the last few tokens, as a local mixer.

Widely used: So et al., Primer, arXiv 2109.08668 (2021), on q, k, v of softmax attention; Gu & Dao, Mamba, arXiv
2312.00752; Yang et al., GLA, arXiv 2312.06635, and Gated DeltaNet, arXiv 2412.06464. Code agreed with:
flash-linear-attention, ShortConvolution.

    conv(x)_t = b + Σ_{j=0}^{k-1} W[:, j] ⊙ x_{t-(k-1)+j}       x before the first token is 0
    op(x)     = act(conv(x))   or, with residual,   x + act(conv(x))

    S = H + op(norm(H))                    where="residual": a sub-layer of its own, before the attention
    A = H + Attn(op(norm(H)))              where="branch":   on the attention's input, with residual
    q, k, v = op(n W_q), op(n W_k), ...    where="qkv":      on the projections, before RoPE, as in Primer, GLA and GDN

    tokens   t-3   t-2   t-1    t
              └─w0──┴─w1──┴─w2──┴─w3──► Σ ─ act ─► y_t            kernel k = 4: window of k tokens

`weight` is (C, 1, k) and `bias` (C,), the state-dict layout of a depthwise nn.Conv1d and of the code above: the last
tap is the current token's, and their checkpoints load as they are. At "qkv" the channels are q's, then k's, then v's:
three convolutions side by side.

Start: the published one is nn.Conv1d's, U(-1/sqrt(k), 1/sqrt(k)), and is the default where the output replaces the
input (at "qkv"). Where it is added to what passes by (the own sub-layer; the branch with residual) the default is zero:
the model starts as the one without the mixer, to a bit, and silu has slope 1/2 there, so the weights learn at once.
"identity" (one on the current token) is the neutral start of a branch or projection without residual and activation.

Only k-1 inputs are remembered between tokens; the code above keeps k, of which the oldest is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import OneAt, Quantity, Uniform, local_card
from twoaxis.base.options import Options, between
from twoaxis.kernels.precision import widen
from twoaxis.kernels.taps import depthwise_taps, with_history
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator

Start = Literal["uniform", "zero", "identity"]


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(Options):
    """Options of ShortConv."""

    kernel: Annotated[int, between(1, 4096)] = 4
    """k: tokens seen, the current one included."""
    activation: Literal["silu", "none"] = "silu"
    """Of the convolution's output."""
    bias: bool = False
    """A learned number per channel, added before the activation."""
    where: Literal["residual", "branch", "qkv"] = "residual"
    """A residual sub-layer of its own, the attention's input, or its q, k, v projections."""
    residual: bool | None = None
    """Add the operator's input to its output; None does so at "branch" only. At a site of its own the stream does."""
    start: Start | None = None
    """Initial weights; None is "zero" where the operator adds to what passes by, else "uniform"."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.where == "residual" and self.residual:
            raise ValueError(
                "residual=True with where='residual' adds the input twice; the stream adds it once already"
            )
        if self.start == "zero" and not self.adds:
            raise ValueError(f"start='zero' at where={self.where!r} without residual silences the attention")
        if self.start == "identity" and self.adds:
            raise ValueError(
                f"start='identity' at where={self.where!r} with residual doubles the input; use start='zero'"
            )

    @property
    def adds_input(self) -> bool:
        """Whether the operator adds its input to its output."""
        return self.where == "branch" if self.residual is None else self.residual

    @property
    def adds(self) -> bool:
        """Whether the operator or the stream adds its output to what passes by, so that zero weights change nothing."""
        return self.adds_input or self.where == "residual"

    @property
    def convolution(self) -> ShortConvConfig:
        """The options themselves; a method that is made of convolutions gives those of each one here."""
        return self

    @property
    def resolved_start(self) -> Start:
        """The initial weights, by name."""
        return self.start or ("zero" if self.adds else "uniform")


class ShortConv(LocalOperator):
    """The depthwise convolution over the last tokens: `ShortConv(768, kernel=3, activation="none")`."""

    name = "short_conv"
    Config = ShortConvConfig
    variants = (
        {"start": "uniform"},
        {"kernel": 1, "activation": "none", "bias": True, "start": "uniform"},
        {"kernel": 3, "where": "branch", "start": "uniform"},
        {"kernel": 2, "where": "branch", "residual": False, "activation": "none", "start": "identity"},
        {"where": "qkv"},
        {"kernel": 5, "where": "qkv", "bias": True, "residual": True, "activation": "none", "start": "uniform"},
    )
    remedy = "use residual=True or activation='none'"
    neutral_options = {"residual": True}  # noqa: RUF012  at "qkv", whose published form replaces the projections
    aliases = ("conv",)
    card = local_card(
        title="ShortConv",
        purpose="a depthwise convolution over four tokens as a sub-layer of its own",
        adaptivity="static, per channel and lag",
        window="last k tokens",
        ways="one, or the projections q, k, v",
        injection="own residual sub-layer, the attention's input, or its projections",
        token_state="last k-1 inputs",
        paper="So et al., Primer, arXiv 2109.08668; Yang et al., GLA, arXiv 2312.06635; code: flash-linear-attention",
    )

    def __init__(self, channels: int, config: Any = None, **options: Any) -> None:
        super().__init__(channels, config, **options)
        self.form: ShortConvConfig = self.config.convolution
        self.window = self.form.kernel
        # zero taps are neutral where the output is added, the identity where it replaces; a SiLU in between has neither
        self.neutral = "bitwise" if self.form.adds or self.form.activation == "none" else "none"
        starts = {"uniform": Uniform(self.window**-0.5), "zero": 0.0, "identity": OneAt()}
        start, neutral = starts[self.form.resolved_start], 0.0 if self.form.adds else OneAt()
        self.parameter("weight", channels, 1, self.window, start=start, neutral=neutral)
        start = start if self.form.resolved_start == "uniform" else 0.0
        self.parameter("bias", channels, start=start, neutral=0.0, needed=self.form.bias)
        self.reset_parameters()

    @classmethod
    def points(cls, config: Any) -> tuple[str, ...]:
        """One point, by `where`."""
        return ({"residual": "site", "branch": "attention", "qkv": "qkv"}[config.where],)

    def definition(self, x: Tensor) -> Tensor:
        """nn.functional.conv1d over k - 1 zeros and the tokens, the activation, and the input where it is added."""
        padded = F.pad(x.mT, (self.window - 1, 0))
        y = F.conv1d(padded, self.weight, self.bias, groups=self.channels).mT
        y = F.silu(y) if self.form.activation == "silu" else y
        return x + y if self.form.adds_input else y

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        """Mix the next tokens; see `LocalOperator.step`."""
        self.check(x, past, reach)
        form = self.form
        history, ring = with_history(x, past, self.window)
        y = depthwise_taps(history, self.weight.squeeze(1), reach)
        if self.bias is not None:
            y = y + widen(self.bias)
        if form.activation == "silu":
            y = F.silu(y)
        if form.adds_input:
            y = y + x
        return y.to(x.dtype), ring

    def quantities(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> dict[str, Quantity]:
        """The root mean square over channels of each tap, the current token's first."""
        meaning = "the size of the filter at the token so many steps back, as the root mean square over channels"
        taps = widen(self.weight).square().mean((0, 1)).sqrt().flip(0)
        return {"taps": Quantity(taps, ("distance",), meaning=meaning)}

    def flops(self) -> int:
        """k multiply-adds per channel, and one addition each for a bias and a residual."""
        return self.channels * (2 * self.window + (self.bias is not None) + self.form.adds_input)
