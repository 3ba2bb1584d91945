"""The sub-layers of the decoder: grouped-query attention with RoPE, SwiGLU, a mixer, and attention beside MLP.

A sub-layer maps the normalised read `c` to an increment, without its residual:

    y = sublayer(c, info)

What it remembers of earlier tokens is in `info.memory`, by its name; in training there is none. Attention takes the
ways q, k, v where the stream gives them and the residual way where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.stream import Seen
from twoaxis.model.config import ModelConfig
from twoaxis.model.memory import Memory, mix
from twoaxis.sequence.mixer import LocalOperator, Mixer
from twoaxis.sequence.rope import Rope, rotate
from twoaxis.window import step, window_attention

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class TokenInfo(NamedTuple):
    """What every sub-layer of one pass knows about its tokens."""

    reach: Tensor | None
    """(B, T) how many earlier positions belong to the token's document; None is all of them."""
    rope: Rope
    """The angles of the tokens' positions."""
    memory: Memory | None = None
    """What earlier tokens left; None remembers nothing."""
    fused: bool = True
    """Whether attention may use fused kernels; see `twoaxis.window_attention`."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in x's dtype; the statistics run in float32 at least."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised."""
        return rms_norm(x, self.weight, self.eps)


class SiteNorm(RMSNorm):
    """The pre-norm of one site: RMSNorm of the entries `ways` of `Seen`, one learned scale each, `norm_WAY` for those
    after the first."""

    def __init__(self, ways: tuple[str, ...], width: int, eps: float) -> None:
        super().__init__(width, eps)
        self.ways = ways
        for way in ways[1:]:
            self.add_module(f"norm_{way}", RMSNorm(width, eps))

    def scale(self, way: str) -> nn.Parameter:
        """The learned scale of a way."""
        return self.weight if way == self.ways[0] else cast(RMSNorm, self._modules[f"norm_{way}"]).weight

    def forward(self, seen: Seen) -> Seen:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`seen` with its ways normalised; a way that is not given separately is the residual way."""
        if self.ways == ("x",):
            return Seen(rms_norm(seen.x, self.weight, self.eps), kv=seen.kv)
        entries = {}
        for way in self.ways:
            tensor = getattr(seen, way)
            entries[way] = rms_norm(seen.x if tensor is None else tensor, self.scale(way), self.eps)
        return seen._replace(**entries, aux=None)


POINTS = {"attention": ("self_attn", "before"), "qkv": ("self_attn", "inside")}
POINTS |= {"mlp": ("mlp", "before"), "hidden": ("mlp", "inside")}
"""Points of a mixer: the sub-layer that hosts its operator, and the operator's name in it."""


class Host(nn.Module):
    """A sub-layer that hosts operators of a mixer: `before` on its input, `inside` on its first projections.

    Args:
        mixer: where the operators come from; None has none.
        block: the number of its block.
        name: of the sub-layer in its block.
        width: of its input.
        inside: channels of the first projections together.
    """

    before: LocalOperator | None
    inside: LocalOperator | None

    def __init__(self, mixer: Mixer | None, block: int, name: str, width: int, inside: int) -> None:
        super().__init__()
        self.where, channels = f"{block}.{name}", {"before": width, "inside": inside}
        for point, (host, place) in POINTS.items():
            if host == name:
                acts = mixer is not None and point in mixer.points
                self.add_module(place, mixer.build(point, width, channels[place]) if acts and mixer else None)

    def mix(self, place: str, x: Tensor, info: TokenInfo, way: int = 0) -> Tensor:
        """`x` through the operator at `place`, if there is one; each way has a memory of its own."""
        operator: LocalOperator | None = getattr(self, place)
        return x if operator is None else mix(operator, x, f"{self.where}.{place}{way or ''}", info.memory, info.reach)


class Attention(Host):
    """Causal grouped-query attention: `window_attention` along the time axis."""

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None, separate: bool = False) -> None:
        width, size = config.hidden_size, config.head_size
        heads, kv_heads = config.num_attention_heads * size, config.kv_heads * size
        super().__init__(mixer, block, "self_attn", width, heads + 2 * kv_heads)
        self.size, self.separate = size, separate
        self.window = None if config.attention_windows is None else config.attention_windows[block]
        self.rotary = block not in config.no_rope_blocks
        self.q_proj = nn.Linear(width, heads, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads, width, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, c: Seen, info: TokenInfo) -> Tensor:
        """Attention over the ways q, k, v."""
        if self.separate:
            ways = [self.mix("before", c.x if way is None else way, info, i) for i, way in enumerate((c.q, c.k, c.v))]
        else:
            ways = [self.mix("before", c.x, info)] * 3
        q, k, v = self.q_proj(ways[0]), self.k_proj(ways[1]), self.v_proj(ways[2])
        if self.inside is not None:
            joined = self.mix("inside", torch.cat([q, k, v], dim=-1), info)
            q, k, v = joined.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            # side by side, so that the small operations of a decoding step run once
            heads = [q.shape[-2], k.shape[-2]]
            q, k = rotate(torch.cat([q, k], dim=-2), info.rope).split(heads, dim=-2)
        k, v = (k, v) if c.kv is None else c.kv(q, k, v)
        if info.memory is None:
            mixed = window_attention(q, k, v, self.window, axis=1, reach=info.reach, fused=info.fused)
        else:
            past = info.memory.ring(self.where, self.window)
            mixed, info.memory.rings[self.where] = step(past, q, k, v, reach=info.reach, fused=info.fused)
        return self.o_proj(mixed.flatten(-2))


class MLP(Host):
    """A gated MLP: SwiGLU, or another activation in its place. Hidden widths may differ by block."""

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None) -> None:
        hidden, width = config.hidden_width(block), config.hidden_size
        super().__init__(mixer, block, "mlp", width, 2 * hidden)
        self.gate_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden, width, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, c: Seen, info: TokenInfo) -> Tensor:
        """down( activation(gate x) · up x )."""
        x = self.mix("before", c.x, info)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.inside is not None:
            joined = self.mix("inside", torch.cat([gate, up], dim=-1), info)
            # halves of one tensor are strided, and a strided SiLU may round its tail differently
            gate, up = (half.contiguous() for half in joined.chunk(2, dim=-1))
        return self.down_proj(self.activation(gate) * up)


class Parallel(nn.Module):
    """Attention on q, k, v and MLP on x, side by side in one site; a view of two modules of a block."""

    def __init__(self, attention: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(self, c: Seen, info: TokenInfo) -> Tensor:
        """The sum of both increments."""
        return self.attention(c, info) + self.mlp(c, info)


class MixerSublayer(nn.Module):
    """A mixer at a site of its own, whose pre-norm is kept with it."""

    def __init__(self, block: int, local: LocalOperator, norm: SiteNorm | None) -> None:
        super().__init__()
        self.where, self.norm, self.local = f"{block}.mixer", norm, local

    def forward(self, c: Seen, info: TokenInfo) -> Tensor:
        """The mixer on the residual way."""
        return mix(self.local, c.x, self.where, info.memory, info.reach)
