"""The sub-layers of the decoder: grouped-query attention with RoPE, SwiGLU, a mixer, and attention beside MLP.

A sub-layer maps the normalised read `c` to an increment, without its residual:

    y, rings = sublayer(c, past, info)

`past` is a tuple of rings, one per operator that remembers tokens, or None when nothing is to be remembered
(training); then `rings` is None too. Attention takes the ways q, k, v where the stream gives them and the residual
way where it does not.
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
from twoaxis.ring import Ring
from twoaxis.sequence.mixer import LocalOperator, Mixer
from twoaxis.sequence.rope import Rope, rotate
from twoaxis.window import step, window_attention

Rings = tuple[Ring, ...] | None

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


class Sublayer(nn.Module):
    """What every sub-layer offers."""

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """Its memory before the first token."""
        return ()

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """The increment, and the memory after these tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")


Hosted = dict[tuple[str, int], Ring]
"""The rings of the operators inside a sub-layer, by place and way."""

POINTS = {"attention": ("self_attn", "before"), "qkv": ("self_attn", "inside")}
POINTS |= {"mlp": ("mlp", "before"), "hidden": ("mlp", "inside")}
"""Points of a mixer: the sub-layer that hosts its operator, and the operator's name in it."""


class Host(Sublayer):
    """A sub-layer that hosts operators of a mixer: `before` on its input, `inside` on its first projections.

    Args:
        mixer: where the operators come from; None has none.
        name: of the sub-layer in its block.
        width: of its input.
        inside: channels of the first projections together.
        ways: how many tensors pass through `before` one after the other, each with a memory of its own.
    """

    def __init__(self, mixer: Mixer | None, name: str, width: int, inside: int, ways: int = 1) -> None:
        super().__init__()
        channels = {"before": width, "inside": inside}
        for point, (host, place) in POINTS.items():
            if host == name:
                acts = mixer is not None and point in mixer.points
                self.add_module(place, mixer.build(point, width, channels[place]) if acts and mixer else None)
        times = {"before": ways, "inside": 1}
        self.keys = [(place, way) for place in times if self.operator(place) for way in range(times[place])]

    def operator(self, place: str) -> LocalOperator | None:
        """The operator at a place, if there is one."""
        return cast("LocalOperator | None", self._modules[place])

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """One empty ring per operator and way."""
        return tuple(cast(LocalOperator, self.operator(place)).start(spare) for place, _ in self.keys)

    def unpack(self, past: Rings) -> Hosted | None:
        """The rings by place and way."""
        return None if past is None else dict(zip(self.keys, past, strict=True))

    def mix(self, place: str, x: Tensor, rings: Hosted | None, reach: Tensor | None, way: int = 0) -> Tensor:
        """`x` through the operator at `place`, if there is one; its ring is replaced in `rings`."""
        operator = self.operator(place)
        if operator is None:
            return x
        if rings is None:
            return operator(x, reach=reach)
        y, rings[place, way] = operator.step(x, rings[place, way], reach=reach)
        return y


class Attention(Host):
    """Causal grouped-query attention: `window_attention` along the time axis."""

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None, separate: bool = False) -> None:
        width, size = config.hidden_size, config.head_size
        heads, kv_heads = config.num_attention_heads * size, config.kv_heads * size
        super().__init__(mixer, "self_attn", width, heads + 2 * kv_heads, 3 if separate else 1)
        self.size, self.separate = size, separate
        self.window = None if config.attention_windows is None else config.attention_windows[block]
        self.rotary = block not in config.no_rope_blocks
        self.q_proj = nn.Linear(width, heads, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads, width, bias=config.attention_output_bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps) if config.qk_norm else None

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """The keys and values, then the rings of the operators inside."""
        return (Ring(self.window, axis=1, spare=spare), *super().start(spare))

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """Attention over the ways q, k, v."""
        rings = self.unpack(None if past is None else past[1:])
        ways = [c.x if way is None else way for way in (c.q, c.k, c.v)]
        if self.separate:
            ways = [self.mix("before", way, rings, info.reach, i) for i, way in enumerate(ways)]
        else:
            ways = [self.mix("before", ways[0], rings, info.reach)] * 3
        q, k, v = self.q_proj(ways[0]), self.k_proj(ways[1]), self.v_proj(ways[2])
        if self.operator("inside") is not None:
            joined = self.mix("inside", torch.cat([q, k, v], dim=-1), rings, info.reach)
            q, k, v = joined.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            # side by side, so that the small operations of a decoding step run once
            heads = [q.shape[-2], k.shape[-2]]
            q, k = rotate(torch.cat([q, k], dim=-2), info.rope).split(heads, dim=-2)
        k, v = (k, v) if c.kv is None else c.kv(q, k, v)
        if past is None:
            mixed = window_attention(q, k, v, self.window, axis=1, reach=info.reach, fused=info.fused)
            return self.o_proj(mixed.flatten(-2)), None
        mixed, memory = step(past[0], q, k, v, reach=info.reach, fused=info.fused)
        assert rings is not None
        return self.o_proj(mixed.flatten(-2)), (memory, *rings.values())


class MLP(Host):
    """A gated MLP: SwiGLU, or another activation in its place. Hidden widths may differ by block."""

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None) -> None:
        hidden, width = config.hidden_width(block), config.hidden_size
        super().__init__(mixer, "mlp", width, 2 * hidden)
        self.gate_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.down_proj = nn.Linear(hidden, width, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """down( activation(gate x) · up x )."""
        rings = self.unpack(past)
        x = self.mix("before", c.x, rings, info.reach)
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.operator("inside") is not None:
            joined = self.mix("inside", torch.cat([gate, up], dim=-1), rings, info.reach)
            # halves of one tensor are strided, and a strided SiLU may round its tail differently
            gate, up = (half.contiguous() for half in joined.chunk(2, dim=-1))
        return self.down_proj(self.activation(gate) * up), None if rings is None else tuple(rings.values())


class Parallel(Sublayer):
    """Attention on q, k, v and MLP on x, side by side in one site; a view of two modules of a block."""

    def __init__(self, attention: Attention, mlp: MLP) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """Both memories, the attention's first."""
        return (*self.attention.start(spare), *self.mlp.start(spare))

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """The sum of both increments."""
        cut = len(self.attention.start())
        a, first = self.attention(c, None if past is None else past[:cut], info)
        m, second = self.mlp(c, None if past is None else past[cut:], info)
        return a + m, None if first is None or second is None else (*first, *second)


class MixerSublayer(Sublayer):
    """A mixer at a site of its own, whose pre-norm is kept with it."""

    def __init__(self, local: LocalOperator, norm: SiteNorm | None) -> None:
        super().__init__()
        self.norm, self.local = norm, local

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """The mixer's ring."""
        return (self.local.start(spare),)

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """The mixer on the residual way."""
        if past is None:
            return self.local(c.x, reach=info.reach), None
        y, ring = self.local.step(c.x, past[0], reach=info.reach)
        return y, (ring,)
