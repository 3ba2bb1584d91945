"""State dicts of random numbers under the originals' names and shapes, written out by hand from their code."""

from __future__ import annotations

import re
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


def spelled(pattern: str, blocks: int) -> list[str]:
    """Every name of a pattern: {i} is the number of a layer, <a|b> one of several words."""
    if words := re.search(r"<(.*?)>", pattern):
        return [name for word in words[1].split("|") for name in spelled(pattern.replace(words[0], word, 1), blocks)]
    return [pattern.replace("{i}", str(i)) for i in range(blocks if "{i}" in pattern else 1)]


def state(seed: int, layers: str, blocks: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A model of so many layers: what else it holds, and a tensor of each shape under every name of its pattern."""
    draw = Draw(seed)
    own = {name: draw(*shape) for pattern, shape in shapes.items() for name in spelled(pattern, blocks)}
    return others(draw, layers, blocks) | own


def kimi_k3(blocks: int = 5, size: int = 2, model: str = "language_model.model.") -> Sample:
    leaves = {"proj": (1, WIDTH), "norm": (WIDTH,)}
    each, out = f"{model}layers.{{i}}.<self_attention|mlp>_res", f"{model}output_attn_res"
    shapes = {f"{base}_{leaf}.weight": shape for base in (each, out) for leaf, shape in leaves.items()}
    config = {"attn_res_block_size": size, "rms_norm_eps": 1e-3}
    return Sample(
        "kimi_k3", state(1, f"{model}layers.", blocks, shapes), config, f"{model}layers.1.mlp_res_gate.weight"
    )


def deepseek_v4(blocks: int = 2, streams: int = 3, head: bool = True, files: bool = False) -> Sample:
    """In the spelling of the modules, or of released files, whose names have no prefix."""
    n, rows, model = streams, streams * streams + 2 * streams, "" if files else "model."
    base = "layers.{i}.hc_<attn|ffn>_" if files else f"{model}layers.{{i}}.<attn|ffn>_hc."
    shapes: dict[str, tuple[int, ...]] = {f"{base}fn": (rows, n * WIDTH), f"{base}base": (rows,), f"{base}scale": (3,)}
    out = "hc_head_" if files else f"{model}hc_head.hc_"
    if head:
        shapes |= {f"{out}fn": (n, n * WIDTH), f"{out}base": (n,), f"{out}scale": (1,)}
    if files:
        shapes["mtp.0.hc_attn_fn"] = (rows, n * WIDTH)  # the module that predicts one token more
    config = {"hc_mult": n, "hc_sinkhorn_iters": 4, "hc_eps": 1e-3, "rms_norm_eps": 1e-2, "num_hidden_layers": blocks}
    tensors = state(2, f"{model}layers.", blocks, shapes)
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
    config = {"norm_eps": 1e-4, "expand_last": expand_last, "round64": round64}
    return Sample("muddformer", tensors, config, "dynamic_dense.1.w3.weight")


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
    hidden, taps, base = 5, 4, "transformer.h.{i}.ddl_<attn|mlp>"
    shapes: dict[str, tuple[int, ...]] = {f"{base}.v_proj.weight": (dv, WIDTH), f"{base}.v_proj.bias": (dv,)}
    gate = "beta_out" if two_layer else "beta"
    shapes |= {f"{base}.{gate}.weight": (1, hidden if two_layer else WIDTH), f"{base}.{gate}.bias": (1,)}
    if two_layer:
        shapes[f"{base}.beta_in.weight"] = (hidden, WIDTH)
    for compressor in ("transformer.h.{i}.compress", "readout") if dv > 1 else ():
        leaf, shape = ("shortconv.weight", (WIDTH * dv, taps)) if by_token else ("weight", (WIDTH, dv))
        shapes |= {f"{compressor}.{leaf}": shape, f"{compressor}.read": (dv,)}
    if expand and dv > 1:
        shapes["input_embed.conv.weight"] = (WIDTH * dv, 1, taps)
    tensors = state(6, "transformer.h.", blocks, shapes)
    stray, optional = "transformer.h.0.compress.gate", ("input_embed.conv.weight",)
    return Sample("deep_delta", tensors, {"ddl_k_eps": 1e-3}, stray, optional)


def hyper_connections(count: int = 4, streams: int = 3, dynamic: bool = True) -> Sample:
    n, s = streams, count
    shapes: dict[str, tuple[int, ...]] = {"static_alpha": (s, n, n + 1), "static_beta": (s, n)}
    if dynamic:
        shapes |= {"dynamic_alpha_fn": (s, WIDTH, n + 1), "dynamic_beta_fn": (s, WIDTH), "ln_<weight|bias>": (s, WIDTH)}
        shapes |= {"dynamic_<alpha|beta>_scale": (s,)}
    tensors = {f"hc.{name}": t for name, t in state(7, "", 0, shapes).items() if "." not in name}
    return Sample("hyper_connections", tensors, {"ln_eps": 1e-3, "tanh": False}, "hc.dynamic_beta_gate", ("ln_bias",))


def hyper_connections_package(count: int = 12, streams: int = 3) -> Sample:
    n, base = streams, "blocks.{i}.residual."
    shapes: dict[str, tuple[int, ...]] = {f"{base}static_alpha": (n, n + 1), f"{base}static_beta": (n,)}
    shapes |= {f"{base}dynamic_alpha_fn": (WIDTH, n + 1), f"{base}dynamic_beta_fn": (WIDTH,)}
    shapes |= {f"{base}dynamic_<alpha|beta>_scale": (), f"{base}norm.gamma": (WIDTH,)}
    shapes["blocks.{i}.attend.norm.gamma"] = (WIDTH,)  # somebody else's norm
    tensors = state(8, "blocks.", count, shapes)
    return Sample("hyper_connections_package", tensors, {"tanh": True}, "blocks.0.residual.static_beta_gate")


def hy_v4(blocks: int = 2, streams: int = 3) -> Sample:
    sample, n = deepseek_v4(blocks, streams), streams
    rows = {"fn": 2 * n, "base": 2 * n, "scale": 2}
    tensors = {k: t[: rows[k.rpartition(".")[2]]] if "n_hc." in k else t for k, t in sample.tensors.items()}
    config = {"hc_mult": n, "hc_magnitude": 1.5, "hc_eps": 1e-3, "rms_norm_eps": 1e-2}
    return Sample("hy_v4", tensors, config, sample.stray)


def qwen4_exp(blocks: int = 2, streams: int = 3, rank: int = 5, model: str = "model.language_model.") -> Sample:
    wide, each = streams * WIDTH, f"{model}layers.{{i}}.<attn|mlp>_hyper_connection"
    shapes: dict[str, tuple[int, ...]] = {f"{each}.block_inject_weight.weight": (streams, wide)}
    for base in (each, f"{model}hyper_connection_mixer"):
        shapes |= {f"{base}.hc_norm.weight": (wide,), f"{base}.input_mix_weight_down.weight": (rank, wide)}
        shapes[f"{base}.input_mix_weight_up.weight"] = (wide, rank)
    config = {"hc_count": streams, "hc_lowrank": rank, "rms_norm_eps": 1e-3}
    tensors = state(12, f"{model}layers.", blocks, shapes)
    return Sample("qwen4_exp", tensors, config, f"{model}layers.1.mlp_hyper_connection.gate.weight")


def muse_spark(blocks: int = 2) -> Sample:
    shapes = {"model.layers.{i}.post_<attention|feedforward>_residual_gate.gate": (WIDTH,)}
    stray = "model.layers.0.post_attention_residual_gate.bias"
    tensors = state(13, "model.layers.", blocks, shapes)
    return Sample("muse_spark", tensors, {"residual_gate_temperature": 0.5}, stray)


def zaya(blocks: int = 2) -> Sample:
    each = "model.layers.{i}.post_<attention|mlp>_residual_scale.<hidden_states|residual>_<scale|bias>"
    shapes = {each: (WIDTH,), "model.input_hidden_states_<scale|bias>": (WIDTH,)}
    tensors = state(14, "model.layers.", blocks, shapes)
    return Sample("zaya", tensors, {}, "model.layers.0.post_mlp_residual_scale.gate")


def nanochat(blocks: int = 3) -> Sample:
    shapes = {"resid_lambdas": (blocks,), "x0_lambdas": (blocks,), "backout_lambda": (1,)}
    return Sample("nanochat", state(15, "transformer.h.", blocks, shapes), {}, "backout_lambdas")


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
