"""Grafts of families on meta tensors: their bytes against real steps, their operations against what they run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.tiny_families import causal_types, tiny_config
from tests.support.commands import run
from twoaxis.base.meter import ATTENTION
from twoaxis.costs.costs import cost
from twoaxis.costs.trace import DTYPES, TrainTrace, meta_model, trace_decoding, trace_training
from twoaxis.model.deployment import Deployment
from twoaxis.model.flops import count_parameters, forward_flops, training_flops, uncounted
from twoaxis.model.graft import graft
from twoaxis.model.graft_config import TwoAxisConfig
from twoaxis.model.loss import next_token_loss
from twoaxis.training.measure import peak_memory

B, T = 4, 48
SIZES = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 96, "pad_token_id": None, "eos_token_id": None}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 8, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2}
LATENT |= {"topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE: dict[str, dict[str, Any]] = {"deepseek_v3": LATENT, "mixtral": EXPERTS, "qwen3_moe": EXPERTS}
MORE |= {"gemma3_text": {"sliding_window": 8, "head_dim": 16, "query_pre_attn_scalar": 16}}
MORE |= {"gpt2": {"num_key_value_heads": 4}, "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 8}}


def family(name: str, **methods: Any) -> TwoAxisConfig:
    return TwoAxisConfig(text_config={"model_type": name, **SIZES, **MORE.get(name, {})}, **methods)


def products(trace: TrainTrace, *, attention: bool) -> int:
    """Operations of a forward pass that are attention, or that are not."""
    works = (work.eager for work in trace.forward.values())
    return sum(k.flops * n for work in works for k, n in work.items() if k.op.startswith(ATTENTION) is attention)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("stream", ["standard", "attention_residuals", "hyper_connections"])
def test_bytes_of_a_real_step(name: str, stream: str, dtype: str) -> None:
    """To the byte, of the untouched attention of transformers, in the weights' dtype."""
    shape = family(name, stream=stream)
    real: Any = AutoModelForCausalLM.from_config(copy.deepcopy(shape.text_config)).to(DTYPES[dtype])
    model = graft(real, stream, start="paper").train()
    given: Any = {"loss": next_token_loss, "optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=0.1)}
    measured = peak_memory(model, B, T, **given)
    blank = meta_model(shape, dtype)
    assert sum(p.nbytes for p in blank.parameters()) == sum(p.nbytes for p in model.parameters())
    trace = trace_training(blank, B, T, "cpu")
    assert (trace.saved, trace.peak) == (measured.activations, measured.peak - measured.parameters)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "methods"),
    [
        ("llama", {"mixer": "short_swa:window=5"}),
        ("qwen3", {"stream": "deep_delta:value_channels=2,compress=token"}),
        ("gemma3_text", {}),
        ("deepseek_v3", {}),
    ],
)
def test_bytes_kept_are_those_of_a_real_cache(name: str, methods: dict[str, Any]) -> None:
    shape = family(name, **methods)
    real: Any = AutoModelForCausalLM.from_config(copy.deepcopy(shape.text_config))
    model = graft(real.bfloat16(), shape.methods(), start="paper").eval()
    cache = model.make_cache()
    for chunk in torch.zeros(2, 23, dtype=torch.long).split(5, dim=1):
        model(chunk, past_key_values=cache, use_cache=True)
    blank = meta_model(shape, "bfloat16")
    kept = trace_decoding(blank, 2, 23).kept
    assert tuple(kept) == tuple(model.cache_bytes(cache).values())


@pytest.mark.parametrize(
    "name", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "olmo2"]
)
@pytest.mark.parametrize("methods", [{}, {"stream": "denseformer"}])
def test_the_convention_holds_on_any_family(name: str, methods: dict[str, Any]) -> None:
    """Products of the model that runs are those of the rules, experts included; each part gets its own backward."""
    model = meta_model(family(name, **methods), "bfloat16")
    found, trace = forward_flops(model, T), trace_training(model, B, T)
    counts = count_parameters(model)
    assert counts.total == sum(p.numel() for p in model.parameters())
    assert (counts.stream > 0) is bool(methods)
    assert uncounted(model) == ()
    own = trace.forward["stream"].flops
    assert products(trace, attention=False) - own == B * T * (found.projections + found.mlp + found.head)
    if name != "deepseek_v3":  # whose narrower values are padded for the kernel, which is not charged
        assert products(trace, attention=True) == B * T * found.scores
    for kind in ("attention", "mlp", "head"):
        assert trace.backward[kind].flops == 2 * trace.forward[kind].flops > 0, kind
    assert training_flops(model, T).total == 3 * found.total
    again = training_flops(model, T, recompute=1)
    assert again.total == 3 * found.total + found.blocks
    assert trace_training(model, B, T, recompute="block").saved < trace.saved


@pytest.mark.parametrize("name", ["falcon", "dots3_note_text"])
def test_families_with_habits_of_their_own(name: str) -> None:
    """One has a class for each kernel that it knows; layers of the other may differ in their heads."""
    if name not in causal_types():
        pytest.skip(f"this transformers has no {name}")
    found = cost(TwoAxisConfig(text_config=tiny_config(name)), "denseformer")
    assert found.parameters.total == found.plain.parameters.total + found.parameters.stream
    assert (found.shape.num_attention_heads, found.shape.num_hidden_layers) == (4, 3)
    assert found.training.total > 0
    assert found.unmetered is None


def test_a_layer_without_a_rule_is_named(tmp_path: Path) -> None:
    """Linear attention: exact parameters and the operations of its matrices, and what is missing is said."""
    path = tmp_path / "config.json"
    small = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "head_dim": 16}
    small |= {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 32}
    path.write_text(json.dumps({"model_type": "qwen3_next", **SIZES, **EXPERTS, **small}))
    words = ("--shape", str(path), "--context", "16")
    done = run("cost", *words, "--stream", "denseformer", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert "what Qwen3NextGatedDeltaNet, Conv1d does besides matrix products" in found["not_counted"]
    assert "bytes, memory and times" in found["not_counted"]
    plain, method = found["methods"]
    assert "memory" not in plain
    assert method["parameters"]["added"] == method["parameters"]["stream"] > 0
    assert "Not counted" in run("cost", *words, "--stream", "denseformer").out
    done = run("advise", *words)
    assert done.code == 2
    assert "no pass on meta tensors" in done.err


def test_a_family_can_be_asked_for_a_deployment(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", **SIZES, **EXPERTS, "num_hidden_layers": 4}))
    words = ("--context", "32", "--pipeline-stages", "2", "--tensor-parallel", "2", "--recompute", "block")
    done = run("cost", "--shape", str(path), "--stream", "hyper_connections", "--mixer", "short_swa", *words, "--json")
    assert done.code == 0, done.err
    plain, stream, mixer = json.loads(done.out)["methods"]
    assert plain["kept"]["attention"] == 32 * 4 * 2 * 2 * 16 * 2
    assert stream["pipeline"]["whole"] == 4 * plain["pipeline"]["whole"]
    assert mixer["kept"]["local"] > 0
    assert 1 < stream["ratio"]["train"]["fused"] < stream["ratio"]["train"]["eager"]
    whole = cost(str(path), "hyper_connections", Deployment(context=32)).memory.total
    assert stream["memory"]["total"] < whole
