"""The families of checkpoints that can be retrofitted: what their configurations mean, how their weights are called.

    model_type   family                       of its own
    llama        Llama, SmolLM, SmolLM2       biases
    mistral      Mistral                      one window for every layer
    qwen2        Qwen2, Qwen2.5               biases on q, k, v; windows by layer_types
    qwen3        Qwen3                        normalised queries and keys; windows by layer_types
    smollm3      SmolLM3                      layers without rotary positions; windows by layer_types

A field of the source's configuration is handled (it decides something here), ignored for a reason that is written down,
or at its default. Anything else is an error that names it: a field nobody understands may change what the model
computes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.modeling_utils import PreTrainedModel

    from twoaxis.model.hf_config import TwoAxisConfig


class Family(NamedTuple):
    """One kind of checkpoint.

    Attributes:
        title: for people.
        own: fields of the configuration that it handles beyond `HANDLED`.
        ignored: fields it ignores beyond `IGNORED`, with the reason.
        qkv_bias: query, key and value always have biases.
        qk_norm: queries and keys are normalised per head.
    """

    title: str
    own: tuple[str, ...]
    ignored: Mapping[str, str] = {}
    qkv_bias: bool = False
    qk_norm: bool = False


_WINDOWS = ("use_sliding_window", "sliding_window", "layer_types")
_SPLIT = {"pretraining_tp": "splits matrix products over devices; their sum is the same"}

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama, SmolLM, SmolLM2", ("attention_bias", "mlp_bias"), _SPLIT),
    "mistral": Family("Mistral", ("sliding_window",)),
    "qwen2": Family("Qwen2", (*_WINDOWS, "max_window_layers"), qkv_bias=True),
    "qwen3": Family("Qwen3", (*_WINDOWS, "max_window_layers", "attention_bias"), qk_norm=True),
    "smollm3": Family(
        "SmolLM3",
        (*_WINDOWS, "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
        {"max_window_layers": "layer_types says which layers have a window", **_SPLIT},
    ),
}

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    *("rope_parameters", "bos_token_id", "eos_token_id", "initializer_range", "use_cache"),
)
"""Fields that mean the same here and are taken as they are."""

HANDLED = (*SAME, "head_dim", "pad_token_id", "model_type", "architectures", "dtype", "torch_dtype")

_TOOL = "a note of the tool that wrote the file"
_OUTPUT = "what a call returns; asked for in the call"
_LABELS = "of classification heads"
IGNORED: dict[str, str] = {
    "attention_dropout": "acts in training only; there is no dropout here",
    "_name_or_path": _TOOL,
    "_model_name_or_path": _TOOL,
    "transformers_version": _TOOL,
    "transformers.js_config": _TOOL,
    "unsloth_fixed": _TOOL,
    "unsloth_version": _TOOL,
    "is_llama_config": _TOOL,
    "_attn_implementation_autoset": "kernels, not numbers",
    "chunk_size_feed_forward": "not read by these families",
    "output_attentions": _OUTPUT,
    "output_hidden_states": _OUTPUT,
    "return_dict": _OUTPUT,
    "id2label": _LABELS,
    "label2id": _LABELS,
    "problem_type": _LABELS,
    "sep_token_id": "the tokenizer's; the model does not read it",
    "unk_token_id": "the tokenizer's; the model does not read it",
}
"""Fields of every family that change nothing here, and why."""

HARMLESS: dict[str, tuple[Any, ...]] = {
    "rope_interleaved": (False,),
    "rope_scaling": (None,),
    "quantization_config": (None,),
}
"""Fields that no class knows but files have: the values that change nothing."""

_REMEDY = {
    "quantization_config": "quantised weights cannot be taken over; give the original weights, or a GGUF file",
    "auto_map": "the checkpoint runs code of its own, which is never executed here",
}


def family_of(model_type: str | None) -> Family:
    """The family of a `model_type`, or an error that names the families."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type == "twoaxis":
        raise ValueError("this is a twoaxis model already; retrofit takes the checkpoint it came from")
    listed = ", ".join(f"{name} ({family.title})" for name, family in FAMILIES.items())
    raise ValueError(f"model_type {model_type!r} is none of the families that can be retrofitted: {listed}")


def check_config(config: PreTrainedConfig) -> list[str]:
    """Refuse a configuration with a field that is not understood.

    Returns:
        notes: what is ignored although it is not at its default, one line each.
    """
    family = family_of(config.model_type)
    architectures = config.architectures or []
    wanted = f"{type(config).__name__.removesuffix('Config')}ForCausalLM"
    if architectures and wanted not in architectures:
        raise ValueError(f"the checkpoint is a {', '.join(architectures)}; retrofit takes {wanted}")
    ignored = {**IGNORED, **family.ignored, **_generation_fields()}
    defaults = type(config)().to_dict()
    notes = []
    for name, value in config.to_dict().items():
        if name in HANDLED or name in family.own or (name in defaults and defaults[name] == value):
            continue
        if name in ignored:
            if ignored[name] not in (_TOOL, _OUTPUT, _LABELS):
                notes.append(f"{name}={value!r} is ignored: {ignored[name]}")
        elif value not in HARMLESS.get(name, ()):
            remedy = _REMEDY.get(name, "it is not known what it changes, so the model cannot be taken over")
            raise ValueError(f"the source's configuration has {name}={value!r}: {remedy}")
    return notes


def _generation_fields() -> dict[str, str]:
    from transformers import GenerationConfig

    reason = "a setting of generation, which comes along in generation_config.json"
    return dict.fromkeys(GenerationConfig._get_default_generation_params(), reason)


def map_config(config: PreTrainedConfig, **methods: Any) -> TwoAxisConfig:
    """Our configuration of a source's.

    Args:
        config: the source's, of a known family.
        **methods: the fields of `TwoAxisConfig` about streams and mixers.
    """
    from twoaxis.model.hf_config import TwoAxisConfig

    theirs: Any = config
    family = family_of(theirs.model_type)
    biased = bool(getattr(theirs, "attention_bias", False))
    window, kinds = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None) or []
    windows = None
    if "layer_types" in family.own:
        windows = [window if kind == "sliding_attention" else None for kind in kinds]
    elif window is not None and "sliding_window" in family.own:
        windows = [window] * theirs.num_hidden_layers
    if windows is not None and not any(windows):
        windows = None
    rotates = getattr(theirs, "no_rope_layers", None) or []
    unrotated = [block for block, on in enumerate(rotates[: theirs.num_hidden_layers]) if not on]
    pad = theirs.pad_token_id
    return TwoAxisConfig(
        **{name: getattr(theirs, name) for name in SAME},
        head_dim=getattr(theirs, "head_dim", None),
        pad_token_id=pad if pad is not None and 0 <= pad < theirs.vocab_size else None,
        attention_bias=biased or family.qkv_bias,
        attention_output_bias=biased,
        mlp_bias=bool(getattr(theirs, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        attention_windows=windows,
        no_rope_blocks=unrotated or None,
        **methods,
    )


TRUNK = "model.trunk."
PARTS = r"self_attn\.[qkvo]_proj\.(weight|bias)|mlp\.(gate|up|down)_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
NORMS = r"(input|post_attention)_layernorm\.weight"


def our_name(key: str) -> str | None:
    """Our name of a parameter of the source; None for what is computed and not learned; unknown names are errors."""
    if key in ("model.embed_tokens.weight", "lm_head.weight"):
        return key
    if key.endswith("rotary_emb.inv_freq"):
        return None
    if key == "model.norm.weight" or re.fullmatch(rf"model\.layers\.\d+\.({PARTS}|{NORMS})", key):
        return TRUNK + key.removeprefix("model.")
    raise ValueError(f"the source has a weight {key!r} that has no place in a two-axis model")


def state(model: PreTrainedModel) -> Iterator[tuple[str, Any]]:
    """The source's parameters by our names; those of a tied head are left out."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and tied:
            continue
        if (name := our_name(key)) is not None:
            yield name, tensor
