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
from typing import NamedTuple

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
    """What every sub-layer of one pass knows about its tokens.

    Attributes:
        reach: (B, T) how many earlier positions belong to the token's document; None is all of them.
        rope: the angles of the tokens' positions.
        fused: whether attention may use fused kernels; see `twoaxis.window_attention`.
    """

    reach: Tensor | None
    rope: Rope
    fused: bool = True


class SiteNorm(nn.Module):
    """The pre-norm of one site: RMSNorm with one learned scale per way.

    Args:
        ways: which entries of `Seen` it normalises.
        width: D.
        eps: inside the mean square.
    """

    def __init__(self, ways: tuple[str, ...], width: int, eps: float) -> None:
        super().__init__()
        self.ways, self.eps = ways, eps
        self.weight = nn.Parameter(torch.ones(len(ways), width))

    def forward(self, seen: Seen) -> Seen:
        """`seen` with its ways normalised; a way that is not given separately is the residual way."""
        if self.ways == ("x",):
            return Seen(rms_norm(seen.x, self.weight[0], self.eps), kv=seen.kv)
        entries = {}
        for weight, way in zip(self.weight, self.ways, strict=True):
            tensor = getattr(seen, way)
            tensor = seen.x if tensor is None else tensor
            entries[way] = rms_norm(tensor, weight, self.eps)
        return seen._replace(**entries, aux=None)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in x's dtype; the statistics run in float32 at least."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


class _Points(nn.Module):
    """The local operators a sub-layer hosts, and the running of them over its rings.

    Args:
        mixer: where the operators come from; None has none.
        channels: width of the tensor at each point the sub-layer offers.
        width: D.
        ways: how many tensors pass through a point one after the other, each with a memory of its own; 1 unless said.
    """

    def __init__(self, mixer: Mixer | None, channels: dict[str, int], width: int, ways: dict[str, int] | None = None):
        super().__init__()
        acting = [] if mixer is None else [point for point in channels if point in mixer.points]
        self.locals = nn.ModuleDict({p: mixer.build(p, width, channels[p]) for p in acting if mixer is not None})
        self.keys = [(point, way) for point in acting for way in range((ways or {}).get(point, 1))]

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """One empty ring per operator and way."""
        return tuple(self._local(point).start(spare) for point, _ in self.keys)

    def unpack(self, past: Rings) -> dict[tuple[str, int], Ring] | None:
        """The rings by point and way."""
        return None if past is None else dict(zip(self.keys, past, strict=True))

    def _local(self, point: str) -> LocalOperator:
        found = self.locals[point]
        assert isinstance(found, LocalOperator)
        return found

    def run(
        self, point: str, x: Tensor, rings: dict[tuple[str, int], Ring] | None, reach: Tensor | None, way: int = 0
    ) -> Tensor:
        """`x` through the operator at `point`, if there is one; its ring is replaced in `rings`."""
        if point not in self.locals:
            return x
        if rings is None:
            return self._local(point)(x, reach=reach)
        y, rings[point, way] = self._local(point).step(x, rings[point, way], reach=reach)
        return y


class Sublayer(nn.Module):
    """What every sub-layer offers."""

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """Its memory before the first token."""
        return ()

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """The increment, and the memory after these tokens."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward")


class Attention(Sublayer):
    """Causal grouped-query attention: `window_attention` along the time axis.

    Args:
        config: the decoder's.
        block: its number; blocks may differ in their window and in having rotary positions.
        mixer: may act on the attention's input and on its projections.
        separate: whether the stream gives q, k and v separately.
    """

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None, separate: bool = False) -> None:
        super().__init__()
        width, size = config.hidden_size, config.head_size
        kv_heads = config.kv_heads
        self.size, self.eps = size, config.rms_norm_eps
        self.window = None if config.attention_windows is None else config.attention_windows[block]
        self.rotary = block not in config.no_rope_blocks
        self.query = nn.Linear(width, config.num_attention_heads * size, bias=config.attention_bias)
        self.key = nn.Linear(width, kv_heads * size, bias=config.attention_bias)
        self.value = nn.Linear(width, kv_heads * size, bias=config.attention_bias)
        self.output = nn.Linear(config.num_attention_heads * size, width, bias=config.attention_output_bias)
        self.query_norm = nn.Parameter(torch.ones(size)) if config.qk_norm else None
        self.key_norm = nn.Parameter(torch.ones(size)) if config.qk_norm else None
        channels = {"attention": width, "qkv": (config.num_attention_heads + 2 * kv_heads) * size}
        self.separate = separate
        self.points = _Points(mixer, channels, width, {"attention": 3 if separate else 1})

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """The keys and values, then the rings of the operators inside."""
        return (Ring(self.window, axis=1, spare=spare), *self.points.start(spare))

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """Attention over the ways q, k, v."""
        rings = self.points.unpack(None if past is None else past[1:])
        ways = [c.x if way is None else way for way in (c.q, c.k, c.v)]
        if self.separate:
            ways = [self.points.run("attention", way, rings, info.reach, i) for i, way in enumerate(ways)]
        else:
            ways = [self.points.run("attention", ways[0], rings, info.reach)] * 3
        q, k, v = self.query(ways[0]), self.key(ways[1]), self.value(ways[2])
        if "qkv" in self.points.locals:
            joined = self.points.run("qkv", torch.cat([q, k, v], dim=-1), rings, info.reach)
            q, k, v = joined.split([q.shape[-1], k.shape[-1], v.shape[-1]], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, self.size)) for t in (q, k, v))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = (rms_norm(t, norm, self.eps) for t, norm in ((q, self.query_norm), (k, self.key_norm)))
        if self.rotary:
            # side by side, so that the small operations of a decoding step run once
            heads = [q.shape[-2], k.shape[-2]]
            q, k = rotate(torch.cat([q, k], dim=-2), info.rope).split(heads, dim=-2)
        k, v = (k, v) if c.kv is None else c.kv(q, k, v)
        if past is None:
            mixed = window_attention(q, k, v, self.window, axis=1, reach=info.reach, fused=info.fused)
            return self.output(mixed.flatten(-2)), None
        mixed, memory = step(past[0], q, k, v, reach=info.reach, fused=info.fused)
        assert rings is not None
        return self.output(mixed.flatten(-2)), (memory, *rings.values())


class MLP(Sublayer):
    """A gated MLP: SwiGLU, or another activation in its place.

    Args:
        config: the decoder's.
        block: its number; hidden widths may differ.
        mixer: may act on the input and on the hidden channels.
    """

    def __init__(self, config: ModelConfig, block: int, mixer: Mixer | None = None) -> None:
        super().__init__()
        hidden = config.hidden_width(block)
        self.gate = nn.Linear(config.hidden_size, hidden, bias=config.mlp_bias)
        self.up = nn.Linear(config.hidden_size, hidden, bias=config.mlp_bias)
        self.down = nn.Linear(hidden, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.points = _Points(mixer, {"mlp": config.hidden_size, "hidden": 2 * hidden}, config.hidden_size)

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """The rings of the operators inside."""
        return self.points.start(spare)

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """down( activation(gate x) · up x )."""
        rings = self.points.unpack(past)
        x = self.points.run("mlp", c.x, rings, info.reach)
        gate, up = self.gate(x), self.up(x)
        if "hidden" in self.points.locals:
            joined = self.points.run("hidden", torch.cat([gate, up], dim=-1), rings, info.reach)
            # halves of one tensor are strided, and a strided SiLU may round its tail differently
            gate, up = (half.contiguous() for half in joined.chunk(2, dim=-1))
        return self.down(self.activation(gate) * up), None if rings is None else tuple(rings.values())


class Parallel(Sublayer):
    """Attention on q, k, v and MLP on x, side by side in one site."""

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
    """A mixer at a site of its own."""

    def __init__(self, local: LocalOperator) -> None:
        super().__init__()
        self.local = local

    def start(self, spare: int = 0) -> tuple[Ring, ...]:
        """The mixer's ring."""
        return (self.local.start(spare),)

    def forward(self, c: Seen, past: Rings, info: TokenInfo) -> tuple[Tensor, Rings]:
        """The mixer on the residual way."""
        if past is None:
            return self.local(c.x, reach=info.reach), None
        y, ring = self.local.step(c.x, past[0], reach=info.reach)
        return y, (ring,)
