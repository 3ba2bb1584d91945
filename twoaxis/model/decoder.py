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
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import Watch, apply_sublayer, visit, without_aux
from twoaxis.model.config import ModelConfig
from twoaxis.model.initialise import initialise
from twoaxis.model.sublayers import MLP, Attention, MixerSublayer, Parallel, Rings, SiteNorm, Sublayer, TokenInfo
from twoaxis.ring import Ring
from twoaxis.sequence.rope import make_rope


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


class Block(nn.Module):
    """One block: its sub-layers, each behind its pre-norm. Checkpointing, sharding, compilers and hooks take it.

    The stream is an argument: a model has one, and registers it once.

    Args:
        config: the shape and the methods.
        number: of the block.
        stream: says which ways a site has and whether the model normalises them.
    """

    def __init__(self, config: ModelConfig, number: int, stream: Stream) -> None:
        super().__init__()
        self.number = number
        self.sites = stream.sites_of(number)
        for site in self.sites:
            self.add_module(site.kind, _make_sublayer(config, site, stream.ways(site)))
        normed = [site for site in self.sites if stream.normed(site)]
        norms = {site.kind: SiteNorm(stream.ways(site), config.hidden_size, config.rms_norm_eps) for site in normed}
        self.norms = nn.ModuleDict(norms)

    def forward(
        self,
        stream: Stream,
        state: State,
        past: tuple[tuple[Ring, ...], ...] | None,
        info: TokenInfo,
        watch: Watch | None = None,
    ) -> tuple[State, list[Rings]]:
        """The state after the block, and what its sub-layers remember.

        Args:
            stream: whose state it is.
            state: before the block.
            past: the rings of each sub-layer, or None when nothing is to be remembered.
            info: what sub-layers know of the tokens.
            watch: see `twoaxis.depth.walk.visit`.
        """
        rings: list[Rings] = []

        def act(site: Site, seen: Seen) -> Applied:
            def sublayer(c: Seen) -> Tensor:
                y, ring = self.sublayer(site)(c, None if past is None else past[len(rings)], info)
                rings.append(ring)
                return y

            c = self.norms[site.kind](seen) if site.kind in self.norms else without_aux(seen)
            return apply_sublayer(c, sublayer)

        return visit(stream, state, self.sites, act, watch), rings

    def sublayer(self, site: Site) -> Sublayer:
        """The sub-layer of one of the block's sites."""
        return cast(Sublayer, self._modules[site.kind])


class Trunk(nn.Module):
    """Everything between the embedding and the head: the stream, the blocks, the final norm.

    Args:
        config: the shape and the methods.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.stream = config.make_stream()
        self.blocks = nn.ModuleList(Block(config, number, self.stream) for number in range(config.num_hidden_layers))
        normed = self.stream.normed(self.stream.layout.out)
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if normed else nn.Identity()

    def block(self, number: int) -> Block:
        """One of the blocks."""
        return cast(Block, self.blocks[number])

    def norm(self, site: Site) -> SiteNorm:
        """The pre-norm of `site`, where the stream leaves it to the model."""
        return cast(SiteNorm, self.block(site.block).norms[site.kind])

    def sublayer(self, site: Site) -> Sublayer:
        """The sub-layer of `site`."""
        return self.block(site.block).sublayer(site)

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
        for module in self.blocks:
            block = cast(Block, module)
            before = None if past is None else past.sublayers[len(rings) : len(rings) + len(block.sites)]
            given = (stream, state, before, info, watch)
            state, of_block = block(*given) if recompute is None else recompute(block, *given)
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

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
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


def _make_sublayer(config: ModelConfig, site: Site, ways: tuple[str, ...]) -> Sublayer:
    mixer = config.make_mixer() if config.has_mixer(site.block) else None
    if site.kind == "mixer":
        assert mixer is not None
        return MixerSublayer(mixer.build("site", config.hidden_size))
    if site.kind == "attention":
        return Attention(config, site.block, mixer, separate="q" in ways)
    mlp = MLP(config, site.block, mixer)
    return mlp if site.kind == "mlp" else Parallel(Attention(config, site.block, mixer, separate="q" in ways), mlp)
