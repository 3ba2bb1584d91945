"""Models of any family of transformers for training from scratch.

    the family's own defaults                          its norms, its activation, its windows, its experts
    < the sizes of a preset                            width, blocks, heads, MLP, spread; other widths in proportion
    < tokens, positions and ends of the data
    < what is said, with what a config.json says       refused where the family has no such field, or ignores it

Lists with an entry for each layer follow the number of layers. Sizes go by transformers' usual names; a family that
calls them otherwise gets its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from twoaxis.base.files import read_json, user_path
from twoaxis.base.registry import did_you_mean
from twoaxis.model.config import SHORT, Methods, ModelConfig
from twoaxis.model.graft import TwoAxisForCausalLM
from twoaxis.model.graft_config import (
    ALSO,
    EXPERTS,
    PASSED_ON,
    TwoAxisConfig,
    as_fields,
    check_family,
    derived_lists,
    family_config,
)
from twoaxis.model.graft_modules import narrow_new_
from twoaxis.model.graft_survey import survey_of

IN_PROPORTION = (
    *(EXPERTS, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"),
    *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "index_head_dim", "lru_width"),
)
"""Widths that no preset has: as large, for the width, as in the family's own default."""
SETTINGS = {field.name for field in dataclasses.fields(PreTrainedConfig)} | PASSED_ON | {"use_cache"}
"""Fields of every configuration that are none of a model's shape."""
FROM_DATA = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of a configuration file that belong to its tokenizer."""


def family_class(family: str) -> type[PreTrainedConfig]:
    """The class of a family's configuration; a ValueError suggests the nearest name."""
    check_family(family)
    cls = CONFIG_MAPPING[family]
    if own_name(cls, "hidden_size") is None:
        inner = getattr(cast(Any, cls).sub_configs.get("text_config"), "model_type", None)
        raise ValueError(f"{family} is a model of several parts; the family of its text is {inner or 'not known'}")
    return cls


def own_name(cls: type[PreTrainedConfig], name: str) -> str | None:
    """What a family calls a field that is given by transformers' usual name or by its own; None where it has none."""
    known = {field.name for field in dataclasses.fields(cls)} - SETTINGS  # pyright: ignore[reportArgumentType]
    for each in (name, cls.attribute_map.get(name), *ALSO.get(name, ())):
        if each in known:
            return each
    spelled = f'"{name}"' in inspect.getsource(cls)  # a name of earlier days that the class still reads
    return name if spelled or (name == "rope_theta" and "rope_parameters" in known) else None


def check_field(family: str, cls: type[PreTrainedConfig], name: str) -> str:
    """The family's own name of a field that is said; refused where there is none."""
    own = own_name(cls, SHORT.get(name, name))
    if own is not None:
        return own
    if name in {field.name for field in dataclasses.fields(ModelConfig)} | set(SHORT):
        raise ValueError(f"{family} has no field for {name}; leave it out, or train a decoder without a family")
    if name in SETTINGS:
        raise ValueError(f"{name} is a setting of transformers and none of the shape of {family}; leave it out")
    known = [field.name for field in dataclasses.fields(cls) if field.name not in SETTINGS]  # pyright: ignore
    raise ValueError(f"{family} has no field {name!r}{did_you_mean(name, [*known, *cls.attribute_map])}")


def scratch_config(
    family: str, sizes: Mapping[str, Any], said: Mapping[str, Any], methods: Methods, *, context: int
) -> TwoAxisConfig:
    """The configuration of a model of a family, with methods in it, before it has weights.

    Args:
        family: its model_type.
        sizes: of a preset, in transformers' usual names; what the family does not have is left out.
        said: fields that it must have. Token ids that are None, and positions, are left out where it has none.
        methods: the stream and the mixer.
        context: tokens of a sequence, for which it must have positions.
    """
    cls = family_class(family)
    optional = [n for n in (*FROM_DATA, "max_position_embeddings") if own_name(cls, n) is None]
    given = {check_field(family, cls, n): value for n, value in said.items() if n not in optional}
    fields = _sized(cls, sizes, given) | dict.fromkeys([n for n in FROM_DATA[1:] if n not in optional]) | given
    lists = {name: value for name, value in fields.items() if isinstance(value, list)}
    bare = family_config({"model_type": family, **{n: value for n, value in fields.items() if n not in lists}})
    blocks: int = bare.get_text_config().num_hidden_layers
    for name, value in lists.items():
        derived = getattr(bare, name, None)
        if len(value) != blocks and (isinstance(derived, list) and len(derived) == blocks):
            fields[name] = _continued(family, name, value, blocks)
    made = family_config({"model_type": family, **fields})
    for name in given:
        found = getattr(made, name, fields[name])
        if found != fields[name] and not name.startswith("rope_"):
            raise ValueError(f"{family} makes {name}={found!r} of {fields[name]!r}: it does not use it with the rest")
    longest = getattr(made, "max_position_embeddings", None)
    if isinstance(longest, int) and longest < context:
        raise ValueError(f"context is {context}, max_position_embeddings of {family} {longest}")
    return TwoAxisConfig(text_config=made, survey=survey_of(made).to_dict(), **as_fields(methods))


def _sized(cls: type[PreTrainedConfig], sizes: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a preset in a family's names, and what follows from them."""
    found = {name: given.get(own_name(cls, name) or "", sizes[name]) for name in SIZES}
    width, heads = found["hidden_size"], found["num_attention_heads"]
    same = heads == sizes["num_attention_heads"]
    found |= {"num_key_value_heads": (same and sizes.get("num_key_value_heads")) or heads}
    if all(isinstance(n, int) and n > 0 for n in (width, heads)):  # what is wrong with them is said below
        found |= {"head_dim": sizes.get("head_dim") or max(1, width // heads)}
    for name in ("tie_word_embeddings", "initializer_range"):
        found[name] = sizes.get(name, getattr(ModelConfig, name))
    fields = {own: value for name, value in found.items() if (own := own_name(cls, name)) is not None}
    usual: Any = cls()
    for name in IN_PROPORTION:
        if isinstance(before := getattr(usual, name, None), int) and isinstance(width, int) and before:
            fields[name] = max(8, -(-before * width // (8 * usual.hidden_size)) * 8)
    if hasattr(usual, "query_pre_attn_scalar"):
        fields["query_pre_attn_scalar"] = {**fields, **given}.get("head_dim")
    return {name: value for name, value in fields.items() if name not in given}


SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _continued(family: str, name: str, value: list[Any], blocks: int) -> list[Any]:
    """A list with an entry for each layer, for another number of layers; its pattern goes on where it has one."""
    for period in range(1, len(value) // 2 + 1):
        if all(each == value[i % period] for i, each in enumerate(value)):
            return [value[i % period] for i in range(blocks)]
    raise ValueError(f"{name} of {family} has {len(value)} entries and no period, for {blocks} layers; give it anew")


def is_file(family: str) -> bool:
    """Whether a family is given by a configuration file or a folder with one."""
    return "/" in family or family.endswith(".json") or Path(family).is_dir()


def read_family(given: str) -> tuple[str, dict[str, Any]]:
    """Name and fields of the family in a config.json or a folder with one, but for those that belong to its tokenizer.

    Lists with an entry for each layer that follow from the other fields are left out: they follow the depth.
    """
    path = user_path(given)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no configuration file {path}")
    document = read_json(path)
    family = document.get("model_type") if isinstance(document, dict) else None
    if not isinstance(family, str):
        raise ValueError(f"{path} has no model_type: it is not the configuration of a transformers model")
    try:
        cls = family_class(family)
        known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
        for name in document:
            if own_name(cls, name) is None and name not in SETTINGS and (hint := did_you_mean(name, known)):
                raise ValueError(f"{family} has no field {name!r}{hint}")
        every, follows = family_config(document).to_dict(), derived_lists(document)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    kept = {name: every[name] for name in known if name in every and name not in SETTINGS}
    fields = {name: value for name, value in kept.items() if name not in (*FROM_DATA, *follows)}
    return family, {name: _said(value) if name == "rope_parameters" else value for name, value in fields.items()}


def _said(value: Any) -> Any:
    """Rotary positions without the numbers that some versions of transformers leave open."""
    if not isinstance(value, dict):
        return value
    return {name: _said(each) for name, each in value.items() if each is not None}


def from_scratch(config: TwoAxisConfig, seed: int = 0) -> TwoAxisForCausalLM:
    """A model of a configuration with our initial values, in float32 on the CPU; see `initialise` for the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TwoAxisForCausalLM(copy.deepcopy(config)).float()
    if not any(parameter.is_meta for parameter in model.parameters()):
        model.initialise_(seed)
    return model


KERNELS = "twoaxis_meta"
"""What the attention of models on meta tensors is called; see `attend`."""


def on_meta(config: TwoAxisConfig, dtype: torch.dtype = torch.float32) -> TwoAxisForCausalLM:
    """A model of meta tensors; methods that it cannot have are refused.

    Attention is one fused kernel, and is spelled out where the family has no choice of kernels.
    """
    # without a mask function of the same name transformers makes no masks, which would look at numbers
    ALL_ATTENTION_FUNCTIONS.register(KERNELS, attend)
    text, survey = copy.deepcopy(config.text_config), config.architecture.to_dict()
    with torch.device("meta"):
        backbone = _backbone(text, dtype)
        methods = as_fields(config.methods())
        made = TwoAxisConfig(text_config=backbone.config, survey=survey, dtype=dtype, **methods)
        model = TwoAxisForCausalLM(made, backbone)
    narrow_new_(model, dtype, torch.device("meta"))
    return model


def _backbone(text: Any, dtype: torch.dtype) -> Any:
    with contextlib.suppress(KeyError):  # Falcon has a class for every kernel that it knows
        made: Any = AutoModelForCausalLM.from_config(text, attn_implementation=KERNELS, dtype=dtype)
        if made._supports_attention_backend or made._can_set_attn_implementation():
            return made
    return AutoModelForCausalLM.from_config(text, attn_implementation="eager", dtype=dtype)


def attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *, scaling: Any = None, **more: Any
) -> tuple[Tensor, None]:
    """Fused causal attention of meta tensors (B, H, T, D): no mask is made, and a window reads no more keys."""
    del module, mask
    width, keys = v.shape[-1], more.get("sliding_window") or k.shape[-2]
    # narrower values are padded, as fused kernels want them
    v = v if width == q.shape[-1] else F.pad(v, (0, q.shape[-1] - width))
    k, v = k[..., -keys:, :], v[..., -keys:, :]
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out = run(q, k, v, 0.0, q.shape[-2] > 1, scale=scaling)[0]
    return out[..., :width].transpose(1, 2).contiguous(), None
