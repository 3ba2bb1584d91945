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
import torch.nn.functional as F
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

from twoaxis.depth.stream import Stream
from twoaxis.model import joins
from twoaxis.model.cache import RingLayer, add_rings, nbytes_by_part, ring_layer
from twoaxis.model.config import Methods
from twoaxis.model.graft_config import TwoAxisConfig, as_fields
from twoaxis.model.initialise import initialise, named_generator
from twoaxis.model.joins import Refused, Residual
from twoaxis.model.loader import write_loader
from twoaxis.model.survey import (
    PROJECTIONS,
    TOLERANCE,
    Branch,
    announced,
    difference,
    digest,
    examine,
    kind_of,
    prove,
    sample,
)
from twoaxis.sequence.mixer import LocalOperator
from twoaxis.window import document_reach

HOLE = "attention_mask has a hole: padding may stand on the left or on the right, not inside a row"
POINTS = {"attention": ("attention", "before"), "qkv": ("attention", "inside")}
POINTS |= {"mlp": ("mlp", "before"), "hidden": ("mlp", "inside")}
"""Points of a mixer: the sub-layer, and where in it."""


class TwoAxisPreTrainedModel(PreTrainedModel):
    """A family's causal LM whose residual is a stream of ours.

    Args:
        config: the family's configuration, the methods and what the survey found.
        backbone: the family's model to take over; None makes one of the configuration.
    """

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
            backbone = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config.text_config))
        check_attention(backbone, wanted)
        if config.survey is None:
            config.survey = examine(backbone).to_dict()
        self.backbone = backbone
        config.text_config = backbone.config  # one object: whoever resizes the vocabulary changes both
        config._attn_implementation_internal = backbone.config._attn_implementation
        found, methods = config.architecture, config.methods()
        layers = joins.attach(backbone, kind_of)
        if len(layers) != len(found.forms):
            raise ValueError(f"survey speaks of {len(found.forms)} layers, the model has {len(layers)}; make it anew")
        methods.check_blocks(len(layers))
        kinds = methods.with_mixer([form.kinds for form in found.forms])
        self.stream: Stream = methods.make_stream(width=found.width, kinds=kinds)
        self._addends = tuple(
            count
            for form, sites in zip(found.forms, kinds, strict=True)
            for count in (1,) * (len(sites) - len(form.kinds)) + form.addends
        )
        if not all(self.stream.normed(site) for site in self.stream.layout.sites):
            raise ValueError(
                f"{self.stream.name} normalises its own reads, and the layers of {type(backbone).__name__} normalise "
                "them again; train it in a Decoder, or choose another stream"
            )
        self._ways = tuple(self.stream.ways(site) for site in self.stream.layout.sites)
        for block, layer in enumerate(layers):
            self._furnish(block, layer)
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

    def _furnish(self, block: int, layer: nn.Module) -> None:
        """Put mixers and further norms into a layer, or say by name why they have no place there."""
        form, methods = self.config.architecture.forms[block], self.config.methods()
        made = methods.make_mixer() if methods.has_mixer(block) else None
        width, where = self.config.architecture.width, type(layer).__name__
        for point in () if made is None else made.points:
            assert made is not None
            if point == "site":
                eps = getattr(self.config.get_text_config(), "rms_norm_eps", 1e-6)
                layer.twoaxis_mixer = joins.MixerSite(f"{block}", made.build(point, width), width, eps)
                continue
            kind, place = POINTS[point]
            branch = _branch(form, kind, where, f"the mixer's point {point!r}")
            channels = width
            if place == "inside":
                channels = self._project(layer, branch, kind, where, point)
            sublayer = layer.get_submodule(branch.child)
            sublayer.add_module(f"twoaxis_{place}", made.build(point, width, channels))
            self._wrap(layer, branch)
        for site in self.stream.sites_of(block):
            if "k" in (ways := self._ways[site.index]):
                branch = _branch(form, "attention", where, f"{methods.stream}'s separate ways")
                self._project(layer, branch, "ways", where, f"{methods.stream}'s separate ways")
                self._wrap(layer, branch)
                self._copy_norm(layer, branch, ways[1:])

    def _project(self, layer: nn.Module, branch: Branch, kind: str, where: str, what: str) -> int:
        """Note which projections of a sub-layer are acted on, and how many channels they have."""
        found = dict(branch.projections)
        if kind == "mlp":
            sublayer = layer.get_submodule(branch.child)
            inner = {getattr(m, "in_features", None) for n, m in sublayer.named_children() if n not in found}
            found = {n: c for n, c in found.items() if c in inner or c / 2 in inner or not inner - {None}}
        else:
            by_way = [[n for n in found if pattern.search(n)] for pattern in PROJECTIONS]
            if all(len(names) == 1 for names in by_way):
                found = {n: found[n] for (n,) in by_way}
            elif kind == "ways" or len(found) != 1:
                found = {}
        if not found:
            shape = "fused or latent" if kind != "mlp" else "inside experts"
            raise Refused(f"{where}: {branch.child} has no projections of its own for {what}: they are {shape}")
        sublayer = layer.get_submodule(branch.child)
        object.__setattr__(sublayer, "joint", cast(Any, sublayer).joint._replace(projections=tuple(found)))
        return sum(found.values())

    def _wrap(self, layer: nn.Module, branch: Branch) -> None:
        if branch.norm:
            norm: Any = layer.get_submodule(branch.norm)
            object.__setattr__(norm, "joint", norm.joint._replace(wraps=True))

    def _copy_norm(self, layer: nn.Module, branch: Branch, ways: tuple[str, ...]) -> None:
        """One copy more of the attention's pre-norm for every way but the first; none where there is no pre-norm."""
        if not branch.norm:
            return
        norm = layer.get_submodule(branch.norm)
        for way in ways:
            plain = copy.deepcopy(norm)
            plain.__class__ = joins.original_class(norm)
            del plain.joint
            for name in [n for n in plain._modules if n.startswith("twoaxis_")]:
                del plain._modules[name]
            norm.add_module(f"twoaxis_norm_{way}", plain)

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
        """Set the new parameters, each from a generator of its own; neutral ones leave what the model computes alone.

        Args:
            seed: of those that start at random.
            neutral: the start on pretrained weights; otherwise as the methods' papers have it.
        """
        like = next(self.backbone.parameters())
        std = getattr(self.config.get_text_config(), "initializer_range", 0.02)
        self.stream.reset_parameters(named_generator(seed, "stream", next(self.stream.parameters(), like)))
        if neutral:
            self.stream.neutral_()
        for name, local in self.local_operators():
            local.reset_parameters(std, named_generator(seed, name, next(local.parameters())))
            if neutral:
                local.neutral_()

    def initialise_(self, seed: int) -> None:
        """Set every parameter as for a training from scratch, with our initial values; see `initialise`.

        Args:
            seed: of all of them; models of one seed share what they have in common.
        """
        layers, found = joins.find_layers(self.backbone), self.config.architecture.forms
        path = next(name for name, module in self.named_modules() if module is layers)
        ends = {f"{path}.{b}.{name}" for b, form in enumerate(found) for names in form.outputs for name in names}
        initialise(self, seed, self.config.methods().init, outputs=ends)

    def init_weights(self) -> None:
        """Nothing is drawn here: the backbone has its numbers, and theirs would overwrite our mixers below it."""
        self.tie_weights(recompute_mapping=False)

    def initialize_weights(self) -> None:
        """After loading: the family's own buffers that no file has."""
        self.backbone.initialize_weights()

    # What is the family's.

    def get_input_embeddings(self) -> nn.Module:
        """The family's."""
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """The family's."""
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The family's."""
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """The family's."""
        self.backbone.set_output_embeddings(new_embeddings)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """As the family does it; the configuration is one object."""
        return self.backbone.resize_token_embeddings(*args, **kwargs)

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

    def gradient_checkpointing_enable(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """As in transformers, for the kind that is not reentrant."""
        given = {"use_reentrant": False, **(gradient_checkpointing_kwargs or {})}
        if given["use_reentrant"]:
            raise ValueError(joins.REENTRANT)
        super().gradient_checkpointing_enable(given, **kwargs)

    # Running.

    def make_cache(self, spare: int = 0) -> Cache:
        """An empty cache.

        Args:
            spare: tokens that mixers and streams can take back at any time; `activate_past_recording` makes every later
                token croppable instead.
        """
        return self._with_rings(DynamicCache(config=self.config.get_text_config(decoder=True)), spare)

    def cache_bytes(self, cache: Cache) -> dict[str, int]:
        """Bytes of a cache: what the family keeps (backbone), the mixer's rings and the stream's."""
        return nbytes_by_part(cache)

    def _with_rings(self, cache: Cache, spare: int = 0) -> Cache:
        if not self.mixes_tokens or ring_layer(cache) is not None:
            return cache
        return add_rings(cache, len(self.config.architecture.forms), self._made_for, spare)

    def depth_sources(self) -> tuple[tuple[str, ...], ...]:
        """For every site, the out site last: the names of the sources its depth weights speak of."""
        return tuple(self.stream.sources(site) for site in self.stream.layout.sites)

    def _run(self, module: nn.Module, call: dict[str, Any], output_depth_weights: bool, return_dict: Any) -> Any:
        """`module`, the backbone or its base model, with its additions taken over."""
        given = call["input_ids"] if call.get("inputs_embeds") is None else call["inputs_embeds"]
        mask, positions, cache = call["attention_mask"], call["position_ids"], call.pop("past_key_values")
        tokens = call.pop("token_mask", mask)
        if call["use_cache"] is None and positions is not None and mask is None and cache is None:
            call["use_cache"] = False  # a cache keeps families from telling packed documents apart
        self._check_packed(positions, mask, cache is not None or bool(call["use_cache"]))
        ring = None
        if self.mixes_tokens:
            wanted = getattr(self.config.get_text_config(), "use_cache", True)
            use = bool(wanted if call["use_cache"] is None else call["use_cache"])
            call["use_cache"] = use = use and not (self.training and self.is_gradient_checkpointing)
            if use and cache is None:
                cache = self.make_cache()
            ring = None if cache is None else self._ring(cache)
        reach = self._reach(tokens, positions, given, 0 if ring is None else ring.seen) if self.mixes_tokens else None
        weights: dict[int, Tensor | None] | None = {} if output_depth_weights else None
        memory, spare = (None, 0) if ring is None else (dict(ring.rings), ring.kept)
        run = joins.Pass(self.stream, self._addends, self._ways, memory, reach, spare, weights)
        if cache is not None:
            call[self._cache_name] = cache
        with announced(run):
            out = module(**{k: v for k, v in call.items() if v is not None}, return_dict=True)
        if ring is not None:
            assert run.memory is not None
            ring.rings, ring.seen = run.memory, ring.seen + given.shape[1]
        if getattr(out, "hidden_states", None) is not None:  # recorded by hooks on their layers
            out.hidden_states = tuple(h.x if isinstance(h, Residual) else h for h in out.hidden_states)
        if weights is not None:
            out["depth_weights"] = tuple(weights.get(site.index) for site in self.stream.layout.sites)
        wants = self.config.return_dict is not False if return_dict is None else return_dict
        return out if wants else out.to_tuple()

    def _ring(self, cache: Cache) -> RingLayer:
        """The layer of a cache that holds rings; a cache that was filled without them is refused."""
        ring = ring_layer(cache)
        if ring is None:
            if cache.get_seq_length():
                raise ValueError(
                    "this cache was filled by another model: it has no rings; use this model's make_cache()"
                )
            self._with_rings(cache)
            return self._ring(cache)
        if ring.made_for != self._made_for:
            raise ValueError("this cache was made for another model; use this model's make_cache()")
        return ring

    def _check_packed(self, positions: Tensor | None, mask: Any, cached: bool) -> None:
        """Refuse packed documents where they would see each other."""
        if positions is None or mask is not None or positions.shape[-1] < 2 or torch.compiler.is_compiling():
            return
        if self.config.architecture.packs and not cached:
            return
        if bool((positions.diff(dim=-1) != 1).any()):
            why = "with a cache" if self.config.architecture.packs else f"in {type(self.backbone).__name__}"
            raise ValueError(
                f"packed documents (positions that begin anew) would see each other {why}; give them apart"
            )

    def _reach(self, mask: Any, positions: Tensor | None, given: Tensor, seen: int) -> Tensor | None:
        """How many earlier tokens belong to each token's document, (B, T); None is all of them."""
        rows, length = given.shape[:2]
        if mask is None:
            return None if positions is None else position_reach(positions.reshape(-1, length)[-rows:], seen)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != seen + length:
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be (batch, {seen} earlier + {length}) where tokens are mixed, got {got}"
            )
        real = (mask != 0).long()
        hole = (F.pad(real, (1, 0)).diff(dim=-1) == 1).sum(-1).gt(1).any()
        if mask.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(~hole, HOLE)  # pyright: ignore[reportPrivateImportUsage]
        elif bool(hole):
            raise ValueError(HOLE)
        return (real.cumsum(-1) - 1).clamp_min(0)[:, -length:]

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
        faults = {
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
            "of another shape": sorted(
                f"{key} {tuple(there)}, the model has {tuple(here)}" for key, there, here in info["mismatched_keys"]
            ),
        }
        if found := [f"{what}: {', '.join(keys)}" for what, keys in faults.items() if keys]:
            raise ValueError(f"the checkpoint does not fit the model; {'; '.join(found)}")
        model.prove_again()
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def prove_again(self) -> None:
        """Where the layers' source is another than when the model was made: compare with the untouched layers anew."""
        found, layers = self.config.architecture, joins.find_layers(self.backbone)
        if found.digest == (now := digest(layers)):
            return
        before = self.backbone(sample(self.backbone), use_cache=False).logits
        exact = prove(self.backbone, found.forms, found.width, before)
        self.config.survey = found._replace(exact=exact, digest=now).to_dict()

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; the folder also loads with trust_remote_code=True where twoaxis is installed."""
        done = super().save_pretrained(save_directory, *args, **kwargs)
        if kwargs.get("is_main_process", True):
            write_loader(save_directory)
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
    """The language model."""

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
            ring = self._ring(made)
            if generation_config.is_assistant:
                ring.activate_past_recording()

    def _supports_default_dynamic_cache(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return cast(Any, self.backbone)._supports_default_dynamic_cache()


def _branch(form: Any, kind: str, where: str, what: str) -> Branch:
    branch: Branch | None = getattr(form, kind)
    if branch is None:
        raise Refused(f"{where} has no {kind} module of its own for {what}")
    if branch.norm is None:
        raise Refused(f"{where}: something stands between the norm and {branch.child}, so {what} cannot be there")
    return branch


def position_reach(positions: Tensor, seen: int) -> Tensor:
    """How many earlier tokens belong to each token's document, (1 or B, T), where positions tell documents apart."""
    document = F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)
    reach = document_reach(document)
    # the document that an earlier chunk began reaches back as far as its own positions say
    return reach if seen == 0 else torch.where(document == 0, positions.clamp_min(0), reach)


def check_attention(backbone: PreTrainedModel, wanted: Any, now: bool = True) -> None:
    """Refuse an attention function that the family would ignore, or that would be fetched from a hub."""
    for name in wanted.values() if isinstance(wanted, dict) else (wanted,):
        if name is None or name == "eager":
            continue
        if "/" in name:
            raise ValueError(f"attn_implementation={name!r} would fetch code from a hub, which is never done here")
        if name != "sdpa" and not (backbone._supports_attention_backend or backbone._can_set_attn_implementation()):
            raise ValueError(f"attn_implementation={name!r} is ignored by {type(backbone).__name__}; leave it out")
        if now and backbone.config._attn_implementation != name:
            got = backbone.config._attn_implementation
            raise ValueError(f"{type(backbone).__name__} does not take attn_implementation={name!r}; it has {got!r}")


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
    if not isinstance(model, PreTrainedModel) or isinstance(model, TwoAxisPreTrainedModel):
        raise ValueError(f"graft takes a causal language model of transformers, got {type(model).__name__}")
    if start not in ("neutral", "paper"):
        raise ValueError(f"start is neutral or paper, got {start!r}")
    spelled: dict[str, Any] = {"stream": stream, "mixer": mixer, "placement": placement, "blend": blend, "init": init}
    blocks = None if mixer_blocks is None else tuple(mixer_blocks)
    methods = stream if isinstance(stream, Methods) else Methods(**spelled, mixer_blocks=blocks)
    placed = any("forward" in layer.__dict__ for layer in joins.find_layers(model))
    if placed or any(parameter.is_meta for parameter in model.parameters()):
        raise Refused(f"{type(model).__name__} is spread by a device map; graft first, load the saved folder with it")
    tokens, was = sample(model), model.training
    before = model.eval()(tokens, use_cache=False).logits
    found = examine(model)
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
            raise Refused(
                f"{methods.stream} on {type(model).__name__} changes the logits by {apart:.2g} of the largest"
            )
    made.train(was)
    return made


@torch.no_grad()
def narrow_new_(model: TwoAxisPreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Bring new parameters to the model's dtype and device; what a stream wants in float32 stays at least that."""
    wide = {name for group in model.stream.parameter_groups() if group.float32 for name in group.names}
    for name, parameter in model.stream.named_parameters():
        target = torch.promote_types(dtype, torch.float32) if name in wide else dtype
        parameter.data = parameter.data.to(device, target)
    for _, local in model.local_operators():
        local.to(device, dtype)
    for module in model.modules():
        if isinstance(module, joins.MixerSite):
            module.norm.to(device, dtype)


AutoConfig.register(TwoAxisConfig.model_type, TwoAxisConfig, exist_ok=True)
AutoModel.register(TwoAxisConfig, TwoAxisModel, exist_ok=True)
AutoModelForCausalLM.register(TwoAxisConfig, TwoAxisForCausalLM, exist_ok=True)
