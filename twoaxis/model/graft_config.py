"""`TwoAxisConfig`: a family's own configuration, our methods, and what the survey of its layers found.

config.json    {"model_type": "twoaxis", "format": 1, "text_config": {...}, "stream": ..., "mixer": ..., "survey": ...}
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from twoaxis.base.options import Positive, between, check_type
from twoaxis.base.registry import did_you_mean
from twoaxis.depth.stream import Stream
from twoaxis.model.config import SHORT, Methods
from twoaxis.model.decoder_as_graft import FORMAT, GRAFT, METHODS
from twoaxis.model.graft_survey import Architecture, survey_of

ALSO = {
    "num_hidden_layers": ("num_layers", "decoder_layers"),
    "num_attention_heads": ("decoder_attention_heads",),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "decoder_ffn_dim", "dff", "dim_ff", "d_inner"),
}
"""What families call a size that they have no alias for."""
EXPERTS = "moe_intermediate_size"
"""Hidden width of an expert, where a family tells it from that of a plain MLP."""
PASSED_ON = {
    # fields that transformers itself reads from a configuration file or from keyword arguments
    *("_commit_hash", "_name_or_path", "attn_implementation", "auto_map", "custom_pipelines", "experts_implementation"),
    *("model_type", "name_or_path", "num_labels", "output_attentions", "quantization_config", "torch_dtype"),
    "_attn_implementation_autoset",
}
SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "use_cache"),
    *("max_position_embeddings", "initializer_range", "tie_word_embeddings", "pad_token_id", "bos_token_id"),
    "eos_token_id",
)
"""Fields of the family's configuration that tools look for in a model's."""
COUNTS = SHARED[:5]
"""Those that are numbers of something, which families do not check."""


class TwoAxisConfig(PreTrainedConfig):
    """The family's own configuration, our methods, and what the survey found."""

    model_type = GRAFT
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012 # pyright: ignore
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    format: int = FORMAT
    """Number of the file's layout."""
    text_config: PreTrainedConfig | dict[str, Any] | None = None
    """The family's configuration; a dictionary has its model_type."""
    survey: dict[str, Any] | None = None
    """What the layers do to their residual; None finds it out when the model is built."""
    stream: str = "standard"
    stream_options: dict[str, Any] | None = None
    placement: str | None = None
    blend: bool = False
    mixer: str | None = None
    mixer_options: dict[str, Any] | None = None
    mixer_blocks: list[int] | None = None
    init: str = "paper"

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("decoder_config", None)  # a decoder's own fields: what is made here is a graft
        known = {field.name for field in dataclasses.fields(self)}
        for name in kwargs:
            if name not in PASSED_ON | set(GenerationConfig._get_default_generation_params()):
                hint = did_you_mean(name, sorted(known))
                raise ValueError(f"TwoAxisConfig has no field {name!r}{hint}; a family's own stand in text_config")
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}, this version of twoaxis reads {FORMAT}; make the model anew")
        if isinstance(self.text_config, dict):
            self.text_config = family_config(self.text_config)
        if self.text_config is not None and not isinstance(self.text_config, PreTrainedConfig):
            raise ValueError(f"text_config must be a family's configuration, got {type(self.text_config).__name__}")
        for name, value in as_fields(self.methods()).items():
            setattr(self, name, value)
        if self.survey is not None:
            self.methods().check_blocks(len(self.architecture.forms))
        # a configuration hands its own choices down to nested ones: None would leave the backbone without a mask
        for name in ("attn_implementation", "experts_implementation"):
            kwargs[name] = kwargs.get(name) or getattr(self.text_config, f"_{name}", None)
        super().__post_init__(**kwargs)

    def methods(self) -> Methods:
        """The stream and the mixer."""
        given = {name: getattr(self, name) for name in METHODS}
        return Methods.from_dict({name: value for name, value in given.items() if value is not None}, "a model")

    def make_stream(self) -> Stream:
        """The residual stream for this shape."""
        found, methods = self.architecture, self.methods()
        kinds = methods.with_mixer([form.kinds for form in found.forms])
        return methods.make_stream(width=found.width, kinds=kinds, eps=self.norm_eps)

    def changed(self, changes: Mapping[str, Any], label: str) -> TwoAxisConfig:
        """The family with other methods, and with fields of its own replaced; what this has of methods does not stay.

        `label` is whose changes they are, for messages.
        """
        assert isinstance(self.text_config, PreTrainedConfig)
        fields = self.text_config.to_dict()
        for name in changes:
            if name not in (known := {*METHODS, *fields, *SHORT}):
                family = self.text_config.model_type
                raise ValueError(f"{label}: {family} has no field {name!r}{did_you_mean(name, sorted(known))}")
        methods = {name: value for name, value in changes.items() if name in METHODS}
        inside = {name: value for name, value in changes.items() if name not in METHODS}
        if not inside:  # the survey, which need not be made again
            return TwoAxisConfig(text_config=copy.deepcopy(self.text_config), survey=self.survey, **methods)
        derived = derived_lists(fields)
        return TwoAxisConfig(text_config={n: v for n, v in fields.items() if n not in derived} | inside, **methods)

    @property
    def norm_eps(self) -> float:
        """Inside the family's RMSNorms."""
        return getattr(self.get_text_config(), "rms_norm_eps", 1e-6)

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return getattr(self, "num_key_value_heads", None) or self.num_attention_heads

    def hidden_width(self, block: int) -> int:
        """Hidden width of an MLP; of experts that of one."""
        del block
        try:
            return self.hidden_field()[1]
        except ValueError:  # GPT-2 leaves it open
            return 4 * self.hidden_size

    def hidden_field(self) -> tuple[str, int]:
        """The field that makes MLPs wider, those of experts where there are any, and what it is."""
        text: Any = first_layer(self.get_text_config(decoder=True))
        for name in (EXPERTS, "intermediate_size", *ALSO["intermediate_size"]):
            if isinstance(found := getattr(text, name, None), int):
                return name, found
        raise ValueError(f"{text.model_type} has no field for the width of its MLPs; make it deeper instead")

    @property
    def architecture(self) -> Architecture:
        """What the survey found; made on a narrow twin where there was none."""
        if self.survey is None:
            self.survey = survey_of(self.get_text_config(decoder=True)).to_dict()
        return Architecture.from_dict(self.survey)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The family's configuration of its decoder."""
        if not isinstance(self.text_config, PreTrainedConfig):
            return self
        return self.text_config.get_text_config(decoder, encoder)

    def __getattr__(self, name: str) -> Any:
        """A field of the family's configuration that tools look for, such as vocab_size."""
        text = self.__dict__.get("text_config")
        if name not in SHARED or not isinstance(text, PreTrainedConfig):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        inside = first_layer(text.get_text_config())
        found = next((each for each in (name, *ALSO.get(name, ())) if hasattr(inside, each)), name)
        if name == "num_attention_heads" and not hasattr(inside, found):
            return 1  # of a family whose layers have another way to mix tokens
        return getattr(inside, found)


def as_fields(methods: Methods) -> dict[str, Any]:
    """Methods as fields of a configuration file."""
    blocks = methods.mixer_blocks
    return {**methods.methods().to_dict(), "mixer_blocks": None if blocks is None else list(blocks)}


def check_family(family: Any) -> None:
    """Refuse what transformers has no causal language model for; the nearest name is suggested."""
    if not isinstance(family, str) or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(str(family), sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        raise ValueError(f"transformers has no family {family!r} of causal language models{hint}; mend model_type")


def first_layer(text: Any) -> Any:
    """A configuration whose layers differ in their sizes as its first layer has it; any other one as it is."""
    return text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text


def derived_lists(document: dict[str, Any]) -> set[str]:
    """Lists of a family's configuration, with an entry for each layer, that follow from its other fields."""
    made: Any = family_config(document)
    every, blocks = made.to_dict(), made.num_hidden_layers
    lists = {name for name, value in every.items() if isinstance(value, list) and len(value) == blocks}
    bare = family_config({name: value for name, value in document.items() if name not in lists})
    return {name for name in lists if getattr(bare, name, None) == getattr(made, name)}


def family_config(document: dict[str, Any]) -> PreTrainedConfig:
    """A family's configuration from its dictionary; a ValueError names the field that is wrong."""
    fields = dict(document)
    family = fields.pop("model_type", None)
    if not isinstance(family, str):
        raise ValueError(f"text_config needs the model_type of a family of transformers, got {family!r}")
    for name in COUNTS:
        if fields.get(name) is not None:
            check_type(f"text_config.{name}", fields[name], Annotated[int, between(1, 2**40)])
    for name in ("dtype", "torch_dtype"):
        if not isinstance(fields.get(name), str | torch.dtype | None):
            raise ValueError(f"text_config.{name} must be the name of a dtype, got {fields[name]!r}")
    rope = fields.get("rope_parameters")
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:  # some have one for each kind of layer
        if isinstance(part, dict):
            check_type("text_config.rope_parameters.rope_theta", part.get("rope_theta"), Positive | None)
            if (kind := part.get("rope_type", "default")) not in (known := ["default", *ROPE_INIT_FUNCTIONS]):
                raise ValueError(f"text_config.rope_parameters has rope_type {kind!r}; it is one of {', '.join(known)}")
    try:
        made = AutoConfig.for_model(family, **fields)
        made.to_dict()  # which a field of a wrong type may end as well
        return made
    except Exception as error:  # strict dataclasses raise kinds of their own
        lines = " ".join(str(error).split())
        raise ValueError(f"text_config is no configuration of {family}: {lines}") from error
