"""`TwoAxisModel` and `TwoAxisForCausalLM`: the decoder as an ordinary transformers model.

    model.embed_tokens.weight, lm_head.weight                            one tensor unless configured otherwise
    model.trunk.layers.{block}....                                       the blocks, as in `Decoder`
    model.trunk.stream...., model.trunk.norm.weight                      the residual stream's parameters, its last norm

These keys are stable. A missing or unexpected key in a checkpoint is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.generic import ModelOutput

from twoaxis.depth.site import OUT, Site
from twoaxis.depth.stream import Seen, State
from twoaxis.depth.walk import Watch
from twoaxis.model.decoder import Block, Trunk
from twoaxis.model.hf_cache import TwoAxisCache
from twoaxis.model.hf_config import TwoAxisConfig
from twoaxis.model.hf_folder import write_loader
from twoaxis.model.initialise import initialise, named_generator
from twoaxis.model.sublayers import TokenInfo
from twoaxis.sequence.rope import Rope
from twoaxis.window import document_reach


@dataclass
class TwoAxisOutput(ModelOutput):
    """What the models return.

    Attributes:
        loss: of the next tokens, if labels were given. logits: (B, T, vocabulary), of the causal model.
        last_hidden_state: (B, T, D) after the final norm, of the base model. past_key_values: the cache.
        hidden_states: what each block's first site reads as residual, then the normalised output. depth_weights: for
        every site, the out site last, what it reads from which source: (B, T, W, S), or None where the
            stream has no such weights; `model.depth_sources()` names the sources.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth_weights: tuple[Tensor | None, ...] | None = None


class TwoAxisPreTrainedModel(PreTrainedModel):
    """What both classes share: initialisation, strict loading, folders that load without an import."""

    config_class = TwoAxisConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = []  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _left_out: ClassVar[frozenset[str]] = frozenset()
    config: TwoAxisConfig

    def _init_weights(self, module: nn.Module) -> None:
        """Everything at once, when the base model or the head comes by; loaded weights are left alone."""
        if isinstance(module, LlamaRotaryEmbedding):
            super()._init_weights(module)
        elif isinstance(module, TwoAxisModel):
            if not all(getattr(p, "_is_hf_initialized", False) for p in module.parameters()):
                initialise(module, module.init_seed, cast(Any, self.config.init))
        elif isinstance(module, TwoAxisForCausalLM):
            weight = module.lm_head.weight
            if not self.config.tie_word_embeddings and not getattr(weight, "_is_hf_initialized", False):
                generator = named_generator(module.model.init_seed, "lm_head.weight", weight)
                weight.normal_(0.0, self.config.initializer_range, generator=generator)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Never as custom code, for which transformers passes over modules without parameters of their own."""
        super()._initialize_weights(module, False)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a missing, unexpected or mis-shaped key is an error that names it."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "use_safetensors=False is refused: weights come from safetensors only, never from a pickle"
            )
        kwargs["use_safetensors"] = True
        kwargs["ignore_mismatched_sizes"] = True  # refused below, by name: transformers' own error names nothing
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        faults = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(set(info["unexpected_keys"]) - cls._left_out),
            "of another shape": sorted(
                f"{key} {tuple(there)}, the model has {tuple(here)}" for key, there, here in info["mismatched_keys"]
            ),
        }
        found = [f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys]
        if found:
            raise ValueError(f"the checkpoint does not fit the model; {'; '.join(found)}")
        return (model, info) if output_loading_info else model

    def _wants_dict(self, asked: bool | None) -> bool:
        return self.config.return_dict is not False if asked is None else asked

    def gradient_checkpointing_enable(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, every_n_layers: int = 1, **kwargs: Any
    ) -> None:
        """As in transformers: blocks are run anew in the backward pass, every one or every n-th.

        The reentrant form sees tensors only, and a stream's state is a nested value: it would lose gradients silently.
        """
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError(
                "use_reentrant=True would lose the gradients of a stream's state; leave it out or set False"
            )
        if every_n_layers < 1:
            raise ValueError(f"every_n_layers must be at least 1, got {every_n_layers}")
        given = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        super().gradient_checkpointing_enable(given, every_n_layers=every_n_layers, **kwargs)
        for module in self.modules():
            if isinstance(module, TwoAxisModel):
                module.recompute_every = every_n_layers

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the folder also loads with trust_remote_code=True where twoaxis is installed."""
        done = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_loader(save_directory)
        return done


class TwoAxisModel(TwoAxisPreTrainedModel):
    """Tokens to normalised hidden states.

    Args:
        config: the shape and the methods.
    """

    _left_out = frozenset({"lm_head.weight"})  # of a causal model's folder

    def __init__(self, config: TwoAxisConfig) -> None:
        super().__init__(config)
        self.init_seed = _seed()  # before anything is built, so that it does not depend on what is
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.trunk = Trunk(config.decoder_config())
        self.rotary = LlamaRotaryEmbedding(cast(Any, config))
        self.gradient_checkpointing = False
        self.recompute_every = 1
        wide = [name for group in self.trunk.stream.parameter_groups() if group.float32 for name in group.names]
        self._keep_in_fp32_modules_strict = {f"trunk.stream.{name}" for name in wide}
        self.post_init()

    def make_cache(self, spare: int = 0) -> TwoAxisCache:
        """An empty cache; up to `spare` tokens can be cropped at any time."""
        return TwoAxisCache(self.trunk, spare)

    def depth_sources(self) -> tuple[tuple[str, ...], ...]:
        """For every site, the out site last: the names of the sources its depth weights speak of."""
        return tuple(self.trunk.stream.sources(site) for site in self.trunk.stream.layout.sites)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool = False,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TwoAxisOutput | tuple[Any, ...]:
        """Run the trunk.

        Args:
            input_ids: (B, T) tokens; or give `inputs_embeds`.
            attention_mask: (B, earlier + T), zero where padding stands, on the left or on the right.
            position_ids: (T,) or (B, T); without a mask, positions that do not run on mark packed documents, and in
                a later chunk they count the tokens of the document that goes on.
            past_key_values: a cache from `make_cache`.
            inputs_embeds: (B, T, D).
            use_cache: whether to remember these tokens.
            output_hidden_states: see `TwoAxisOutput`.
            output_depth_weights: see `TwoAxisOutput`.
            output_attentions: not offered.
            return_dict: False returns a tuple; None is as configured.
            **kwargs: what transformers passes along and this model does not need.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if output_attentions:
            raise ValueError("this model does not return attention weights; see output_depth_weights")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        recompute = self._recompute()
        if recompute is not None:
            use_cache = False
        cache = self._cache(past_key_values, bool(use_cache), x.shape[0])
        info = self._token_info(x, attention_mask, position_ids, cache)
        hidden: list[Tensor] = []
        weights: list[Tensor | None] = []
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        watch = self._watch(hidden if output_hidden_states else None, weights if output_depth_weights else None)
        past = None if cache is None else cache.past
        out, after = self.trunk.run(x, past, info, watch=watch, recompute=recompute)
        if cache is not None:
            assert after is not None
            cache.past = after
        output = TwoAxisOutput(
            last_hidden_state=out,
            past_key_values=cache,
            hidden_states=(*hidden, out) if output_hidden_states else None,
            depth_weights=tuple(weights) if output_depth_weights else None,
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()

    def _recompute(self) -> Callable[..., Any] | None:
        """Activation checkpointing of blocks, if it is on."""
        if not (self.gradient_checkpointing and self.training):
            return None
        checkpoint, every = cast(Callable[..., Any], self._gradient_checkpointing_func), self.recompute_every

        def recompute(block: Block, *given: Any) -> Any:
            return block(*given) if block.number % every else checkpoint(block, *given)

        return recompute

    def _cache(self, given: Cache | None, use_cache: bool, rows: int) -> TwoAxisCache | None:
        if given is None:
            return self.make_cache() if use_cache else None
        if not isinstance(given, TwoAxisCache):
            raise ValueError(
                f"past_key_values must be a TwoAxisCache from model.make_cache(), got {type(given).__name__}"
            )
        if given.made_for is not self.trunk.config and given.made_for != self.trunk.config:
            raise ValueError("this cache was made for another model; use this model's make_cache()")
        if given.batch_size not in (-1, rows):
            raise ValueError(f"the cache holds {given.batch_size} rows, the tokens have {rows}")
        return given

    def _token_info(
        self, x: Tensor, mask: Tensor | None, positions: Tensor | None, cache: TwoAxisCache | None
    ) -> TokenInfo:
        seen = 0 if cache is None else cache.past.seen
        running = torch.arange(seen, seen + x.shape[1], device=x.device).unsqueeze(0)
        reach = None
        if mask is not None:
            reach = _mask_reach(mask, seen, x.shape[1])
        elif positions is not None and not _equal(positions, running):
            reach = _position_reach(positions.view(-1, positions.shape[-1]), seen).expand(x.shape[0], -1)
        positions = running if positions is None else positions.view(-1, positions.shape[-1])
        cos, sin = self.rotary(x, positions)
        half = cos.shape[-1] // 2
        fused = self.config._attn_implementation != "eager"
        return TokenInfo(reach, Rope(cos[..., None, :half], sin[..., None, :half]), fused)

    def _watch(self, hidden: list[Tensor] | None, weights: list[Tensor | None] | None) -> Watch | None:
        if hidden is None and weights is None:
            return None

        def watch(site: Site, state: State, seen: Seen) -> None:
            if hidden is not None and site.first and site.kind != OUT:
                hidden.append(seen.x)
            if weights is not None:
                weights.append(self.trunk.stream.weights(state, site))

        return watch


class TwoAxisForCausalLM(TwoAxisPreTrainedModel, GenerationMixin):
    """The language model.

    Args:
        config: the shape and the methods.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: TwoAxisConfig) -> None:
        super().__init__(config)
        self.model = TwoAxisModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def make_cache(self, spare: int = 0) -> TwoAxisCache:
        """An empty cache; up to `spare` tokens can be cropped at any time."""
        return self.model.make_cache(spare)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_depth_weights: bool = False,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> TwoAxisOutput | tuple[Any, ...]:
        """Logits, and the loss if labels are given.

        Args:
            input_ids: (B, T) tokens; or give `inputs_embeds`.
            attention_mask: see `TwoAxisModel.forward`.
            position_ids: see `TwoAxisModel.forward`.
            past_key_values: a cache from `make_cache`.
            inputs_embeds: (B, T, D).
            labels: (B, T) tokens, -100 where none counts; shifted inside.
            use_cache: whether to remember these tokens.
            output_hidden_states: see `TwoAxisOutput`.
            output_depth_weights: see `TwoAxisOutput`.
            logits_to_keep: how many of the last positions get logits, or which; 0 is all of them.
            return_dict: False returns a tuple; None is as configured.
            **kwargs: passed to the loss and the base model.
        """
        base = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_depth_weights=output_depth_weights,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if isinstance(logits_to_keep, int) and logits_to_keep == 0:
            kept = slice(None)
        logits = self.lm_head(base.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = TwoAxisOutput(
            loss=loss,
            logits=logits,
            past_key_values=base.past_key_values,
            hidden_states=base.hidden_states,
            depth_weights=base.depth_weights,
        )
        return output if self._wants_dict(return_dict) else output.to_tuple()

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Our own cache, whatever the strategy."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is not offered: a two-axis model has "
                "a cache of its own; leave it out"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None:
            if not isinstance(given, TwoAxisCache):
                raise ValueError(f"past_key_values must come from model.make_cache(), got {type(given).__name__}")
            given._is_user_defined = True  # type: ignore[attr-defined]
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = self.make_cache()
            if generation_config.is_assistant:
                cache.activate_past_recording()  # its drafts will be taken back


HOLE = "attention_mask has a hole: padding may stand on the left or on the right, not inside a row"


def _seed() -> int:
    """A seed from torch's global generator, so that `torch.manual_seed` decides the initial weights."""
    return int(torch.randint(0, 2**31, (1,), device="cpu"))


def _equal(positions: Tensor, running: Tensor) -> bool:
    """Whether positions simply run on; not assumed while compiling, where numbers are not known."""
    if torch.compiler.is_compiling():
        return False
    return bool((positions == running).all())


def _position_reach(positions: Tensor, seen: int) -> Tensor:
    """How many earlier tokens belong to each token's document, (1 or B, T), where positions tell documents apart."""
    starts = F.pad(positions.diff(dim=-1) != 1, (1, 0))
    document = starts.cumsum(-1)
    reach = document_reach(document)
    if seen == 0:
        return reach
    # the document that an earlier chunk began reaches back as far as its own positions say
    return torch.where(document == 0, positions.clamp_min(0), reach)


def _mask_reach(mask: Tensor, seen: int, length: int) -> Tensor | None:
    """How many real tokens stand before each of the last `length`; None where nothing is padded."""
    if mask.dim() != 2:
        raise ValueError(f"attention_mask must be (batch, earlier + time), got {mask.dim()} dimensions")
    if mask.shape[1] != seen + length:
        raise ValueError(
            f"attention_mask covers {mask.shape[1]} positions; {seen} earlier ones and {length} new ones are there"
        )
    real = (mask != 0).to(torch.long)
    hole = (F.pad(real, (1, 0)).diff(dim=-1) == 1).sum(-1).gt(1).any()
    if torch.compiler.is_compiling():
        torch._assert_async(~hole, HOLE)  # pyright: ignore[reportPrivateImportUsage]
    elif bool(real.all()):
        return None
    elif bool(hole):
        raise ValueError(HOLE)
    return (real.cumsum(-1) - 1).clamp_min(0)[:, -length:]


AutoConfig.register("twoaxis", TwoAxisConfig, exist_ok=True)
AutoModel.register(TwoAxisConfig, TwoAxisModel, exist_ok=True)
AutoModelForCausalLM.register(TwoAxisConfig, TwoAxisForCausalLM, exist_ok=True)
