"""Parameter groups: every parameter has one role and is in exactly one group, in our models and in transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from tests.training.runs import SHAPE, small
from twoaxis.base.method import ParameterGroup
from twoaxis.model.groups import group_parameters, param_groups, roles, select, trainable
from twoaxis.training.setup import make_model

TINY: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def ours(stream: str, mixer: str | None) -> Callable[[], Any]:
    biased = SHAPE | {"mlp_bias": True, "attention_bias": True, "qk_norm": True}
    return lambda: make_model(small(stream=stream, mixer=mixer, model=biased), 29)


def experts() -> Any:
    config = transformers.MixtralConfig(**TINY, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def fine_experts() -> Any:
    sizes: dict[str, Any] = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY, **sizes))


MODELS: dict[str, Callable[[], Any]] = {
    "plain": ours("standard", None),
    "delta": ours("deep_delta:value_channels=2", "canon"),
    "hyper": ours("hyper_connections", "short_swa:window=3,heads=2,sink=true"),
    "dense": ours("denseformer", "short_conv"),
    "mudd": ours("muddformer", None),
    "residuals": ours("attention_residuals", None),
    "blend": ours("deep_delta:blend=true", None),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, attention_bias=True)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=29, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "mixtral": experts,
    "qwen3 moe": fine_experts,
}

ROLES = {
    "self_attn.q_proj.weight": "matrix",
    "embed_tokens.weight": "matrix",
    "attn.c_attn.weight": "matrix",  # transformers' Conv1D, which is a linear layer
    "attn.c_attn.bias": "bias",
    "wpe.weight": "matrix",
    "ln_1.weight": "norm",
    "input_layernorm.weight": "norm",
    "q_norm.weight": "norm",
    "mlp.gate.weight": "router",
    "experts.gate_up_proj": "matrix",  # (experts, out, in)
    "experts.down_proj": "matrix",
    "self_attn.q_proj.bias": "bias",
    "mixer.local.sink": "other",
    "mixer.local.weight": "taps",
}
"""The role of every parameter whose name ends so."""


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_in_one_group(name: str) -> None:
    model = MODELS[name]()
    parameters = dict(model.named_parameters())
    known = roles(model)
    assert set(known) == set(parameters)
    groups = group_parameters(model)
    assert sorted(n for group in groups for n in group.names) == sorted(parameters)
    treated = {n: group for group in groups for n in group.names}
    for full, role in known.items():
        if role == "stream":
            continue
        wanted = {r for end, r in ROLES.items() if full.endswith(end)}
        path = full.rpartition(".gate.weight")[0]
        if path.endswith("mlp") and not hasattr(model.get_submodule(path), "experts"):
            wanted = {"matrix"}  # a gated MLP's
        assert not wanted or role in wanted, (full, role)
        assert treated[full].decay == (role in ("matrix", "router")), full
        assert treated[full].float32 == (role == "router"), full
        assert treated[full].rate == 1.0
        if role in ("norm", "bias"):
            assert parameters[full].dim() <= 2
    for path, module in model.named_modules():
        if hasattr(module, "parameter_groups") and ".stream." not in f"{path}.":
            for group in module.parameter_groups():
                for own in group.names:
                    assert treated[f"{path}.{own}"][1:] == (group.decay, group.rate, group.float32)


def test_what_is_in_each_model() -> None:
    """The table above is not passed by names that no model has."""
    ends = {end for make in MODELS.values() for name in roles(make()) for end in ROLES if name.endswith(end)}
    assert ends == set(ROLES)


def test_rates_multiply_and_frozen_parameters_are_left_out() -> None:
    model = make_model(small(stream="deep_delta"), 29)
    model.embed_tokens.weight.requires_grad_(False)
    up, norm = "layers.0.mlp.up_proj.weight", "norm.weight"
    groups = param_groups(model, lr=0.5, weight_decay=0.3, rates={up: 0.1, norm: 0.1})
    of = {name: group for group in groups for name in group["names"]}
    assert "embed_tokens.weight" not in of
    assert {name for name, group in of.items() if group["lr"] == 0.05} == {up, norm}
    assert (of[up]["weight_decay"], of[norm]["weight_decay"]) == (0.3, 0.0)
    assert all(group["peak_lr"] == group["lr"] for group in groups)
    parameters = dict(model.named_parameters())
    assert all([id(p) for p in g["params"]] == [id(parameters[n]) for n in g["names"]] for g in groups)
    torch.optim.AdamW(groups)
    with pytest.raises(ValueError, match=r"names nothing\.at\.all, which the model lacks"):
        param_groups(model, lr=1.0, rates={"nothing.at.all": 2.0})
    with pytest.raises(ValueError, match="no parameter of the model learns"):
        param_groups(model.requires_grad_(False), lr=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups[1:], "stream.[a-z_.]+ is in no parameter group"),
        (lambda groups: (*groups, groups[0]), "stream.[a-z_.]+ is in two parameter groups"),
        (lambda groups: (*groups, ParameterGroup(("ghost",))), "names stream.ghost, which it lacks"),
    ],
)
def test_groups_of_a_stream_that_do_not_fit(change: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(small(stream="deep_delta"), 29)
    stream = model.stream
    changed = change(stream.parameter_groups())
    monkeypatch.setattr(stream, "parameter_groups", lambda: changed)
    with pytest.raises(ValueError, match=message):
        group_parameters(model)


def test_names_and_patterns() -> None:
    model = make_model(small(stream="deep_delta"), 29)
    everything = [name for name, _ in model.named_parameters()]

    def learning(which: Any, **new: Any) -> set[str]:
        trainable(model, which, **new)
        return {name for name, p in model.named_parameters() if p.requires_grad}

    stream = {name for name in everything if name.startswith("stream.")}
    assert learning("stream") == learning("stream.*") == stream
    assert len(learning(["*.self_attn.q_proj.*", "layers.0.input_layernorm"])) == 2 + 1
    assert learning(["new", "embed_tokens.weight"], new=sorted(stream)) == stream | {"embed_tokens.weight"}
    assert learning("all") == set(everything)
    assert select(model, "all") == everything
    for word, hint in {
        "streem": "did you mean 'stream'?",
        "embed_tokens.wieght": "did you mean 'embed_tokens.weight'?",
        "nwe": "did you mean 'new'?",
    }.items():
        with pytest.raises(ValueError, match="no parameter is called") as caught:
            trainable(model, [word])
        assert hint in str(caught.value)
    with pytest.raises(ValueError, match="nothing is to be trained"):
        trainable(model, [])
    with pytest.raises(ValueError, match="new means no parameter: this model has no new ones"):
        trainable(model, "new")
