"""Families whose layers are our decoder's: their configurations and parameter names, both ways.

    family     what it has
    llama      biases of the attention, all four or none; biases of the MLP
    qwen3      normalised queries and keys; windows
    qwen2      biases of query, key and value; windows
    mistral    one window for every layer
    smollm3    llama's, and windows, and layers without rotary positions

A decoder of such options is saved as the graft of the family, which every tool of transformers opens. A graft of any
other family works as well (`twoaxis.model.graft`); it has no decoder.
"""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from twoaxis.base.options import check_names
from twoaxis.model.config import Methods, ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GRAFT, FORMAT = "twoaxis", 1
"""What config.json of a graft has as `model_type` and as number of its layout."""
OWN = ("model_type", "format", "architectures", "dtype", "text_config", "survey", "auto_map")
"""Fields of a decoder's config.json beside its methods."""
UNSEEN = "decoder"
"""In place of the digest of a family's layers: a decoder wrote this graft, and transformers has not seen it yet."""
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    "initializer_range",
)
"""Fields that mean the same in all of them."""


def from_family(config: PreTrainedConfig, methods: Methods | None = None) -> ModelConfig:
    """The decoder of a family's configuration, one of `FAMILIES`, with methods or the plain residual."""
    theirs: Any = config
    family = theirs.model_type
    if family not in FAMILIES:
        raise ValueError(f"{family!r} has no decoder of ours; the families that have are {', '.join(FAMILIES)}")
    window, kinds = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None) or []
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    if family == "mistral":
        windows = [window] * theirs.num_hidden_layers
    rotates = getattr(theirs, "no_rope_layers", None) or []
    biased = bool(getattr(theirs, "attention_bias", False))
    rope = dict(theirs.rope_parameters or {})
    theta = rope.get("rope_theta", 10_000.0)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    own = {} if methods is None else dataclasses.asdict(methods.methods())
    end = theirs.eos_token_id
    return ModelConfig(
        **{name: getattr(theirs, name) for name in SAME},
        **own,
        head_dim=getattr(theirs, "head_dim", None),
        eos_token_id=end if isinstance(end, int) else None,
        rope_theta=float(theta) if isinstance(theta, int) else theta,
        rope_scaling=None if scaling.get("rope_type", "default") == "default" else scaling,
        attention_bias=biased or family == "qwen2",
        attention_output_bias=biased,
        mlp_bias=bool(getattr(theirs, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        attention_windows=tuple(windows) if any(windows) else None,
        no_rope_blocks=tuple(b for b, on in enumerate(rotates[: theirs.num_hidden_layers]) if not on),
    )


def family_fields(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a family that has a decoder's options; a ValueError names the one that none has."""
    for name in ("parallel_block", "hidden_ramp"):
        if getattr(config, name):
            raise ValueError(f"no family of transformers has {name}=True: the model stays a Decoder")
    windows = config.attention_windows or (None,) * config.num_hidden_layers
    if len(sizes := {w for w in windows if w is not None}) > 1:
        raise ValueError(f"no family of transformers has windows of {sorted(sizes)}: the model stays a Decoder")
    biased = config.attention_bias == config.attention_output_bias
    fits = {
        "llama": not config.qk_norm and not sizes and not config.no_rope_blocks and biased,
        "qwen3": config.qk_norm and not config.mlp_bias and not config.no_rope_blocks and biased,
        "qwen2": not config.qk_norm and not config.mlp_bias and not config.no_rope_blocks and config.attention_bias,
        "smollm3": not config.qk_norm and biased,
    }
    if (family := next((name for name, fit in fits.items() if fit), None)) is None or (family == "qwen2" and biased):
        given = ("qk_norm", "mlp_bias", "attention_bias", "attention_output_bias", "no_rope_blocks")
        said = ", ".join(f"{name}={getattr(config, name)!r}" for name in given)
        raise ValueError(f"no family of transformers has {said} together: the model stays a Decoder")
    fields: dict[str, Any] = {name: getattr(config, name) for name in SAME}
    fields |= {"intermediate_size": config.hidden_width(0), "num_key_value_heads": config.kv_heads}
    fields |= {"head_dim": config.head_size, "pad_token_id": None, "bos_token_id": None}
    fields |= {"eos_token_id": config.eos_token_id}
    fields["rope_parameters"] = {"rope_theta": config.rope_theta, "rope_type": "default", **(config.rope_scaling or {})}
    if family in ("qwen2", "qwen3", "smollm3"):
        fields["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in windows]
        fields |= {"use_sliding_window": bool(sizes), "sliding_window": next(iter(sizes), None)}
    if family != "qwen2":
        fields["attention_bias"] = config.attention_bias
    if family in ("llama", "smollm3"):
        fields["mlp_bias"] = config.mlp_bias
    if family == "smollm3":
        fields["no_rope_layers"] = [int(b not in config.no_rope_blocks) for b in range(config.num_hidden_layers)]
    return {"model_type": family, **fields}


def graft_document(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a decoder as the graft of its family; a ValueError says what keeps it from being one.

    All of these families have layers of one form, so that it stands here without a survey. It is proved on the weights
    when transformers opens the folder.
    """
    text = family_fields(config)
    attention = ["self_attn", "input_layernorm", ["q_proj", "k_proj", "v_proj"]]
    mlp = ["mlp", "post_attention_layernorm", ["gate_proj", "up_proj"]]
    sites = [["attention", "mlp"], [1, 1], [["self_attn.o_proj"], ["mlp.down_proj"]], [[attention[1]], [mlp[1]]]]
    survey = {"forms": [[*sites, attention, mlp]], "width": config.hidden_size, "exact": "bitwise", "packs": True}
    survey |= {"digest": UNSEEN, "final": "model.norm"}
    return {
        "model_type": GRAFT,
        "format": FORMAT,
        "architectures": ["TwoAxisForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "text_config": text,
        "survey": {**survey, "layers": [0] * config.num_hidden_layers},
        **{field.name: getattr(config, field.name) for field in dataclasses.fields(Methods)},
    }


def is_decoders(document: Any) -> bool:
    """Whether the config.json of a graft is as a decoder wrote it; `save_pretrained` writes another digest."""
    survey = document.get("survey") if isinstance(document, dict) else None
    return isinstance(survey, dict) and survey.get("digest") == UNSEEN


def read_graft(document: dict[str, Any]) -> ModelConfig:
    """The decoder's configuration from what `graft_document` made; a ValueError names what is wrong in it."""
    methods = {field.name for field in dataclasses.fields(Methods)}
    check_names(document, dict.fromkeys((*OWN, *methods)), "a decoder's config.json")
    given = Methods.from_dict({name: value for name, value in document.items() if name in methods})
    text = document.get("text_config")
    if not isinstance(text, dict):
        raise ValueError(f"text_config must be a family's configuration, got {text!r}")
    try:
        return from_family(SimpleNamespace(**text), given)  # pyright: ignore[reportArgumentType]
    except AttributeError as error:
        raise ValueError(f"text_config has no {error.name}") from error
    except TypeError as error:
        raise ValueError(f"text_config cannot be read: {error}") from error


OURS = r"(mixer|before|inside|norm_[qkvx])"
"""What the decoder calls modules that no family has; a graft calls them the same behind a prefix."""


def graft_key(name: str) -> str:
    """The key of a decoder's parameter in the graft of its family."""
    if name.startswith("stream."):
        return name
    name = re.sub(rf"\.{OURS}\.", r".twoaxis_\1.", name)
    return f"backbone.{name}" if name.startswith("lm_head.") else f"backbone.model.{name}"


def decoder_key(name: str) -> str:
    """The decoder's name of a parameter of a graft."""
    return re.sub(rf"\.twoaxis_{OURS}\.", r".\1.", re.sub(r"^backbone\.(model\.)?", "", name))
