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
from torch.utils.checkpoint import checkpoint

from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import Watch, apply_sublayer, visit, without_aux
from twoaxis.model.config import ModelConfig
from twoaxis.model.initialise import initialise
from twoaxis.model.sublayers import (
    MLP,
    Attention,
    MixerSublayer,
    Parallel,
    Rings,
    RMSNorm,
    SiteNorm,
    Sublayer,
    TokenInfo,
)
from twoaxis.ring import Ring
from twoaxis.sequence.rope import make_rope


class Past(NamedTuple):
    """What a decoder remembers of earlier tokens: a value, so that an old one stays valid."""

    seen: int
    """Tokens so far, padding included."""
    stream: tuple[Ring, ...]
    """Of the residual stream; empty for those that do not mix tokens."""
    sublayers: tuple[tuple[Ring, ...], ...]
    """Of each sub-layer, in the order of the sites."""

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

    def nbytes_by_part(self) -> dict[str, int]:
        """Bytes of what grows with the sequence, of local windows and convolutions, and of the residual stream."""
        rings = [ring for of_site in self.sublayers for ring in of_site]
        return {
            "attention": sum(ring.nbytes() for ring in rings if ring.window is None),
            "local": sum(ring.nbytes() for ring in rings if ring.window is not None),
            "stream": sum(ring.nbytes() for ring in self.stream),
        }


NORMS = {"attention": "input_layernorm", "parallel": "input_layernorm", "mlp": "post_attention_layernorm"}
"""Names of the pre-norms of a block's own sites, by kind."""


class Block(nn.Module):
    """One block: its sub-layers, each behind its pre-norm. Checkpointing, sharding, compilers and hooks take it.

    The stream is an argument: a model has one, and registers it once.
    """

    def __init__(self, config: ModelConfig, number: int, stream: Stream) -> None:
        super().__init__()
        self.number = number
        self.sites = stream.sites_of(number)
        mixer = config.make_mixer() if config.has_mixer(number) else None
        for site in self.sites:
            ways, separate = stream.ways(site), "q" in stream.ways(site)
            norm = SiteNorm(ways, config.hidden_size, config.rms_norm_eps) if stream.normed(site) else None
            if site.kind == "mixer":
                assert mixer is not None
                self.mixer = MixerSublayer(mixer.build("site", config.hidden_size), norm)
                continue
            self.add_module(NORMS[site.kind], norm)
            if site.kind != "mlp":
                self.self_attn = Attention(config, number, mixer, separate)
            if site.kind != "attention":
                self.mlp = MLP(config, number, mixer)
            if site.kind == "parallel":
                # in a tuple, which registers nothing: its parameters have their places above
                self.parallel = (Parallel(self.self_attn, self.mlp),)

    def forward(
        self,
        stream: Stream,
        state: State,
        past: tuple[tuple[Ring, ...], ...] | None,
        info: TokenInfo,
        watch: Watch | None = None,
    ) -> tuple[State, list[Rings]]:
        """The state after the block, and what its sub-layers remember; nothing where `past`, their rings, is None."""
        rings: list[Rings] = []

        def act(site: Site, seen: Seen) -> Applied:
            def sublayer(c: Seen) -> Tensor:
                y, ring = self.sublayer(site)(c, None if past is None else past[len(rings)], info)
                rings.append(ring)
                return y

            norm = self.norm(site)
            c = without_aux(seen) if norm is None else norm(seen)
            return apply_sublayer(c, sublayer)

        return visit(stream, state, self.sites, act, watch), rings

    def norm(self, site: Site) -> SiteNorm | None:
        """The pre-norm of one of the block's sites; None where the stream normalises."""
        return self.mixer.norm if site.kind == "mixer" else cast("SiteNorm | None", self._modules[NORMS[site.kind]])

    def sublayer(self, site: Site) -> Sublayer:
        """The sub-layer of one of the block's sites."""
        if site.kind == "parallel":
            return self.parallel[0]
        return {"mixer": lambda: self.mixer, "attention": lambda: self.self_attn, "mlp": lambda: self.mlp}[site.kind]()


def norm_name(site: Site) -> str:
    """What the scale of a site's norm is called in a trunk; there is none where the stream normalises."""
    if site.kind == OUT:
        return "norm.weight"
    return f"layers.{site.block}.{'mixer.norm' if site.kind == 'mixer' else NORMS[site.kind]}.weight"


class Decoder(nn.Module):
    """Tokens to logits. Parameters have the names that the Llama and Qwen families of transformers give them:

        embed_tokens.weight, norm.weight, lm_head.weight                    the last one absent where the head is tied
        layers.N.self_attn.{q,k,v,o}_proj, .{q,k}_norm                      layers.N.mlp.{gate,up,down}_proj
        layers.N.input_layernorm.weight, .norm_{k,v,x}.weight               layers.N.post_attention_layernorm.weight
        layers.N.mixer.{norm,local}, .{self_attn,mlp}.{before,inside}       stream....

    Args:
        config: the shape and the methods.
        seed: of the initial weights; every tensor draws from a generator of its own, named after it, so that two
            decoders of one seed agree on everything they have in common whatever their streams.
    """

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config, self.recompute_every = config, 0
        self.stream = config.make_stream()
        self.layers = nn.ModuleList(Block(config, number, self.stream) for number in range(config.num_hidden_layers))
        normed = self.stream.normed(self.stream.layout.out)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if normed else nn.Identity()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        initialise(self, seed, config.init)

    def block(self, number: int) -> Block:
        """One of the blocks."""
        return cast(Block, self.layers[number])

    def site_norm(self, site: Site) -> SiteNorm | None:
        """The pre-norm of `site`; None where the stream normalises."""
        return self.block(site.block).norm(site)

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
            info: see `info`.
            watch: called at every site with the site, the state and what it reads; at the out site too.
            recompute: runs a block so that its activations are made anew in the backward pass.
        """
        stream, rings = self.stream, []
        state = stream.open(x, () if past is None else past.stream, reach=info.reach, keep=past is not None)
        for module in self.layers:
            block = cast(Block, module)
            before = None if past is None else past.sublayers[len(rings) : len(rings) + len(block.sites)]
            given = (stream, state, before, info, watch)
            state, of_block = block(*given) if recompute is None else recompute(block, *given)
            rings += of_block
        if watch is not None:
            watch(stream.layout.out, state, stream.read(state, stream.layout.out))
        out = self.norm(stream.close(state))
        return out, None if past is None else Past(past.seen + x.shape[1], stream.memory(state), tuple(rings))

    def start(self, spare: int = 0) -> Past:
        """The memory before the first token; up to `spare` tokens can be trimmed later."""
        rings = [Ring(taps, axis=1, spare=spare) for taps in self.stream.memory_windows()]
        return Past(0, tuple(rings), tuple(self.sublayer(site).start(spare) for site in self.stream.sites))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        *,
        reach: Tensor | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        """Logits (B, T, vocabulary) of whole sequences.

        Args:
            input_ids: (B, T) integers.
            position_ids: (B, T) the place of each token in its document, from 0 on; None is one document per row.
            reach: (B, T) how many earlier positions belong to the token's document; see `twoaxis.document_reach` for
                packed documents and `twoaxis.padding_reach` for left padding.
            use_cache: False, as transformers' models are called in training; what remembers is `step`.
        """
        if use_cache:
            raise ValueError("use_cache=True is not offered here: `step` remembers tokens")
        return self.logits(self.hidden(input_ids, reach=position_ids if reach is None else reach))

    def hidden(self, tokens: Tensor, *, reach: Tensor | None = None) -> Tensor:
        """The normalised output (B, T, D), which `logits` takes."""
        recompute = self._recompute if self.recompute_every and self.training else None
        return self.run(self.embed(tokens), None, self.info(tokens, 0, reach), recompute=recompute)[0]

    def step(
        self, tokens: Tensor, past: Past, *, reach: Tensor | None = None, logits_to_keep: int = 0
    ) -> tuple[Tensor, Past]:
        """Logits of the next tokens (B, T), any number of them, and the memory after them.

        Args:
            tokens: integers.
            past: what the tokens before them left; `start` is the beginning.
            reach: as in `forward`.
            logits_to_keep: how many of the last positions get logits; 0 is all of them.
        """
        out, after = self.run(self.embed(tokens), past, self.info(tokens, past.seen, reach))
        assert after is not None
        return self.logits(out[:, -logits_to_keep:]), after

    def activation_checkpointing_enable(self, every_n_layers: int = 1) -> None:
        """Make the activations of every n-th block anew in the backward pass, from the first on."""
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers must be at least 1, got {every_n_layers}")
        self.recompute_every = every_n_layers

    def _recompute(self, block: Block, *given: Any) -> Any:
        return block(*given) if block.number % self.recompute_every else checkpoint(block, *given, use_reentrant=False)

    def info(self, tokens: Tensor, seen: int, reach: Tensor | None, dtype: torch.dtype | None = None) -> TokenInfo:
        """What sub-layers know of the tokens. Only distances count, so positions run through padding and documents."""
        positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        config, dtype = self.config, self.embed_tokens.weight.dtype if dtype is None else dtype
        return TokenInfo(reach, make_rope(positions, config.head_size, config.rope_theta, dtype, config.rope_scaling))

    def embed(self, tokens: Tensor) -> Tensor:
        """(B, T) integers to (B, T, D)."""
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be (batch, time), got {tokens.dim()} dimensions")
        if tokens.is_floating_point():
            raise ValueError(f"tokens must be integers, got {tokens.dtype}")
        return self.embed_tokens(tokens)

    def logits(self, x: Tensor) -> Tensor:
        """The head on the normalised output."""
        return F.linear(x, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """Greedy continuation of (B, T) by `count` tokens."""
        logits, past = self.step(tokens, self.start())
        for _ in range(count):
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
            logits, past = self.step(tokens[:, -1:], past)
        return tokens


Model = Decoder | Any
"""A `Decoder`, or a causal model of transformers that has `make_cache` and a stream."""
