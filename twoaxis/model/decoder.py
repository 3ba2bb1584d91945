"""A small Llama-style decoder around any residual stream.

- RMSNorm before each sub-layer, RoPE, grouped-query attention, SwiGLU, tied head, no biases
- any stream along depth, any local mixer along the sequence, placed per block and site
- attention beside MLP (parallel block) and MUDDFormer's ramp of hidden widths as options
- memory between tokens is a value: any cut of a prompt into chunks gives the numbers of one pass
- the trunk names no method
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.depth.stream import Seen, State
from twoaxis.model.config import DecoderConfig
from twoaxis.model.initialise import initialise
from twoaxis.model.sublayers import MLP, Attention, MixerSublayer, Parallel, Rings, SiteNorm, Sublayer, TokenInfo
from twoaxis.ring import Ring
from twoaxis.sequence.rope import make_rope

Watch = Callable[[Site, State, Seen], None]
"""Sees what happens at a site."""


class Past(NamedTuple):
    """What a decoder remembers of earlier tokens: a value, so that an old one stays valid.

    Attributes:
        seen: tokens so far, padding included.
        stream: the residual stream's rings; empty for streams that do not mix tokens.
        sublayers: the rings of each sub-layer, in the order of the sites.
    """

    seen: int
    stream: tuple[Ring, ...]
    sublayers: tuple[tuple[Ring, ...], ...]

    def map(self, change: Callable[[Ring], Ring]) -> Past:
        """`change` on every ring."""
        changed = tuple(tuple(change(ring) for ring in rings) for rings in self.sublayers)
        return Past(self.seen, tuple(change(ring) for ring in self.stream), changed)

    def trim(self, count: int) -> Past:
        """Take back the last `count` tokens; needs `start(spare=count)` where a window has moved on."""
        return self.map(lambda ring: ring.trim(count))._replace(seen=self.seen - count)

    def reorder(self, index: Tensor) -> Past:
        """Rows of the batch in another order, or a selection of them."""
        return self.map(lambda ring: ring.reorder(index))

    def repeat(self, times: int) -> Past:
        """Each row of the batch `times` times."""
        return self.map(lambda ring: ring.repeat(times))

    def rings(self) -> Iterator[Ring]:
        """Every ring."""
        for rings in (self.stream, *self.sublayers):
            yield from rings

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(ring.nbytes() for ring in self.rings())


class Trunk(nn.Module):
    """Everything between the embedding and the head: the stream, the sub-layers, their norms, the final norm.

    Args:
        config: the shape and the methods.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.stream = config.make_stream()
        self.blocks = nn.ModuleList(nn.ModuleDict() for _ in range(config.blocks))
        self.norms = nn.ModuleList(nn.ModuleDict() for _ in range(config.blocks))
        for site in self.stream.sites:
            sublayer = _make_sublayer(config, site, self.stream.ways(site))
            cast(nn.ModuleDict, self.blocks[site.block])[site.kind] = sublayer
            norm = SiteNorm(self.stream.ways(site), config.width, config.norm_eps)
            cast(nn.ModuleDict, self.norms[site.block])[site.kind] = norm
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_eps)

    def norm(self, site: Site) -> SiteNorm:
        """The pre-norm of `site`."""
        return cast(SiteNorm, cast(nn.ModuleDict, self.norms[site.block])[site.kind])

    def sublayer(self, site: Site) -> Sublayer:
        """The sub-layer of `site`."""
        return cast(Sublayer, cast(nn.ModuleDict, self.blocks[site.block])[site.kind])

    def block(
        self, number: int, state: State, past: Past | None, info: TokenInfo, watch: Watch | None = None
    ) -> tuple[State, list[Rings]]:
        """One block; names no method."""
        stream, rings = self.stream, []
        for site in stream.sites_of(number):
            seen = stream.read(state, site)
            if watch is not None:
                watch(site, state, seen)
            c = self.norm(site)(seen)
            y, ring = self.sublayer(site)(c, None if past is None else past.sublayers[site.index], info)
            state = stream.write(state, site, y, seen, c)
            rings.append(ring)
        return state, rings

    def run(
        self,
        x: Tensor,
        past: Past | None,
        info: TokenInfo,
        *,
        watch: Watch | None = None,
        recompute: Callable[..., Any] | None = None,
    ) -> tuple[Tensor, Past | None]:
        """The embedding (B, T, D) through every block to the normalised output.

        Args:
            x: the embedding.
            past: what earlier tokens left, or None when nothing is to be remembered.
            info: what sub-layers know of the tokens.
            watch: called at every site with the site, the state and what it reads; at the out site too.
            recompute: runs a block so that its activations are made anew in the backward pass.
        """
        stream, rings = self.stream, []
        state = stream.open(x, () if past is None else past.stream, reach=info.reach, keep=past is not None)
        for number in range(self.config.blocks):
            arguments = (number, state, past, info, watch)
            state, of_block = self.block(*arguments) if recompute is None else recompute(self.block, *arguments)
            rings += of_block
        if watch is not None:
            watch(stream.layout.out, state, stream.read(state, stream.layout.out))
        out = self.final_norm(stream.close(state))
        return out, None if past is None else Past(past.seen + x.shape[1], stream.memory(state), tuple(rings))

    def start(self, spare: int = 0) -> Past:
        """The memory before the first token; up to `spare` tokens can be trimmed later."""
        rings = [Ring(taps, axis=1, spare=spare) for taps in self.stream.memory_windows()]
        return Past(0, tuple(rings), tuple(self.sublayer(site).start(spare) for site in self.stream.sites))


class Decoder(Trunk):
    """Tokens to logits.

    Args:
        config: the shape and the methods.
        seed: of the initial weights; every tensor draws from a generator of its own, named after it, so that two
            decoders of one seed agree on everything they have in common whatever their streams.
    """

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        initialise(self, self.embedding, self.head, seed)

    def forward(self, tokens: Tensor, *, reach: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) of whole sequences.

        Args:
            tokens: (B, T) integers.
            reach: (B, T) how many earlier positions belong to the token's document; see `twoaxis.document_reach` for
                packed documents and `twoaxis.padding_reach` for left padding.
        """
        return self.logits(self.run(self.embed(tokens), None, self.info(tokens, 0, reach))[0])

    def step(self, tokens: Tensor, past: Past, *, reach: Tensor | None = None) -> tuple[Tensor, Past]:
        """Logits of the next tokens, any number of them, and the memory after them."""
        out, after = self.run(self.embed(tokens), past, self.info(tokens, past.seen, reach))
        assert after is not None
        return self.logits(out), after

    def info(self, tokens: Tensor, seen: int, reach: Tensor | None) -> TokenInfo:
        """What sub-layers know of the tokens. Only distances count, so positions run through padding and documents."""
        positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        dtype = self.embedding.weight.dtype
        return TokenInfo(reach, make_rope(positions, self.config.head_size, self.config.rope_theta, dtype))

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) integers to (B, T, D)."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, time), got {tokens.dim()} dimensions")
        if tokens.is_floating_point():
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        return self.embedding(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """The head on the normalised output."""
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Greedy continuation of (B, T) by `count` tokens."""
        logits, past = self.step(tokens, self.start())
        for _ in range(count):
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            logits, past = self.step(tokens[:, -1:], past)
        return tokens


def _make_sublayer(config: DecoderConfig, site: Site, ways: tuple[str, ...]) -> Sublayer:
    mixer = config.make_mixer() if config.has_mixer(site.block) else None
    if site.kind == "mixer":
        assert mixer is not None
        return MixerSublayer(mixer.build("site", config.width))
    if site.kind == "attention":
        return Attention(config, site.block, mixer, separate="q" in ways)
    mlp = MLP(config, site.block, mixer)
    return mlp if site.kind == "mlp" else Parallel(Attention(config, site.block, mixer, separate="q" in ways), mlp)
