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
the generator as in the released models, which have 1.5 to 1.8 times the parameters of the paper's formula. ways="one"
is the paper's DDFormer, and DenseFormer with dynamic=False. FFN sizes that grow with depth are an option of the model,
not of the stream.

Readings where paper and code are silent: a mixer's output joins every way that waits for the attention; a block without
attention reads one way; `placement` decides about the residual way at the first site of a block and about q, k, v at
its attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.base.method import Card, ParameterGroup, Published
from twoaxis.base.options import NotNegative, Options
from twoaxis.depth.multiway import Waiting, attention_sites, defined_block, qkv_ways
from twoaxis.depth.site import Site
from twoaxis.depth.stream import Apply, Cost, Layout, Neutral, Seen, Stream, Tokens
from twoaxis.kernels.precision import full_precision, widen
from twoaxis.kernels.weighted_sum import rms_logits, share, weighted_sum

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
    eps: NotNegative = 1e-6
    """Inside every mean square."""
    generator_scale: bool | None = None
    """The generator's norm learns a scale, as in the JAX code; None is as prenorm."""
    generator_eps: NotNegative | None = None
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


class Slots(NamedTuple):
    """The running residual, the (with prenorm: normalised) block outputs, and ways that wait for the attention.

    Sums read `shared`, the block outputs as `share` gives them.
    """

    x: Tensor
    slots: tuple[Tensor, ...]
    shared: tuple[Tensor, ...]
    waiting: Waiting | None = None


class MuddFormer(Stream):
    """Multiway dynamic dense connections."""

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
    card = Card(
        title="MUDDFormer",
        axis="depth",
        source="complete block outputs and the embedding",
        query="the newest block output, through a small MLP",
        key="-",
        value="the raw source, or normalised with prenorm",
        literal_qkv=False,
        normaliser="none",
        adaptivity="a scalar per token, way and source",
        window="all blocks",
        granularity="per block",
        ways="q, k, v and the residual",
        injection="replaces the four inputs of a block, and what the head reads",
        sharing="none over depth",
        gating="-",
        depth_state="one vector per block",
        token_state="none",
        paper="Xiao et al.: MUDDFormer, arXiv 2502.12170",
        year=2025,
        quirks=(
            "The published PyTorch classes start from random static weights: they are for inference only.",
            "round64 always adds: a hidden width of 64 becomes 128.",
            "The post-norm acts on the residual way only, where the paper has it on every way.",
        ),
        published=(
            Published("Pile, 834M: equals Transformer++ at 1.89x the compute", "arXiv 2502.12170"),
            Published(
                "405M, perplexity: 11.68; static 11.44, one way 11.09, static ways 11.27, all 10.83", "arXiv 2502.12170"
            ),
            Published(
                "MUDDPythia-2.8B, 300B tokens: Pile perplexity 6.29 (Pythia-2.8B 6.63, 6.9B 6.29)", "arXiv 2502.12170"
            ),
            Published("training throughput x0.84 to x0.96, generation x0.88 to x0.94", "arXiv 2502.12170"),
        ),
    )

    def __init__(self, config: MuddFormerConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.attention = attention_sites(layout)
        firsts = [site for site in layout.sites if site.first and site.block > 0]
        self.mixes = {site.block: names for site in firsts if (names := self._names(site))}
        """For each block that mixes the slots: the ways it mixes."""
        self.last_read = max(self.mixes, default=-1)
        width, dynamic = layout.width, self.mixes if config.dynamic else {}

        def each(shapes: dict[int, tuple[int, ...]], needed: bool = True) -> nn.ParameterDict:
            return nn.ParameterDict(
                {str(block): nn.Parameter(torch.empty(shape)) for block, shape in shapes.items() if needed}
            )

        self.static = each({b: (len(names), b + 1) for b, names in self.mixes.items()})
        self.generator_in = each({b: (width, self._hidden(b)) for b in dynamic})
        self.generator_out = each({b: (self._hidden(b), len(names) * (b + 1)) for b, names in dynamic.items()})
        self.generator_scale = each({b: (width,) for b in dynamic}, config.scales_generator)
        self.pre_scale = each({slot: (width,) for slot in range(self.last_read + 1)}, config.prenorm)
        self.post_scale = each({b: (width,) for b, names in self.mixes.items() if "r" in names}, config.postnorm)

    def _names(self, first: Site) -> tuple[str, ...]:
        """The ways that the block beginning at `first` mixes from the slots."""
        attention = self.attention.get(first.block)
        separate = self.config.ways == "qkvr" and attention is not None and self.uses(attention)
        return (("q", "k", "v") if separate else ()) + (("r",) if self.uses(first) else ())

    def _hidden(self, block: int) -> int:
        """K: hidden width of the generator before `block`."""
        ways = 4 if self.config.expand_last and block == self.layout.blocks else len(self.mixes[block])
        hidden = ways * (block + 1)
        return (hidden // 64 + 1) * 64 if self.config.round64 else hidden

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
            if key in self.generator_scale:
                u = u * self.generator_scale[key]
            hidden = F.gelu(u @ self.generator_in[key], approximate="tanh" if config.gelu == "tanh" else "none")
            weights = weights + (hidden @ self.generator_out[key]).unflatten(-1, weights.shape[-2:])
        mixes = list(torch.einsum("btcn,nbtd->cbtd", weights, slots))
        if config.postnorm:
            mixes[-1] = _defined_rms(mixes[-1], config.eps) * self.post_scale[key]
            mixes = [x + mix for mix in mixes]
        return mixes

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """W1 ~ N(0, 1/D), W2 = 0, a one on the newest slot or zero with postnorm, scales 1, the post-norm's 0.001."""
        with torch.no_grad():
            for weight in self.generator_in.values():
                weight.normal_(0.0, self.layout.width**-0.5, generator=generator)
            for scale in (*self.generator_scale.values(), *self.pre_scale.values()):
                scale.fill_(1.0)
            for scale in self.post_scale.values():
                scale.fill_(POST_START)
        self._plain_weights()

    def _plain_weights(self) -> None:
        with torch.no_grad():
            for weight in self.generator_out.values():
                weight.zero_()
            for static in self.static.values():
                static.zero_()[:, -1] = 0.0 if self.config.postnorm else 1.0

    def neutral_(self) -> None:
        """No dynamic weights, and static ones that pick the newest slot or, with postnorm, add nothing to it."""
        if self.neutral == "none":
            super().neutral_()
        self._plain_weights()

    @property
    def neutral(self) -> Neutral:
        """Zero times a slot adds nothing to a bit; a normalised slot in place of the residual is never plain."""
        return "none" if self.mixes and self.config.prenorm and not self.config.postnorm else "bitwise"

    # Reads.

    def _push(self, value: Slots, number: int) -> Slots:
        """Make the running residual block output `number`, or with prenorm what the sums run over in place of it."""
        slot = x = value.x
        if self.config.prenorm:
            slot = (_rms(x, self.config.eps) * widen(self.pre_scale[str(number)])).to(x.dtype)
        return Slots(x, (*value.slots, slot), (*value.shared, share(slot)))

    @full_precision
    def _token(self, x: Tensor, block: int) -> Tensor:
        """The weights before `block` from the newest slot `x`: (..., C, n)."""
        key, eps = str(block), self.config.generator_eps
        inner = widen(self.generator_in[key]).mT  # (K, D)
        if self.config.scales_generator:
            inner = inner * widen(self.generator_scale[key])
        u = rms_logits(x, inner.unsqueeze(1), self.config.eps if eps is None else eps).squeeze(-2)
        hidden = F.gelu(u, approximate="tanh" if self.config.gelu == "tanh" else "none")
        static = widen(self.static[key])
        return (hidden @ widen(self.generator_out[key])).unflatten(-1, static.shape) + static

    def _mix(self, value: Slots, block: int) -> dict[str, Tensor]:
        """Every way of `block`."""
        names, x = self.mixes[block], value.x
        if self.config.dynamic:
            mixed = weighted_sum(value.shared, token=self._token(x, block))
        else:
            mixed = weighted_sum(value.shared, static=self.static[str(block)])
        ways = dict(zip(names, mixed, strict=True))
        if not self.config.postnorm:
            return ways
        if "r" in ways:
            scale = widen(self.post_scale[str(block)])
            ways["r"] = (_rms(ways["r"], self.config.eps) * scale).to(x.dtype)
        return {name: x + way for name, way in ways.items()}

    def _read(self, value: Slots, site: Site) -> Seen:
        attention = self.attention.get(site.block)
        if not site.first:
            return Seen(value.x) if value.waiting is None or site != attention else Seen(value.x, *value.waiting)
        if site.block not in self.mixes:
            return Seen(value.x)
        ways = self._mix(value, site.block)
        x = ways.get("r", value.x)
        if "q" not in ways:
            return Seen(x)
        waiting = Waiting(ways["q"], ways["k"], ways["v"])
        return Seen(x, *waiting) if site == attention else Seen(x, aux=waiting)

    def ways(self, site: Site) -> tuple[str, ...]:
        """q, k and v at the attention of a block that mixes them separately, and of block 0 if the option says so."""
        if site != self.attention.get(site.block):
            return ("x",)
        first = site.block == 0 and self.uses(site) and self.config.ways == "qkvr"
        separate = (first and self.config.first_norms == "separate") or "q" in self.mixes.get(site.block, ())
        return qkv_ways(site) if separate else ("x",)

    # Writes.

    def _open(self, x: Tensor, tokens: Tokens) -> Slots:
        value = Slots(x, (), ())
        return self._push(value, 0) if self.mixes else value

    def _write(self, value: Slots, site: Site, y: Tensor, seen: Seen, c: Seen) -> Slots:
        x, ahead = seen.x + y, site.block + 1
        kept = value._replace(x=x, waiting=None) if self.last_read >= ahead else Slots(x, (), ())
        if site.last:
            return self._push(kept, ahead) if kept.slots else kept
        waiting = seen.aux if site.first else value.waiting
        if waiting is not None:
            waiting = None if site == self.attention[site.block] else waiting.plus(y)
        return kept._replace(waiting=waiting)

    # Stage boundaries, inspection, declarations.

    def _pack(self, value: Slots, site: Site) -> tuple[Tensor, ...]:
        # the newest slot is the running residual, or its norm
        return (value.x, *value.slots[:-1])

    def _unpack(self, tensors: tuple[Tensor, ...], site: Site, tokens: Tokens) -> Slots:
        reads = self.last_read >= site.block
        self._packed(tensors, site.block + 1 if reads else 1, site)
        x, *older = tensors
        value = Slots(x, tuple(older), tuple(share(t) for t in older))
        return self._push(value, site.block) if reads else value

    def _weights(self, value: Slots, site: Site) -> Tensor | None:
        """The weights of the block's ways in the order q, k, v, r."""
        if not site.first or site.block not in self.mixes:
            return None
        if self.config.dynamic:
            return self._token(value.x, site.block)
        static = widen(self.static[str(site.block)])
        return static.expand(*value.x.shape[:-1], *static.shape)

    def sources(self, site: Site) -> tuple[str, ...]:
        """The slots that the mix before `site` reads."""
        if not site.first or site.block not in self.mixes:
            return ()
        return ("embedding", *(f"block {b}" for b in range(site.block)))

    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """As in the original: everything is decayed, static weights and scales included."""
        names = tuple(name for name, _ in self.named_parameters())
        return (ParameterGroup(names, decay=True),) if names else ()

    def cost(self) -> Cost:
        """Generate and mix, and the norms: a mean square and a product, plus one for a learned scale."""
        width, config = self.layout.width, self.config
        flops = 0
        for block, names in self.mixes.items():
            flops += 2 * width * len(names) * (block + 1)
            if config.dynamic:
                flops += 2 * width * self._hidden(block) + (4 if config.scales_generator else 3) * width
            if config.postnorm:
                flops += width * len(names) + (4 * width if "r" in names else 0)
        flops += 4 * width * len(self.pre_scale)
        flops += 3 * width * sum(self._waits(site) for site in self.layout.sites)
        live = max(self._held(site) for site in self.layout.sites)
        parameters = sum(p.numel() for p in self.parameters())
        return Cost(parameters=parameters, flops=flops, reads=sum(b + 1 for b in self.mixes), live=live * width)

    def _waits(self, site: Site) -> bool:
        """Whether ways wait past `site` for its block's attention."""
        attention = self.attention.get(site.block)
        return attention is not None and site.index < attention.index and "q" in self.mixes.get(site.block, ())

    def _held(self, site: Site) -> int:
        """Vectors in the state before `site`."""
        if site.first:
            # the newest slot is the residual itself unless it is normalised
            return 1 + (site.block + self.config.prenorm if self.last_read >= site.block else 0)
        slots = site.block + 1 if self.last_read > site.block else 0
        return 1 + slots + 3 * self._waits(self.layout.sites[site.index - 1])


def _defined_rms(x: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square, for `definition`."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def _rms(x: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square, in float32 at least."""
    wide = widen(x)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
