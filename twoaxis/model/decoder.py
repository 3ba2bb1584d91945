"""A small Llama-style decoder around any residual stream.

- RMSNorm before each sub-layer, RoPE, grouped-query attention, SwiGLU, tied head, no biases
- any stream along depth, any local mixer along the sequence, placed per block and site
- attention beside MLP (parallel block) and MUDDFormer's ramp of hidden widths as options
- memory between tokens is a value: any cut of a prompt into chunks gives the numbers of one pass
- the trunk names no method
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Applied, Seen, State, Stream
from twoaxis.depth.walk import Watch, apply_sublayer, visit, without_aux
from twoaxis.model.config import ModelConfig
from twoaxis.model.initialise import initialise
from twoaxis.model.memory import Memory, Past, close_stream, open_stream
from twoaxis.model.sublayers import MLP, Attention, MixerSublayer, Parallel, RMSNorm, SiteNorm, TokenInfo
from twoaxis.sequence.rope import make_rope

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
                self.mixer = MixerSublayer(number, mixer.build("site", config.hidden_size), norm)
                continue
            self.add_module(NORMS[site.kind], norm)
            if site.kind != "mlp":
                self.self_attn = Attention(config, number, mixer, separate)
            if site.kind != "attention":
                self.mlp = MLP(config, number, mixer)
            if site.kind == "parallel":
                # in a tuple, which registers nothing: its parameters have their places above
                self.parallel = (Parallel(self.self_attn, self.mlp),)

    def forward(self, stream: Stream, state: State, info: TokenInfo, watch: Watch | None = None) -> State:
        """The state after the block."""

        def act(site: Site, seen: Seen) -> Applied:
            norm = self.norm(site)
            c = without_aux(seen) if norm is None else norm(seen)
            return apply_sublayer(c, lambda c: self.sublayer(site)(c, info))

        return visit(stream, state, self.sites, act, watch)

    def norm(self, site: Site) -> SiteNorm | None:
        """The pre-norm of one of the block's sites; None where the stream normalises."""
        return self.mixer.norm if site.kind == "mixer" else cast("SiteNorm | None", self._modules[NORMS[site.kind]])

    def sublayer(self, site: Site) -> nn.Module:
        """The sub-layer of one of the block's sites."""
        if site.kind == "parallel":
            return self.parallel[0]
        return getattr(self, "self_attn" if site.kind == "attention" else site.kind)


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

    def sublayer(self, site: Site) -> nn.Module:
        """The sub-layer of `site`."""
        return self.block(site.block).sublayer(site)

    def run(
        self, x: Tensor, info: TokenInfo, *, watch: Watch | None = None, recompute: Callable[..., Any] | None = None
    ) -> Tensor:
        """The embedding (B, T, D) through every block to the normalised output.

        Args:
            x: the embedding.
            info: see `info`; its memory is replaced ring by ring.
            watch: called at every site with the site, the state and what it reads; at the out site too.
            recompute: runs a block so that its activations are made anew in the backward pass.
        """
        stream, out = self.stream, self.stream.layout.out
        state = open_stream(stream, x, info.memory, info.reach)
        for block in self.layers:
            given = (stream, state, info, watch)
            state = block(*given) if recompute is None else recompute(block, *given)
        if watch is not None:
            watch(out, state, stream.read(state, out))
        close_stream(stream, state, info.memory)
        return self.norm(stream.close(state))

    def start(self, spare: int = 0) -> Past:
        """The memory before the first token; up to `spare` tokens can be trimmed later."""
        return Past(spare=spare)

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
        return self.run(self.embed(tokens), self.info(tokens, reach=reach), recompute=recompute)

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
        info = self.info(tokens, past, reach)
        out = self.run(self.embed(tokens), info)
        assert info.memory is not None
        return self.logits(out[:, -logits_to_keep:]), info.memory.after(tokens.shape[1])

    def activation_checkpointing_enable(self, every_n_layers: int = 1) -> None:
        """Make the activations of every n-th block anew in the backward pass, from the first on."""
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers must be at least 1, got {every_n_layers}")
        self.recompute_every = every_n_layers

    def _recompute(self, block: Block, *given: Any) -> Any:
        return block(*given) if block.number % self.recompute_every else checkpoint(block, *given, use_reentrant=False)

    def info(
        self, tokens: Tensor, past: Past | None = None, reach: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> TokenInfo:
        """What sub-layers know of the tokens after `past`; None remembers nothing.

        Only distances count, so positions run through padding and documents.
        """
        seen = 0 if past is None else past.seen
        positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        config, dtype = self.config, self.embed_tokens.weight.dtype if dtype is None else dtype
        rope = make_rope(positions, config.head_size, config.rope_theta, dtype, config.rope_scaling)
        return TokenInfo(reach, rope, None if past is None else Memory(past))

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
