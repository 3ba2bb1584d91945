"""A decoder as the graft of a family whose layers are its own: configuration and names of parameters.

    family     what it has
    llama      biases of the attention, all four or none; biases of the MLP
    qwen3      normalised queries and keys; windows
    qwen2      biases of query, key and value; windows
    smollm3    llama's, and windows, and layers without rotary positions

A decoder of such options is saved as the graft of the family, which every tool of transformers opens. A graft of any
other family works as well (`twoaxis.model.graft`); it has no decoder.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import torch

from twoaxis.base.options import check_names
from twoaxis.model.config import Methods, ModelConfig

GRAFT, FORMAT = "twoaxis", 1
"""What config.json of a graft has as `model_type` and as number of its layout."""
OWN = ("model_type", "format", "architectures", "dtype", "text_config", "survey", "auto_map", "decoder_config")
"""Fields of a decoder's config.json beside its methods."""
METHODS = tuple(field.name for field in dataclasses.fields(Methods))
SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
    "initializer_range",
)
"""Fields that mean the same in all of them."""


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
    # no digest of the family's layers: transformers has not seen them yet
    survey |= {"digest": "decoder", "final": "model.norm"}
    return {
        "model_type": GRAFT,
        "format": FORMAT,
        "architectures": ["TwoAxisForCausalLM"],
        "dtype": str(dtype).removeprefix("torch."),
        "text_config": text,
        "survey": {**survey, "layers": [0] * config.num_hidden_layers},
        "decoder_config": config.to_dict(),
        **{name: getattr(config, name) for name in METHODS},
    }


def read_graft(document: dict[str, Any]) -> ModelConfig:
    """The decoder's configuration in what `graft_document` made; a ValueError names what was changed in the rest.

    The rest is what transformers reads: the two must say the same.
    """
    check_names(document, dict.fromkeys((*OWN, *METHODS)), "a decoder's config.json")
    config = ModelConfig.from_dict(document["decoder_config"], "a decoder")
    want = json.loads(json.dumps(graft_document(config, torch.float32)))
    for name in (*METHODS, "survey", "text_config"):
        _check_same(name, document.get(name), want[name])
    return config


def _check_same(name: str, found: Any, want: Any) -> None:
    if isinstance(found, dict) and isinstance(want, dict):
        for key in (*want, *found):
            _check_same(f"{name}.{key}", found.get(key), want.get(key))
    elif type(found) is not type(want) or found != want:
        raise ValueError(f"{name} is {found!r}, with the options in decoder it is {want!r}; save the model anew")


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
