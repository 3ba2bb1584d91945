"""`graft(model, stream=..., mixer=...)`: a transformers causal LM with a residual stream and mixers of ours.

    backbone....                                             their keys, unchanged behind the prefix
    backbone....layers.N.twoaxis_mixer.{norm,local}....      a mixer at a site of its own
    backbone....layers.N.{self_attn}.twoaxis_before....      a mixer on the input of attention or MLP
    backbone....layers.N.{self_attn}.twoaxis_inside....      a mixer on their first projections
    backbone....layers.N.{input_layernorm}.twoaxis_norm_k    further norms where the stream reads k and v separately
    stream....                                               the stream's parameters

Everything else is the family's: masks, positions, kernels, cache, loss, generation settings.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

from twoaxis.base.plugins import write_origins
from twoaxis.depth.stream import Stream
from twoaxis.model import graft_layers, graft_residual
from twoaxis.model.config import Methods
from twoaxis.model.graft_cache import add_rings, check_packed, find_reach, nbytes_by_part, rings_of, text_positions
from twoaxis.model.graft_config import TwoAxisConfig, as_fields
from twoaxis.model.graft_modules import check_attention, family_model, furnish, narrow_new_, take_norms
from twoaxis.model.graft_residual import Refused, Residual
from twoaxis.model.graft_survey import (
    TOLERANCE,
    announced,
    difference,
    digest,
    examine,
    first_line,
    kind_of,
    prove,
    prove_cached,
    sample,
    survey_of,
)
from twoaxis.model.initialise import family_start, initialise, named_generator
from twoaxis.model.memory import Memory
from twoaxis.model.save import check_keys, write_loader
from twoaxis.sequence.mixer import LocalOperator


def _familys(name: str) -> Any:
    """A method that the family's model has."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.backbone, name)(*args, **kwargs)

    return call


class TwoAxisPreTrainedModel(PreTrainedModel):
    """A family's causal LM whose residual is a stream of ours: `backbone` taken over, or one made of `config`."""

    config_class = TwoAxisConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    # what the family itself supports is decided where the backbone is built
    _supports_sdpa = _supports_flex_attn = _supports_flash_attn = _supports_attention_backend = True
    config: TwoAxisConfig

    def __init__(self, config: TwoAxisConfig, backbone: PreTrainedModel | None = None) -> None:
        super().__init__(config)
        if not isinstance(config.text_config, PreTrainedConfig):
            raise ValueError("text_config must hold a family's configuration, like LlamaConfig(...)")
        wanted, scratch = config.text_config._attn_implementation, backbone is None
        seed = int(torch.randint(0, 2**31, (1,), device="cpu"))  # before anything is built: it depends on no method
        if wanted is not None and "/" in wanted:
            raise ValueError(f"attn_implementation={wanted!r} would fetch code from a hub, which is never done here")
        if backbone is None:
            backbone = family_model(config.text_config)
        check_attention(backbone, wanted)
        if config.survey is None:
            on_meta = any(parameter.is_meta for parameter in backbone.parameters())
            config.survey = (survey_of(config.text_config) if on_meta else examine(backbone)).to_dict()
        self.backbone = backbone
        backbone.config.architectures = [type(backbone).__name__]  # what is built when the folder is opened
        config.text_config = backbone.config  # one object: whoever resizes the vocabulary changes both
        config._attn_implementation_internal = backbone.config._attn_implementation
        found, methods = config.architecture, config.methods()
        layers = graft_layers.attach(backbone, kind_of)
        if len(layers) != len(found.forms):
            raise ValueError(f"survey speaks of {len(found.forms)} layers, the model has {len(layers)}; make it anew")
        self._blocks, self._packs = len(layers), found.packs
        methods.check_blocks(self._blocks)
        self.stream: Stream = config.make_stream()
        own_sites = [len(self.stream.sites_of(b)) - len(form.kinds) for b, form in enumerate(found.forms)]
        self._addends = tuple(
            count for own, form in zip(own_sites, found.forms, strict=True) for count in (1,) * own + form.addends
        )
        self._ways = tuple(self.stream.ways(site) for site in self.stream.layout.sites)
        for block, layer in enumerate(layers):
            furnish(layer, block, found, methods, self.stream, config.norm_eps)
        self._scales = take_norms(backbone, layers, found, self.stream, config.norm_eps)
        self._made_for = [(n, m.window) for n, m in self.local_operators()], self.stream.memory_windows()
        self.mixes_tokens = bool(self._made_for[0] or self._made_for[1])
        accepted = inspect.signature(type(backbone).forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in accepted else "cache_params"
        self._keeps_logits = "logits_to_keep" in accepted
        self.accepts_loss_kwargs = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        self._is_stateful = backbone._is_stateful
        self._can_compile_fullgraph = backbone._can_compile_fullgraph and not self.mixes_tokens
        wide = [name for group in self.stream.parameter_groups() if group.float32 for name in group.names]
        self._keep_in_fp32_modules_strict = {f"stream.{name}" for name in wide}
        self.post_init()
        if scratch and next(backbone.parameters()).device.type != "meta":
            self.initialise_(seed)

    # Building.

    def local_operators(self) -> Iterator[tuple[str, LocalOperator]]:
        """The operators of the mixer, by name."""
        for name, module in self.named_modules():
            if isinstance(module, LocalOperator):
                yield name, module

    def new_parameters(self) -> list[str]:
        """Names of the parameters that no source has: the stream's and the mixers', with a mixer's own pre-norm."""
        ours = ("twoaxis_mixer", "twoaxis_before", "twoaxis_inside")
        names = [name for name, _ in self.named_parameters()]
        return [n for n in names if n.startswith("stream.") or any(part in ours for part in n.split("."))]

    @torch.no_grad()
    def start_(self, seed: int = 0, *, neutral: bool) -> None:
        """Set the new parameters, each from a generator of its own: neutral, which leaves what the model computes alone
        and is the start on pretrained weights, or as the methods' papers have it."""
        like = next(self.backbone.parameters())
        std = getattr(self.config.get_text_config(), "initializer_range", 0.02)
        self.stream.reset_parameters(named_generator(seed, "stream", next(self.stream.parameters(), like)))
        if neutral:
            self.stream.neutral_()
            for index, scale in self._scales.items():
                self.stream.adopt_norm_(self.stream.layout.sites[index], scale)
        for name, local in self.local_operators():
            local.reset_parameters(generator=named_generator(seed, name, next(local.parameters())), std=std)
            if neutral:
                local.neutral_()

    def initialise_(self, seed: int) -> None:
        """Set every parameter as for a training from scratch, with our initial values; see `initialise`."""
        layers, found = graft_layers.find_layers(self.backbone), self.config.architecture.forms
        path = next(name for name, module in self.named_modules() if module is layers)
        ends = {f"{path}.{b}.{name}" for b, form in enumerate(found) for names in form.outputs for name in names}
        initialise(self, seed, self.config.methods().init, outputs=ends, special=family_start(self, seed))

    def init_weights(self) -> None:
        """Nothing is drawn here: the backbone has its numbers, and theirs would overwrite our mixers below it."""
        self.tie_weights(recompute_mapping=False)

    def initialize_weights(self) -> None:
        """After loading: the family's own buffers that no file has."""
        self.backbone.initialize_weights()

    # What is the family's.

    get_input_embeddings = _familys("get_input_embeddings")
    set_input_embeddings = _familys("set_input_embeddings")
    get_output_embeddings = _familys("get_output_embeddings")
    set_output_embeddings = _familys("set_output_embeddings")
    resize_token_embeddings = _familys("resize_token_embeddings")  # the configuration is one object

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        return attn_implementation  # the backbone's own check counts

    def _check_and_adjust_experts_implementation(self, experts_implementation: str | None) -> Any:
        return experts_implementation

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """The family's; refused where its attention would ignore it."""
        check_attention(self.backbone, attn_implementation, now=False)
        self.backbone.set_attn_implementation(attn_implementation, *args, **kwargs)
        self.config._attn_implementation_internal = self.backbone.config._attn_implementation

    def set_experts_implementation(self, experts_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """The family's."""
        self.backbone.set_experts_implementation(experts_implementation, *args, **kwargs)
        self.config._experts_implementation_internal = self.backbone.config._experts_implementation

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Where all ways of switching activation checkpointing on meet: the reentrant kind is refused."""
        for function in (*args[:1], kwargs.get("gradient_checkpointing_func")):
            if enable and getattr(function, "keywords", {}).get("use_reentrant"):
                raise ValueError(graft_layers.REENTRANT)
        super()._set_gradient_checkpointing(enable, *args, **kwargs)

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on in some layer."""
        return any(getattr(layer, "gradient_checkpointing", False) for layer in graft_layers.find_layers(self.backbone))

    # Running.

    def make_cache(self, spare: int = 0) -> Cache:
        """An empty cache, of which mixers and streams can take back `spare` tokens at any time; its
        `activate_past_recording` makes every later token croppable instead."""
        cache = DynamicCache(config=self.config.get_text_config(decoder=True))
        return add_rings(cache, self._blocks, self._made_for, spare) if self.mixes_tokens else cache

    cache_bytes = staticmethod(nbytes_by_part)

    def depth_sources(self) -> tuple[tuple[str, ...], ...]:
        """For every site, the out site last: the names of the sources its depth weights speak of."""
        return tuple(self.stream.sources(site) for site in self.stream.layout.sites)

    def _run(self, module: nn.Module, call: dict[str, Any], output_depth_weights: bool, return_dict: Any) -> Any:
        """`module`, the backbone or its base model, with its additions taken over."""
        given = call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]
        mask, cache = call["attention_mask"], call.pop("past_key_values")
        positions = text_positions(call["position_ids"])
        tokens = call.pop("token_mask", mask)
        if given.is_meta and mask is None:  # families look at numbers to make a mask, and there are none
            seen = 0 if cache is None else cache.get_seq_length()
            shape = (len(given), 1, given.shape[1], seen + given.shape[1])
            call["attention_mask"] = torch.ones(shape, dtype=torch.bool, device="meta")
        cached = call["use_cache"] if cache is None else True
        cached = check_packed(positions, mask, cached, self._packs, type(self.backbone).__name__)
        if cache is None:
            call["use_cache"] = cached
        ring = None
        if self.mixes_tokens:
            wanted = getattr(self.config.get_text_config(), "use_cache", True)
            use = bool(wanted if call["use_cache"] is None else call["use_cache"])
            call["use_cache"] = use = use and not (self.training and self.recomputes)
            if use and cache is None:
                cache = self.make_cache()
            ring = None if cache is None else rings_of(cache, self._blocks, self._made_for)
        memory = None if ring is None else Memory(ring.past)
        reach = (
            find_reach(tokens, positions, given, 0 if ring is None else ring.past.seen) if self.mixes_tokens else None
        )
        weights: dict[int, Tensor | None] | None = {} if output_depth_weights else None
        run = graft_residual.Pass(self.stream, self._addends, self._ways, memory, reach, weights)
        if cache is not None:
            call[self._cache_name] = cache
        with announced(run):
            out = module(**{k: v for k, v in call.items() if v is not None}, return_dict=True)
        if ring is not None and memory is not None:
            ring.past = memory.after(given.shape[1])
        if getattr(out, "hidden_states", None) is not None:  # recorded by hooks on their layers
            out.hidden_states = tuple(h.x if isinstance(h, Residual) else h for h in out.hidden_states)
        if weights is not None:
            out["depth_weights"] = tuple(weights.get(site.index) for site in self.stream.layout.sites)
        wants = self.config.return_dict is not False if return_dict is None else return_dict
        return out if wants else out.to_tuple()

    # Files.

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers, but a missing, unexpected or mis-shaped key is an error that names it."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError(
                "use_safetensors=False is refused: weights come from safetensors only, never from a pickle"
            )
        kwargs |= {"use_safetensors": True, "ignore_mismatched_sizes": True}  # refused below, by name
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        other = {key: (there, here) for key, there, here in info["mismatched_keys"]}
        check_keys("the checkpoint does not fit the model", info["missing_keys"], info["unexpected_keys"], other)
        model.prove_again()
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def prove_again(self) -> None:
        """Where the layers' source is another than when the model was made: compare with the untouched layers anew."""
        found, layers = self.config.architecture, graft_layers.find_layers(self.backbone)
        if found.digest == (now := digest(layers)):
            return
        before = self.backbone(sample(self.backbone), use_cache=False).logits
        exact = prove(self.backbone, found.forms, found.width, before)
        self.config.survey = found._replace(exact=exact, digest=now).to_dict()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the folder also loads with trust_remote_code=True where twoaxis is installed."""
        if (how := getattr(self.backbone, "hf_quantizer", None)) is not None:
            raise ValueError(f"a backbone of {type(how).__name__} is not saved in a graft; load it in full precision")
        done = super().save_pretrained(save_directory, *args, **kwargs)
        if self.should_save_on_this_rank(kwargs.get("is_main_process", True)):
            write_loader(save_directory)
            write_origins(save_directory, self.config.methods().classes)
        return done


class TwoAxisModel(TwoAxisPreTrainedModel):
    """Tokens to hidden states: the family's base model. It has the causal model's keys, so its folders load here."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_depth_weights: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The family's output of its base model; arguments as `TwoAxisForCausalLM.forward`."""
        call = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        call |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache, **kwargs}
        return self._run(self.backbone.base_model, call, output_depth_weights, return_dict)


class TwoAxisForCausalLM(TwoAxisPreTrainedModel, GenerationMixin):
    """A causal language model of any family of transformers, whose residual additions are a stream of ours.

    `AutoModelForCausalLM` opens its folders; `twoaxis.graft` makes one of a model in memory.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_depth_weights: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """The family's output, and the depth weights.

        Args:
            input_ids: (B, T) tokens; or give `inputs_embeds`.
            attention_mask: as the family takes it; (B, earlier + T) where something mixes tokens.
            position_ids: as the family takes them; without a mask, positions that begin anew mark packed documents.
            past_key_values: a cache; from `make_cache` where something mixes tokens.
            inputs_embeds: (B, T, D).
            labels: (B, T) tokens, -100 where none counts; shifted inside.
            use_cache: whether to remember these tokens.
            logits_to_keep: how many of the last positions get logits, or which; 0 is all of them.
            output_depth_weights: adds `depth_weights`: for every site, the out site last, what it reads from which
                source, (B, T, W, S), or None where the stream has no such weights; see `depth_sources`.
            return_dict: False returns a tuple; None is as configured.
            **kwargs: the family's own.
        """
        call = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        call |= {"past_key_values": past_key_values, "inputs_embeds": inputs_embeds, "use_cache": use_cache}
        keeps = isinstance(logits_to_keep, Tensor) or logits_to_keep != 0
        call |= {"labels": labels, "logits_to_keep": logits_to_keep if keeps and self._keeps_logits else None, **kwargs}
        return self._run(self.backbone, call, output_depth_weights, return_dict)

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The family's; a static cache makes it replace the mask that mixers and streams need."""
        if inputs_embeds is not None:
            kwargs["inputs_embeds"] = inputs_embeds
        made = cast(Any, self.backbone).prepare_inputs_for_generation(*args, **kwargs)
        if self.mixes_tokens and made.get("attention_mask") is not kwargs.get("attention_mask"):
            made["token_mask"] = kwargs["attention_mask"]
        return made

    def _prepare_attention_mask_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """The mask of a prompt that came without one; a pad token between others is a token like any other."""
        mask = super()._prepare_attention_mask_for_generation(*args, **kwargs)
        before, after = mask.cummax(-1).values, mask.flip(-1).cummax(-1).values.flip(-1)
        return before * after

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """The family's cache, and rings where something mixes tokens."""
        cast(Any, self.backbone)._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(self._cache_name)
        if made is not None and self.mixes_tokens:
            ring = rings_of(made, self._blocks, self._made_for)
            if generation_config.is_assistant:
                ring.activate_past_recording()

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """The family's: it may take images or sound, which our own signature does not name."""
        ours = inspect.signature(TwoAxisForCausalLM.forward).parameters
        cast(Any, self.backbone)._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k not in ours})

    _supports_default_dynamic_cache = _familys("_supports_default_dynamic_cache")
    # features of images are made before the first pass, and repeated for beams where a row's image tokens stand
    _maybe_prepare_encoder_kwargs_for_generation = _familys("_maybe_prepare_encoder_kwargs_for_generation")
    _expand_inputs_for_generation = _familys("_expand_inputs_for_generation")
    _prepare_position_ids_for_generation = _familys("_prepare_position_ids_for_generation")
    _update_model_kwargs_for_generation = _familys("_update_model_kwargs_for_generation")


@torch.no_grad()
def graft(
    model: PreTrainedModel,
    stream: str | Methods = "standard",
    *,
    mixer: str | None = None,
    placement: str | None = None,
    mixer_blocks: list[int] | None = None,
    blend: bool = False,
    init: str = "paper",
    seed: int = 0,
    start: str = "neutral",
) -> TwoAxisForCausalLM:
    """`model` with its residual replaced by a stream, with mixers, or both; it is taken over, not copied.

    Args:
        model: a causal language model of transformers.
        stream: NAME[:option=value,...], see `twoaxis.stream_names()`; or all methods in one, and nothing else.
        mixer: NAME[:option=value,...]; see `twoaxis.mixer_names()`.
        placement: which blocks and sites use the stream's method, e.g. "8-11/attention".
        mixer_blocks: blocks that have the mixer; None is all of them.
        blend: fade the method in over the plain residual, for methods that have no neutral start.
        init: see `Methods`.
        seed: of the new parameters that start at random.
        start: neutral computes what `model` computes, which is proved; paper starts as the method's paper does.
    """
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or isinstance(model, TwoAxisPreTrainedModel) or not model.can_generate():
        raise ValueError(f"graft takes a causal language model of transformers, got {kind}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise Refused(f"{kind} is an encoder with a decoder; graft takes a causal language model, which has one stack")
    if start not in ("neutral", "paper"):
        raise ValueError(f"start is neutral or paper, got {start!r}")
    spelled: dict[str, Any] = {"stream": stream, "mixer": mixer, "placement": placement, "blend": blend, "init": init}
    spelled["mixer_blocks"] = None if mixer_blocks is None else tuple(mixer_blocks)
    methods = stream if isinstance(stream, Methods) else Methods(**spelled)
    placed = any("forward" in layer.__dict__ for layer in graft_layers.find_layers(model))
    if placed or any(parameter.is_meta for parameter in model.parameters()):
        raise Refused(f"{type(model).__name__} is spread by a device map; graft first, load the saved folder with it")
    tokens, was = sample(model), model.training
    try:
        try:
            before = model.eval()(tokens, use_cache=False).logits
        except Exception as error:  # a family that wants images or sound beside the tokens
            why = f"{type(error).__name__}: {first_line(error)}"
            raise Refused(f"{kind} gives no logits for tokens alone ({why})") from error
        found = examine(model, before)
    finally:
        model.train(was)
    config = TwoAxisConfig(
        # a copy: a live configuration would get this one's choices handed down
        text_config=copy.deepcopy(model.config),
        survey=found.to_dict(),
        **as_fields(methods),
        dtype=model.dtype,
    )
    with torch.random.fork_rng(devices=[]):  # the seed alone decides
        made = TwoAxisForCausalLM(config, model)
    if start == "neutral" and made.stream.neutral not in ("bitwise", "rounding"):
        raise ValueError(
            f"{methods.stream} has no exact neutral start (its class is {made.stream.neutral!r}); blend it"
        )
    made.start_(seed, neutral=start == "neutral")
    narrow_new_(made, model.dtype, tokens.device)
    made.generation_config = copy.deepcopy(model.generation_config)
    if start == "neutral":
        after = made.eval()(tokens, use_cache=False).logits
        apart = difference(after, before)
        if apart > TOLERANCE[before.dtype]:
            where = f"{methods.stream} on {type(model).__name__}"
            raise Refused(f"{where} changes the logits by {apart:.2g} of the largest")
    if any(made.stream.changes_kv(site) for site in made.stream.layout.sites):
        prove_cached(made.eval(), tokens)
    made.train(was)
    return made


for name in ("activation_checkpointing_enable", "activation_checkpointing_disable", "is_activation_checkpointing"):
    if not hasattr(PreTrainedModel, name):  # transformers before 5.23 calls it otherwise
        setattr(TwoAxisPreTrainedModel, name, getattr(PreTrainedModel, name.replace("activation", "gradient")))
AutoConfig.register(TwoAxisConfig.model_type, TwoAxisConfig, exist_ok=True)
AutoModel.register(TwoAxisConfig, TwoAxisModel, exist_ok=True)
AutoModelForCausalLM.register(TwoAxisConfig, TwoAxisForCausalLM, exist_ok=True)
