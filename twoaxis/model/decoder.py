"""A small Llama-style decoder around any residual stream.

- RMSNorm before each sub-layer, RoPE, grouped-query attention, SwiGLU, tied head, no biases
- any stream along depth, any local mixer along the sequence, placed per block and site
- attention beside MLP (parallel block) and MUDDFormer's ramp of hidden widths as options
- memory between tokens is a value: any cut of a prompt into chunks gives the numbers of one pass
- the trunk names no method
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoaxis.depth.site import Site
from twoaxis.model.config import DecoderConfig
from twoaxis.model.initialise import initialise
from twoaxis.model.sublayers import MLP, Attention, MixerSublayer, Parallel, SiteNorm, Sublayer
from twoaxis.window import Ring


class Past(NamedTuple):
    """What a decoder remembers of earlier tokens: a value, so that an old one stays valid.

    Attributes:
        stream: the residual stream's rings; empty for streams that do not mix tokens.
        sublayers: the rings of each sub-layer, in the order of the sites.
    """

    stream: tuple[Ring, ...]
    sublayers: tuple[tuple[Ring, ...], ...]

    def _map(self, change: Any) -> Past:
        return Past(tuple(map(change, self.stream)), tuple(tuple(map(change, rings)) for rings in self.sublayers))

    def trim(self, count: int) -> Past:
        """Take back the last `count` tokens; needs `Decoder.start(spare=count)` where a window has moved on."""
        return self._map(lambda ring: ring.trim(count))

    def reorder(self, index: Tensor) -> Past:
        """Rows of the batch in another order, or a selection of them."""
        return self._map(lambda ring: ring.reorder(index))

    def repeat(self, times: int) -> Past:
        """Each row of the batch `times` times."""
        return self._map(lambda ring: ring.repeat(times))

    def nbytes(self) -> int:
        """Bytes held."""
        return sum(ring.nbytes() for rings in (self.stream, *self.sublayers) for ring in rings)


class Decoder(nn.Module):
    """Tokens to logits.

    Args:
        config: the shape and the methods. seed: of the initial weights; every tensor draws from a generator of its
        own, named after it, so that two decoders of one seed agree
            on everything they have in common whatever their streams.
    """

    def __init__(self, config: DecoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.stream = config.make_stream()
        self.blocks = nn.ModuleList(nn.ModuleDict() for _ in range(config.blocks))
        self.norms = nn.ModuleList(nn.ModuleDict() for _ in range(config.blocks))
        for site in self.stream.sites:
            cast(nn.ModuleDict, self.blocks[site.block])[site.kind] = _make_sublayer(
                config, site, self.stream.ways(site)
            )
            norm = SiteNorm(self.stream.ways(site), config.width, config.norm_eps)
            cast(nn.ModuleDict, self.norms[site.block])[site.kind] = norm
        self.final_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        initialise(self, seed)

    def norm(self, site: Site) -> SiteNorm:
        """The pre-norm of `site`."""
        return cast(SiteNorm, cast(nn.ModuleDict, self.norms[site.block])[site.kind])

    def sublayer(self, site: Site) -> Sublayer:
        """The sub-layer of `site`."""
        return cast(Sublayer, cast(nn.ModuleDict, self.blocks[site.block])[site.kind])

    def trunk(self, x: Tensor, past: Past | None, reach: Tensor | None) -> tuple[Tensor, Past | None]:
        """The embedding through every sub-layer; names no method."""
        stream, rings = self.stream, []
        keep = past is not None
        state = stream.open(x, past.stream if keep else (), reach=reach, keep=keep)
        for site in stream.sites:
            seen = stream.read(state, site)
            c = self.norm(site)(seen)
            y, ring = self.sublayer(site)(c, past.sublayers[site.index] if keep else None, reach)
            state = stream.write(state, site, y, seen, c)
            rings.append(ring)
        out = self.final_norm(stream.close(state))
        return out, Past(stream.memory(state), tuple(rings)) if keep else None

    def forward(self, tokens: Tensor, *, reach: Tensor | None = None) -> Tensor:
        """Logits (B, T, vocabulary) of whole sequences.

        Args:
            tokens: (B, T) integers.
            reach: (B, T) how many earlier positions belong to the token's document; see `twoaxis.document_reach` for
                packed documents and `twoaxis.padding_reach` for left padding.
        """
        return self.logits(self.trunk(self.embed(tokens), None, reach)[0])

    def start(self, spare: int = 0) -> Past:
        """The memory before the first token; up to `spare` tokens can be trimmed later."""
        rings = [Ring(taps, axis=1, spare=spare) for taps in self.stream.memory_windows()]
        return Past(tuple(rings), tuple(self.sublayer(site).start(spare) for site in self.stream.sites))

    def step(self, tokens: Tensor, past: Past, *, reach: Tensor | None = None) -> tuple[Tensor, Past]:
        """Logits of the next tokens, any number of them, and the memory after them."""
        out, after = self.trunk(self.embed(tokens), past, reach)
        assert after is not None
        return self.logits(out), after

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) integers to (B, T, D)."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, time), got {tokens.dim()} dimensions")
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
        return Attention(config, mixer, separate="q" in ways)
    mlp = MLP(config, config.hidden_width(site.block), mixer)
    return mlp if site.kind == "mlp" else Parallel(Attention(config, mixer, separate="q" in ways), mlp)
