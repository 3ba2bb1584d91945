"""State dicts of random numbers under the originals' names and shapes, written out by hand from their code."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

WIDTH = 8


class Sample(NamedTuple):
    """A family's state dict and its configuration."""

    family: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    stray: str
    """A key of the method's own namespace that nothing takes, or what is missing because of it."""
    optional: tuple[str, ...] = ()
    """Endings of keys whose absence is another variant of the original, not an error."""


class Draw:
    """Random tensors, always the same ones."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype) / 2


def others(draw: Draw, layers: str, blocks: int) -> dict[str, Tensor]:
    """What else a model holds; nobody may take it."""
    found = {"lm_head.weight": draw(16, WIDTH), f"{layers}norm.weight": draw(WIDTH)}
    for i in range(blocks):
        found[f"{layers}{i}.self_attn.q_proj.weight"] = draw(WIDTH, WIDTH)
        found[f"{layers}{i}.mlp.up_proj.weight"] = draw(WIDTH, WIDTH)
        found[f"{layers}{i}.input_layernorm.weight"] = draw(WIDTH)
    return found


def kimi_k3(blocks: int = 5, size: int = 2, model: str = "language_model.model.") -> Sample:
    draw = Draw(1)
    tensors = others(draw, f"{model}layers.", blocks)
    for i in range(blocks):
        for site in ("self_attention", "mlp"):
            tensors[f"{model}layers.{i}.{site}_res_proj.weight"] = draw(1, WIDTH)
            tensors[f"{model}layers.{i}.{site}_res_norm.weight"] = 1 + draw(WIDTH)
    tensors[f"{model}output_attn_res_proj.weight"] = draw(1, WIDTH)
    tensors[f"{model}output_attn_res_norm.weight"] = 1 + draw(WIDTH)
    return Sample(
        "kimi_k3",
        tensors,
        {"attn_res_block_size": size, "rms_norm_eps": 1e-3},
        f"{model}layers.1.mlp_res_gate.weight",
    )


def deepseek_v4(blocks: int = 2, streams: int = 3, head: bool = True, files: bool = False) -> Sample:
    """In the spelling of the modules, or of released files, whose names have no prefix."""
    draw, n = Draw(2), streams
    model = "" if files else "model."
    tensors = others(draw, f"{model}layers.", blocks)
    for i in range(blocks):
        for site in ("attn", "ffn"):
            base = f"layers.{i}.hc_{site}_" if files else f"{model}layers.{i}.{site}_hc."
            tensors |= {f"{base}fn": draw(n * n + 2 * n, n * WIDTH), f"{base}base": draw(n * n + 2 * n)}
            tensors[f"{base}scale"] = draw(3)
    base = "hc_head_" if files else f"{model}hc_head.hc_"
    if head:
        tensors |= {f"{base}fn": draw(n, n * WIDTH), f"{base}base": draw(n), f"{base}scale": draw(1)}
    if files:
        tensors["mtp.0.hc_attn_fn"] = draw(n * n + 2 * n, n * WIDTH)  # the module that predicts one token more
    config = {"hc_mult": n, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "rms_norm_eps": 1e-2, "num_hidden_layers": blocks}
    return Sample("deepseek_v4" if head else "glm5_next", tensors, config, f"{model}layers.0.hc_attn_gate")


def muddformer(blocks: int = 4, ways: int = 4, expand_last: bool = True, round64: bool = True) -> Sample:
    draw = Draw(3)
    tensors = others(draw, "layers.", blocks)
    for i in range(blocks):
        last = i == blocks - 1
        n, c = i + 2, 1 if last else ways
        hidden = c * n * (4 if last and expand_last else 1)
        hidden = (hidden // 64 + 1) * 64 if round64 else hidden
        tensors[f"dynamic_dense.{i}.w1.weight"] = draw(hidden, WIDTH)
        tensors[f"dynamic_dense.{i}.w2.weight"] = draw(c * n, hidden) / 8
        tensors[f"dense_bs.{i}"] = draw(c, n)
        if i > 0 and ways == 4:
            tensors |= {f"layers.{i}.attention_norms.{w}.weight": draw(WIDTH) for w in range(3)}
            tensors |= {f"layers.{i}.attention_norms.{w}.bias": draw(WIDTH) for w in range(3)}
    return Sample("muddformer", tensors, {"norm_eps": 1e-4}, "dynamic_dense.1.w3.weight")


def denseformer(blocks: int = 6, dilation: int = 2, period: int = 3) -> Sample:
    draw = Draw(4)
    tensors = others(draw, "transformer.h.", blocks)
    for i in range(blocks):
        if (i + 1) % period == 0:
            tensors[f"dwa_modules.alphas.{i}.weight"] = draw(1, (i + 1 + dilation) // dilation)
    config = {"n_blocks": blocks, "dilation": dilation, "period": period}
    return Sample("denseformer", tensors, config, "dwa_modules.alphas.3.weight")


def denseformer_experiments(groups: int = 4, dilation: int = 2, period: int = 3) -> Sample:
    draw = Draw(5)
    tensors = {"lm_head.weight": draw(16, WIDTH)}
    for r in range(groups):
        tensors |= {f"transformer.h.{r}.{b}.ln_1.weight": draw(WIDTH) for b in range(period)}
        tensors[f"weights.{r}.weight"] = draw(1, (r + 2 + dilation - 1) // dilation)
    config = {"increase_T_every": period, "dilation_factor": dilation}
    return Sample("denseformer_experiments", tensors, config, "weights.4.weight")


def deep_delta(
    blocks: int = 3, dv: int = 3, by_token: bool = False, expand: bool = True, two_layer: bool = False
) -> Sample:
    draw, hidden, taps = Draw(6), 5, 4
    tensors = others(draw, "transformer.h.", blocks)

    def compressor(base: str) -> dict[str, Tensor]:
        weight = (
            {f"{base}.shortconv.weight": draw(WIDTH * dv, taps)} if by_token else {f"{base}.weight": draw(WIDTH, dv)}
        )
        return {**weight, f"{base}.read": draw(dv)}

    for i in range(blocks):
        for site in ("attn", "mlp"):
            base = f"transformer.h.{i}.ddl_{site}"
            if two_layer:
                tensors[f"{base}.beta_in.weight"] = draw(hidden, WIDTH)
                tensors |= {f"{base}.beta_out.weight": draw(1, hidden), f"{base}.beta_out.bias": draw(1)}
            else:
                tensors |= {f"{base}.beta.weight": draw(1, WIDTH), f"{base}.beta.bias": draw(1)}
            tensors |= {f"{base}.v_proj.weight": draw(dv, WIDTH), f"{base}.v_proj.bias": draw(dv)}
        tensors |= compressor(f"transformer.h.{i}.compress") if dv > 1 else {}
    tensors |= compressor("readout") if dv > 1 else {}
    if expand and dv > 1:
        tensors["input_embed.conv.weight"] = draw(WIDTH * dv, 1, taps)
    return Sample(
        "deep_delta",
        tensors,
        {"ddl_k_eps": 1e-3},
        "transformer.h.0.compress.gate",
        ("input_embed.conv.weight",),
    )


def hyper_connections(count: int = 4, streams: int = 3, dynamic: bool = True) -> Sample:
    draw, n = Draw(7), streams
    tensors = {"hc.static_alpha": draw(count, n, n + 1), "hc.static_beta": draw(count, n)}
    if dynamic:
        tensors |= {"hc.dynamic_alpha_fn": draw(count, WIDTH, n + 1), "hc.dynamic_alpha_scale": draw(count)}
        tensors |= {"hc.dynamic_beta_fn": draw(count, WIDTH), "hc.dynamic_beta_scale": draw(count)}
        tensors |= {"hc.ln_weight": draw(count, WIDTH), "hc.ln_bias": draw(count, WIDTH)}
    return Sample("hyper_connections", tensors, {"ln_eps": 1e-3, "tanh": False}, "hc.dynamic_beta_gate", ("ln_bias",))


def hyper_connections_package(count: int = 12, streams: int = 3) -> Sample:
    draw, n = Draw(8), streams
    tensors = others(draw, "blocks.", count)
    for i in range(count):
        base = f"blocks.{i}.residual."
        tensors |= {f"{base}static_alpha": draw(n, n + 1), f"{base}static_beta": draw(n)}
        tensors |= {f"{base}dynamic_alpha_fn": draw(WIDTH, n + 1), f"{base}dynamic_alpha_scale": draw(1)[0]}
        tensors |= {f"{base}dynamic_beta_fn": draw(WIDTH), f"{base}dynamic_beta_scale": draw(1)[0]}
        tensors[f"{base}norm.gamma"] = draw(WIDTH)
        tensors[f"blocks.{i}.attend.norm.gamma"] = draw(WIDTH)  # somebody else's norm
    return Sample(
        "hyper_connections_package",
        tensors,
        {"tanh": True},
        "blocks.0.residual.static_beta_gate",
    )


def hy_v4(blocks: int = 2, streams: int = 3) -> Sample:
    sample, n = deepseek_v4(blocks, streams), streams
    rows = {"fn": 2 * n, "base": 2 * n, "scale": 2}
    tensors = {k: t[: rows[k.rpartition(".")[2]]] if "n_hc." in k else t for k, t in sample.tensors.items()}
    config = {"hc_mult": n, "hc_magnitude": 1.5, "hc_eps": 1e-3, "rms_norm_eps": 1e-2}
    return Sample("hy_v4", tensors, config, sample.stray)


def qwen4_exp(blocks: int = 2, streams: int = 3, rank: int = 5, model: str = "model.language_model.") -> Sample:
    draw, wide = Draw(12), streams * WIDTH
    tensors = others(draw, f"{model}layers.", blocks)
    sites = [f"layers.{i}.{site}_hyper_connection" for i in range(blocks) for site in ("attn", "mlp")]
    for module in (*sites, "hyper_connection_mixer"):
        tensors[f"{model}{module}.hc_norm.weight"] = draw(wide)
        tensors[f"{model}{module}.input_mix_weight_down.weight"] = draw(rank, wide)
        tensors[f"{model}{module}.input_mix_weight_up.weight"] = draw(wide, rank)
        if module in sites:
            tensors[f"{model}{module}.block_inject_weight.weight"] = draw(streams, wide)
    config = {"hc_count": streams, "hc_lowrank": rank, "rms_norm_eps": 1e-3}
    return Sample("qwen4_exp", tensors, config, f"{model}layers.1.mlp_hyper_connection.gate.weight")


def muse_spark(blocks: int = 2) -> Sample:
    draw = Draw(13)
    tensors = others(draw, "model.layers.", blocks)
    for i in range(blocks):
        tensors |= {f"model.layers.{i}.post_{s}_residual_gate.gate": draw(WIDTH) for s in ("attention", "feedforward")}
    stray = "model.layers.0.post_attention_residual_gate.bias"
    return Sample("muse_spark", tensors, {"residual_gate_temperature": 0.5}, stray)


def zaya(blocks: int = 2) -> Sample:
    draw = Draw(14)
    tensors = others(draw, "model.layers.", blocks)
    for i in range(blocks):
        for site in ("attention", "mlp"):
            for name in ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias"):
                tensors[f"model.layers.{i}.post_{site}_residual_scale.{name}"] = draw(WIDTH)
    tensors |= {f"model.input_hidden_states_{name}": draw(WIDTH) for name in ("scale", "bias")}
    return Sample("zaya", tensors, {}, "model.layers.0.post_mlp_residual_scale.gate")


def nanochat(blocks: int = 3) -> Sample:
    draw = Draw(15)
    tensors = others(draw, "transformer.h.", blocks)
    tensors |= {"resid_lambdas": draw(blocks), "x0_lambdas": draw(blocks), "backout_lambda": draw(1)}
    return Sample("nanochat", tensors, {}, "backout_lambdas")


SAMPLES = (
    hy_v4(),
    qwen4_exp(),
    muse_spark(),
    zaya(),
    nanochat(),
    kimi_k3(),
    deepseek_v4(),
    deepseek_v4(files=True),
    deepseek_v4(head=False),
    muddformer(),
    muddformer(ways=1, expand_last=False, round64=False),
    denseformer(),
    denseformer_experiments(),
    deep_delta(dv=1),
    deep_delta(),
    deep_delta(by_token=True, two_layer=True),
    deep_delta(by_token=True, expand=False),
    hyper_connections(),
    hyper_connections(dynamic=False),
    hyper_connections_package(),
)
