"""ShortSWA: causal sliding-window attention with a short window, as a local mixer.

Zhang: Residual Stream Duality (Algorithm 1), arXiv 2603.16039 (2026); idea: Rethinking-SWA (2025).

    S  = H + ShortSWA(norm(H); w)          where="residual": a sub-layer of its own, before the attention
    A  = H + Attn(n + ShortSWA(n))         where="branch":   inside the attention branch, n = norm(H)

    ShortSWA(x):  q, k, v = x W_q, x W_k, x W_v   (own heads and head width; RoPE on q and k)
                  o_i = Σ_j softmax_j( q_i · k_j / sqrt(d_h) ) v_j        j in {i-w+1, ..., i}
                  out = concat(o) W_o

    tokens   t-3   t-2   t-1    t
                   └─────┴─────┴──► out_t            window w = 3

The operator is `twoaxis.window_attention` on the time axis; a depth read is the same function on the depth axis. The
blog post that named it acts on the projected branches of a mixer and fixes neither heads, initialisation nor numbers;
the block above is the paper's. It can be thin: heads and head width are its own, and for w ≤ 128 the projections are
nearly all of its cost.

Start: W_o is zero, so the model starts as the one without the mixer, to a bit, and a query gives most of its weight to
the token it stands on (0.87 for w = 16 and d_h = 32): W_k has the spread at which |q|² / sqrt(d_h) is log(w) + 3, and
W_q is W_k and a little noise.
With the usual N(0, 0.02) for all of them (start="zero", or "normal" for W_o too) every logit is near zero and each
token gets the mean over its window; as a sub-layer of its own the mixer adds that mean to embeddings of the size 0.02,
and within a few steps the tokens of a window look alike. Held-out loss of `twoaxis train --tokens 120000 --context 64
--batch 16 --lr 3e-3 --model initializer_range=0.02 --mixer short_swa:window=16` (nano, seeds 0 and 1): plain 5.251 and
5.270, with the default start 5.128 and 5.101 (the same distribution, drawn in another order), with start="zero" 5.851
and with start="normal" 5.885 (seed 0). It is the mean over the window, not the place of the sub-layer: with window=1
the literal start gives 5.091, inside the branch, whose input is of size one, 5.242 (seed 0).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.method import Quantity, Shape, Suggestion, local_card
from twoaxis.base.options import Count, Options, Positive, between
from twoaxis.kernels.precision import widen
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.sequence.rope import make_rope, rotate
from twoaxis.window import step, window_attention


@dataclass(frozen=True, kw_only=True)
class ShortSWAConfig(Options):
    """Options of ShortSWA."""

    window: Count = 16
    """w: tokens seen, the current one included. 64 or 128 suit chunked kernels on a GPU."""
    heads: Annotated[int, between(1, 4096)] = 4
    """Query heads."""
    kv_heads: Count | None = None
    """Key and value heads; None is as many as query heads."""
    head_width: Annotated[int, between(1, 2**16)] | None = None
    """Width of a head; None is width / heads. A small one makes the mixer thin."""
    where: Literal["residual", "branch"] = "residual"
    """A residual sub-layer of its own, or inside the attention branch."""
    rope: bool = True
    """Rotary positions on queries and keys."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary positions."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head, before RoPE."""
    sink: bool = False
    """A learned logit per head that takes mass and carries no value."""
    start: Literal["current", "zero", "normal"] = "current"
    """Initial projections: attention to the current token and a zero output, N(0, std) and a zero output, or N(0, std)
    for all. The first two make the model start as without the mixer."""

    def validate(self) -> None:
        """Rules between fields."""
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads ({self.kv_heads}) must divide heads ({self.heads})")
        if self.rope and self.head_width is not None and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head_width, got {self.head_width}; or set rope=False")


def _window(shape: Shape) -> int:
    """A window of one tile of a GPU's kernels, or a short one where shorter is faster."""
    return 128 if shape.gpu else 16


def _thin(width: int) -> dict[str, int]:
    """A width in even heads of at most 64."""
    size = min(64, width) // 2 * 2
    return {"heads": max(1, width // size), "head_width": size}


class ShortSWA(LocalOperator):
    """Attention over the last few tokens: `ShortSWA(768, window=16, heads=2, head_width=32)`."""

    name = "short_swa"
    Config = ShortSWAConfig
    config: ShortSWAConfig
    neutral = "bitwise"  # a zero output projection adds nothing
    variants = (
        {"window": 3, "start": "normal"},
        {"window": 1, "heads": 2, "head_width": 2, "rope": False, "start": "normal"},
        {"window": 4, "kv_heads": 2, "sink": True, "qk_norm": True, "start": "normal"},
        {"window": 20, "heads": 2, "head_width": 4, "where": "branch", "start": "normal"},
    )
    aliases = ("swa",)
    card = local_card(
        title="ShortSWA",
        purpose="attention over a short window of tokens before each global attention",
        query="the current token's read",
        key="tokens in the window",
        literal_qkv=True,
        normaliser="softmax, optionally with a sink",
        adaptivity="per token and head",
        window="last w tokens",
        injection="own residual sub-layer, or the attention's input",
        sharing="own projections per block, shared over tokens",
        token_state="last w-1 keys and values",
        paper="Zhang, Residual Stream Duality, arXiv 2603.16039",
    )
    suggestions = (
        Suggestion(
            options=lambda shape: {
                "window": _window(shape),
                "heads": shape.even_heads,
                "kv_heads": shape.even_kv_heads,
            }
        ),
        Suggestion(
            "thin",
            "the same with an eighth of the width, because the projections are what it costs",
            lambda shape: {"window": _window(shape), **_thin(max(2, shape.width // 8))},
        ),
    )

    def __init__(self, channels: int, config: ShortSWAConfig | None = None, **options: Any) -> None:
        super().__init__(channels, config, **options)
        config = self.config
        if config.head_width is None and channels % config.heads:
            raise ValueError(f"heads ({config.heads}) must divide the width ({channels}), or give head_width")
        self.window = config.window
        self.head_width = config.head_width or channels // config.heads
        if config.rope and self.head_width % 2:
            raise ValueError(f"rotary positions need an even head width, got {self.head_width}; or set rope=False")
        self.kv_heads = config.kv_heads or config.heads
        self.query = nn.Linear(channels, config.heads * self.head_width, bias=False)
        self.key = nn.Linear(channels, self.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(channels, self.kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(config.heads * self.head_width, channels, bias=False)
        self.sink = nn.Parameter(torch.zeros(config.heads)) if config.sink else None
        self.query_norm = nn.Parameter(torch.ones(self.head_width)) if config.qk_norm else None
        self.key_norm = nn.Parameter(torch.ones(self.head_width)) if config.qk_norm else None
        self.reset_parameters()

    @classmethod
    def points(cls, config: ShortSWAConfig) -> tuple[str, ...]:
        """Its own site, or the attention branch."""
        return ("site",) if config.where == "residual" else ("attention",)

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """Projections as `start` says; sinks zero; norms one."""
        with torch.no_grad():
            for linear in (self.query, self.key, self.value, self.output):
                linear.weight.normal_(0.0, std, generator=generator)
            if self.config.start == "current":
                # on normalised inputs of C channels |q|² is C d_h spread²: the current token's logit is log(w) + 3
                spread = math.sqrt((math.log(self.window) + 3.0) / (self.channels * math.sqrt(self.head_width)))
                self.key.weight.mul_(spread / std)
                heads = self.key.weight.unflatten(0, (self.kv_heads, 1, -1))
                # the noise that is left tells query heads of one key head apart
                self.query.weight.unflatten(0, (self.kv_heads, -1, self.head_width)).add_(heads)
            if self.config.start != "normal":
                self.output.weight.zero_()
            if self.sink is not None:
                self.sink.zero_()
            for norm in (self.query_norm, self.key_norm):
                if norm is not None:
                    norm.fill_(1.0)

    def neutral_(self) -> None:
        """Zero the output projection; it gets a gradient at once, the other projections after it."""
        with torch.no_grad():
            self.output.weight.zero_()

    def definition(self, x: Tensor) -> Tensor:
        """Attention with a dense mask: every query against every key, all but the last w of them left out."""
        time, width, config = x.shape[1], self.head_width, self.config
        projected = (x @ linear.weight.T for linear in (self.query, self.key, self.value))
        q, k, v = (t.unflatten(-1, (-1, width)).transpose(1, 2) for t in projected)  # (B, H, T, D)
        if self.query_norm is not None and self.key_norm is not None:
            eps = torch.finfo(x.dtype).eps
            q, k = (t / torch.sqrt(t.square().mean(-1, keepdim=True) + eps) for t in (q, k))
            q, k = q * self.query_norm, k * self.key_norm
        position = torch.arange(time, dtype=x.dtype, device=x.device)
        if config.rope:
            frequency = config.rope_theta ** (-2 * torch.arange(width // 2, dtype=x.dtype, device=x.device) / width)
            turn = torch.polar(torch.ones(1, dtype=x.dtype), position[:, None] * frequency)  # (T, D/2)
            q, k = (torch.complex(*t.chunk(2, -1)) * turn for t in (q, k))
            q, k = (torch.cat([t.real, t.imag], dim=-1) for t in (q, k))
        k, v = (t.repeat_interleave(config.heads // self.kv_heads, 1) for t in (k, v))
        distance = position[:, None] - position
        logits = (q @ k.mT / width**0.5).masked_fill((distance < 0) | (distance >= config.window), -torch.inf)
        if self.sink is not None:
            logits = torch.cat([logits, self.sink[:, None, None].expand(*logits.shape[:-1], 1)], dim=-1)
        mixed = logits.softmax(-1)[..., :time] @ v
        y = mixed.transpose(1, 2).flatten(-2) @ self.output.weight.T
        return x + y if config.where == "branch" else y

    def step(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> tuple[Tensor, Ring]:
        """Mix the next tokens; see `LocalOperator.step`."""
        self.check(x, past, reach)
        q, k, v = self._project(x, past.seen)
        mixed, ring = step(past, q, k, v, sink=self.sink, reach=reach)
        y = self.output(mixed.flatten(-2))
        return (x + y if self.config.where == "branch" else y), ring

    def _project(self, x: Tensor, seen: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of tokens that have `seen` others before them."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_width)) for linear in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q = F.rms_norm(q, (self.head_width,), self.query_norm.to(q.dtype))
            k = F.rms_norm(k, (self.head_width,), self.key_norm.to(k.dtype))
        if self.config.rope:
            # only distances count, so positions start wherever the memory does
            positions = torch.arange(seen, seen + x.shape[1], device=x.device)
            rope = make_rope(positions, self.head_width, self.config.rope_theta, x.dtype)
            q, k = rotate(q, rope), rotate(k, rope)
        return q, k, v

    def quantities(self, x: Tensor, past: Ring, *, reach: Tensor | None = None) -> dict[str, Quantity]:
        """The attention of each head by distance, (B, T, H, w); with a sink the rest to one is the sink's."""
        q, k, v = self._project(x, past.seen)
        keys, w, after = past.append(k, v).tensors()[0], self.window, past.seen + x.shape[1]
        # a window has every remainder of positions by w once: values that name it show the weights
        position = torch.arange(after, device=x.device)
        named = F.one_hot(position[-keys.shape[1] :] % w, w).to(widen(keys).dtype)
        named = named.unsqueeze(-2).expand(*keys.shape[:-1], w)
        shown = window_attention(widen(q), widen(keys), named, w, axis=1, sink=self.sink, reach=reach)
        by_distance = (position[-x.shape[1] :, None] - position.new_tensor(range(w))) % w  # (T, w)
        shown = shown.gather(-1, by_distance[:, None].expand_as(shown))
        meaning = "the share of a head's attention that goes to the token so many steps back"
        return {"attention": Quantity(shown, ("head", "distance"), meaning=meaning)}

    def dead(self) -> dict[str, str]:
        """A window of one sees one token: without a sink its softmax is one whatever the query and the key."""
        if self.window > 1 or self.config.sink:
            return {}
        names = ["query.weight", "key.weight", *(["query_norm", "key_norm"] if self.config.qk_norm else [])]
        return dict.fromkeys(names, "with a window of one the softmax is constant")

    def flops(self) -> int:
        """Four projections and a band of w dot products and multiply-adds per head."""
        inner, kv = self.config.heads * self.head_width, self.kv_heads * self.head_width
        return 2 * self.channels * (2 * inner + 2 * kv) + 4 * self.window * inner
