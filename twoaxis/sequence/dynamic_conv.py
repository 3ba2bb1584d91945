"""Dynamic ShortConv: a causal convolution over the last few tokens whose filters are made of the current token.

Sieberling, Runwal, Panda, Kim: Dynamic Short Convolutions Improve Transformers, arXiv 2606.03825 (2026). Code agreed
with: the reference functions of OliverSieberling/dynamic-conv1d, by channel and by head (in their float32).

    z_t    = P x_t                                             R numbers: the low rank
    a_t    = z_t U   by channel and lag,   or   A x_t   by head of channels and lag
    y_t    = Σ_{w=0}^{k-1} ( a_{t,w} + s_w ) ⊙ x_{t-w}         x before the first token is 0; s is static
    op(x)  = x + y   or, at a site of its own,   y

    tokens   t-3   t-2   t-1    t ──► P ─► U ──► a_t
              └─a3──┴─a2──┴─a1──┴─a0──► Σ ──► y_t              kernel k = 4: window of k tokens

    where="qkv"       on the projections q, k, v, before RoPE: the paper's first form
    where="linear"    there and on the MLP's gate and up projections
    where="branch"    on the attention's input
    where="residual"  a sub-layer of its own, before the attention, as `short_conv` has it

Start as published: U is zero and s is U(-1/sqrt(k), 1/sqrt(k)), so that the operator begins as a static convolution
with residual, and P is nn.Linear's. Where the operator stands outside of the paper's places, and with start="zero", s
is zero too: the model starts as the one without the mixer, to a bit, and U and s have gradients at once.

Readings. In the paper filters for q, k and v come from the input of the projections, in three operators of rank R.
Here an operator sees what passes through its point, q, k and v side by side, and makes one z of all of it. What is
linear in the input of a projection of full column rank is linear in its output, so that the filters that can be made
are the same; to hold three operators of rank R the one here needs rank 3 R. "After every linear layer" leaves out the
output projections, after which there is no point. Filters by heads are a full linear map of zeros at the start.
`proj_out` and `static` have the current token's lag first, as in the code above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from twoaxis.base.method import Quantity, Uniform, local_card
from twoaxis.base.options import Count, Options, between
from twoaxis.kernels.precision import full_precision, product, widen
from twoaxis.kernels.taps import causal_taps, with_history
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator

Start = Literal["uniform", "zero", "identity"]
POINTS = {"residual": ("site",), "branch": ("attention",), "qkv": ("qkv",), "linear": ("qkv", "hidden")}


@dataclass(frozen=True, kw_only=True)
class DynamicConvConfig(Options):
    """Options of Dynamic ShortConv."""

    kernel: Annotated[int, between(1, 4096)] = 4
    """k: tokens seen, the current one included."""
    rank: Annotated[int, between(1, 2**16)] = 15
    """R: numbers that filters are made of; the released kernels want a power of two less one."""
    heads: Count | None = None
    """Groups of channels that share filters, which are then made without a low rank; None gives each its own."""
    static: bool = True
    """A filter per channel beside those per token."""
    where: Literal["qkv", "linear", "branch", "residual"] = "qkv"
    """The projections q, k, v, these and the MLP's, the attention's input, or a residual sub-layer of its own."""
    residual: bool = True
    """Add the operator's input to its output; at a site of its own the stream does."""
    start: Start | None = None
    """Static filters at first; None is as published at projections, else zero, or the identity without a residual."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.start is not None and not self.static:
            raise ValueError(f"start={self.start!r} speaks of static filters, and static is False")
        if self.start == "zero" and not self.adds:
            raise ValueError(f"start='zero' at where={self.where!r} without residual silences the branch")
        if self.start == "identity" and self.adds:
            raise ValueError(f"start='identity' at where={self.where!r} with residual doubles the input")

    @property
    def adds_input(self) -> bool:
        """Whether the operator adds its input to its output."""
        return self.residual and self.where != "residual"

    @property
    def adds(self) -> bool:
        """Whether the operator or the stream adds its output to what passes by."""
        return self.residual or self.where == "residual"

    @property
    def resolved_start(self) -> Start:
        """The initial static filters, by name."""
        outside = "zero" if self.adds else "identity"
        return self.start or ("uniform" if self.where in ("qkv", "linear") else outside)


class DynamicConv(LocalOperator):
    """The operator: `DynamicConv(768, rank=15)`."""

    name = "dynamic_conv"
    Config = DynamicConvConfig
    variants = (
        {"rank": 3},
        {"where": "linear", "rank": 7, "kernel": 3},
        {"heads": 4, "where": "branch", "start": "uniform"},
        {"heads": 2, "where": "residual", "kernel": 2, "static": False},
        {"where": "branch", "residual": False, "rank": 2},
        {"where": "residual", "kernel": 1, "rank": 1},
    )
    remedy = "use residual=True or static=True"
    aliases = ("dynamicshortconv",)
    card = local_card(
        title="Dynamic ShortConv",
        purpose="convolutions over four tokens on queries, keys and values, with filters made of the current token",
        query="the current token",
        adaptivity="per token, channel (or head) and lag, and static",
        window="last k tokens (4)",
        ways="the projections q, k, v, the MLP's hidden channels, or one",
        injection="the projections with a residual, the attention's input, or an own residual sub-layer",
        token_state="last k-1 inputs of each point",
        paper="Sieberling, Runwal, Panda, Kim, Dynamic Short Convolutions Improve Transformers, arXiv 2606.03825",
    )

    def __init__(self, channels: int, config: Any = None, **options: Any) -> None:
        super().__init__(channels, config, **options)
        form: DynamicConvConfig = self.config
        self.window, heads = form.kernel, form.heads
        if heads is not None and channels % heads:
            raise ValueError(f"heads ({heads}) must divide the channels ({channels})")
        starts = {"uniform": Uniform(self.window**-0.5), "zero": 0.0, "identity": _current_token}
        neutral = 0.0 if form.adds else _current_token
        out = (form.rank, self.window, channels) if heads is None else (channels, self.window, heads)
        self.parameter("proj_in", form.rank, channels, start=Uniform(channels**-0.5), needed=heads is None)
        self.parameter("proj_out", *out, neutral=0.0)
        start = starts[form.resolved_start]
        self.parameter("static", self.window, channels, start=start, neutral=neutral, needed=form.static)
        # zero filters where the output is added; where it replaces, the identity, which only static filters have
        self.neutral = "bitwise" if form.adds or form.static else "none"
        self.reset_parameters()

    @classmethod
    def points(cls, config: Any) -> tuple[str, ...]:
        """By `where`."""
        return POINTS[config.where]

    def definition(self, x: Tensor) -> Tensor:
        """All filters at once, (B, T, k, C), and one shifted copy of the input per lag."""
        hidden = x if self.proj_in is None else x @ self.proj_in.T
        filters = torch.einsum("btr,rwc->btwc", hidden, self.proj_out)
        filters = filters.repeat_interleave(self.channels // filters.shape[-1], -1)
        filters = filters if self.static is None else filters + self.static
        shifted = [F.pad(x, (0, 0, lag, 0))[:, : x.shape[1]] for lag in range(self.window)]
        y = (filters * torch.stack(shifted, dim=2)).sum(2)
        return x + y if self.config.adds_input else y

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        """Mix the next tokens; see `LocalOperator.step`."""
        self.check(x, past, reach)
        history, ring = with_history(x, past, self.window)
        y = self._mixed(x, history, reach)
        return (y + x if self.config.adds_input else y).to(x.dtype), ring

    @full_precision
    def _mixed(self, x: Tensor, history: Tensor, reach: Tensor | None) -> Tensor:
        """y, in float32 at least."""
        hidden, total, groups = self._hidden(x), None, self.proj_out.shape[-1]
        for lag, shifted in zip(range(self.window - 1, -1, -1), causal_taps(history, self.window, reach), strict=True):
            shifted = widen(shifted)
            filters = product(hidden, widen(self.proj_out[:, lag]))  # by channel, or by head of channels
            term = (shifted.unflatten(-1, (groups, -1)) * filters.unsqueeze(-1)).flatten(-2)
            if self.static is not None:
                term = term + shifted * widen(self.static[lag])
            total = term if total is None else total + term
        assert total is not None
        return total

    def _hidden(self, x: Tensor) -> Tensor:
        """What filters are made of."""
        return widen(x) if self.proj_in is None else product(widen(x), widen(self.proj_in).mT)

    @full_precision
    def quantities(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> dict[str, Quantity]:
        """The root mean square over channels of each token's filters, the current token's lag first."""
        out = widen(self.proj_out)
        filters = product(self._hidden(x), out.flatten(1)).unflatten(-1, out.shape[1:])
        filters = filters.repeat_interleave(self.channels // out.shape[-1], -1)
        filters = filters if self.static is None else filters + widen(self.static)
        meaning = "the size of the filter at the token so many steps back, as the root mean square over channels"
        return {"taps": Quantity(filters.square().mean(-1).sqrt(), ("distance",), meaning=meaning)}

    def flops(self) -> int:
        """The filters, k multiply-adds per channel for each kind of them, and the residual's addition."""
        channels, hidden = self.channels, self.proj_out.shape[0]
        made = 2 * self.proj_out.numel() + (0 if self.proj_in is None else 2 * hidden * channels)
        applied = 2 * self.window * channels * (1 + (self.static is not None))
        return made + applied + channels * self.config.adds_input


def _current_token(filters: Tensor, generator: torch.Generator | None) -> None:
    """The identity: one on the current token, whose lag is the first."""
    filters.zero_()[0] = 1.0
