"""Tiny models of every causal-LM type that transformers has: its own default configuration with small numbers in it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 3

FIELDS = {
    32: (
        "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim mamba_dt_rank time_step_rank "
        "lru_width mamba_d_ssm"
    ),
    LAYERS: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers",
    1: (
        "encoder_layers num_encoder_layers num_nextn_predict_layers n_group topk_group num_expert_group "
        "n_shared_experts num_shared_experts mamba_n_groups n_groups mamba_ngroups first_k_dense_replace "
        "num_dense_layers first_k_dense"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads num_kda_heads "
        "encoder_attention_heads linear_num_key_heads linear_num_value_heads swa_num_attention_heads "
        "num_local_experts num_experts n_routed_experts moe_num_experts num_moe_experts "
        "hidden_size_per_layer_input altup_num_inputs rotary_dim n_shared_head_dim"
    ),
    2: (
        "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads num_experts_per_tok "
        "moe_topk moe_k num_experts_per_token top_k_experts"
    ),
    8: (
        "head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim d_kv attention_head_dim linear_key_head_dim "
        "linear_value_head_dim kda_head_dim index_head_dim global_head_dim swa_head_dim swa_v_head_dim "
        "kv_channels attention_hidden_size_per_head mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_state "
        "mamba_d_head mamba_head_dim state_size ssm_state_size mamba_headdim"
    ),
    48: (
        "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim d_ff dff dense_intermediate_size "
        "intermediate_size_mlp expert_ffn_size mlp_hidden_size"
    ),
    16: (
        "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
        "moe_shared_expert_intermediate_size shared_intermediate_size expert_hidden_size q_lora_rank kv_lora_rank "
        "o_lora_rank attention_hidden_size"
    ),
    64: "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length",
    99: "vocab_size vocab_size_per_layer_input",
    6: "sliding_window attention_window_size attention_chunk_size local_attention_window_size",
}
"""Small values, and the fields of configurations that take them; a field that a family does not have is left alone."""

SMALL: dict[str, Any] = {
    **{name: value for value, names in FIELDS.items() for name in names.split()},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "image_token_id": 9,
    "use_mamba_kernels": False,
    "index_topk": 64,
    "chunk_size": 16,
    "index_n_heads": 2,
    "num_kv_shared_layers": 0,
    "use_bfloat16": False,
    "attention_dropout": 0.0,
    "is_decoder": True,
    "is_encoder_decoder": False,
}

OWN: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_hidden_layers": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 32},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "xlnet": {"n_layer": LAYERS, "d_head": 8, "d_inner": 48},
    "recurrent_gemma": {"num_key_value_heads": 1},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 6, "num_heads": 4},
    "ctrl": {"dff": 48},
    "phi": {"num_key_value_heads": 4},
    "xlm": {"emb_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "zaya": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_embds": False},
}


def rebuilt(cls: type[PreTrainedConfig], small: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of `cls` with its own defaults, and the small values of the fields that it has."""
    base = cls()
    known = set(base.to_dict()) | set(getattr(cls, "attribute_map", {}))
    fields = {name: value for name, value in small.items() if name in known}
    if "kv_lora_rank" in known:
        fields |= {"num_key_value_heads": 4}  # latent attention has as many
    for name, alias in getattr(cls, "attribute_map", {}).items():
        if name in fields and alias in fields:
            del fields[name]
    for name in getattr(cls, "sub_configs", None) or ():
        value = getattr(base, name, None)
        if isinstance(value, PreTrainedConfig):
            fields[name] = rebuilt(type(value), small)
    return cls(**fields)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The configuration of a tiny model of a type."""
    return rebuilt(CONFIG_MAPPING[model_type], SMALL | OWN.get(model_type, {}) | changes)


def tiny(model_type: str, *, shake: bool = True, **changes: Any) -> PreTrainedModel:
    """A tiny model of a type in evaluation mode, every parameter off its initial value."""
    torch.manual_seed(0)
    config = tiny_config(model_type, **changes)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    if shake:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def causal_types() -> list[str]:
    """Every type of model that transformers has a causal language model for."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError when the body takes longer, in seconds of this process: a busy machine changes nothing."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
