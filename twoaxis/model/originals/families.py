"""Every family of names. Of several for one stream the first is what is written.

What an original does not have needs no list: a stream whose options do not survive the way there and back is refused.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from twoaxis.depth.stream import Stream
from twoaxis.model.originals.convert import Reading
from twoaxis.model.originals.table import (
    BLOCK,
    PLUS_ONE,
    REQUIRED,
    TRANSPOSED,
    Family,
    Row,
    Setting,
    each_site,
)

SHAPES = "from the shapes; checked"
MTP = r"(^|\.)mtp\."

# Attention Residuals. A finished sum rides along one site longer there before it moves into the bank, which gives the
# same reads.

KIMI_K3 = Family(
    "kimi_k3",
    "attention_residuals",
    rows=(
        *each_site(
            ("self_attention", "mlp"),
            Row("layers.{i}.{site}_res_proj.weight", "query", "(1, D)"),
            Row("layers.{i}.{site}_res_norm.weight", "norm_weight", "(D,)", "the keys' norm, not the pre-norm"),
        ),
        Row("output_attn_res_proj.weight", "query[2*L]", "(1, D)", "the read of the head"),
        Row("output_attn_res_norm.weight", "norm_weight[2*L]", "(D,)"),
    ),
    settings=(
        Setting("attn_res_block_size", "block_size", REQUIRED, "counts Transformer layers, ours sub-layers", times=2),
        Setting("rms_norm_eps", "eps", 1e-5),
    ),
    namespace=r"(^|\.)(self_attention_res|mlp_res|output_attn_res)_",
    aside=MTP,
    beyond=("evaluation", "group"),
)

# Hyper-connections on a manifold. Every name has two spellings, that of the modules (`attn_hc.fn`), and that of the
# files, the released ones and those transformers saves (`hc_attn_fn`). Either is read, also mixed. GLM-5 reads out the
# mean of the streams; HY-V4 does not mix them, so that the rows of comb are missing.


def _mapped(called: tuple[str, str], files: tuple[str, str], size: str, parts: str) -> tuple[Row, ...]:
    made = each_site(
        called,
        Row("layers.{i}.{site}_hc.scale", "scale", f"({parts.count(',') + 1},)", parts),
        Row("layers.{i}.{site}_hc.fn", "fn", f"({size}, n*D)", f"rows {parts}"),
        Row("layers.{i}.{site}_hc.base", "base", f"({size},)", "as fn"),
    )
    spelt = dict(zip(called, files, strict=True))
    return tuple(
        row._replace(also=(re.sub(r"(\w+)_hc\.", lambda found: f"{spelt[found[1]]}_", row.theirs),)) for row in made
    )


def _head(file: str) -> tuple[Row, ...]:
    shapes = {"fn": "(n, n*D)", "base": "(n,)", "scale": "(1,)"}
    return tuple(Row(f"hc_head.hc_{n}", f"head_{n}", shape, also=(file + n,)) for n, shape in shapes.items())


DEEPSEEK_V4 = Family(
    "deepseek_v4",
    "manifold_hyper_connections",
    rows=(*_mapped(("attn", "ffn"), ("hc_attn", "hc_ffn"), "n*n + 2*n", "pre, post, comb"), *_head("hc_head_")),
    settings=(
        Setting("hc_mult", "streams", None, SHAPES),
        Setting("hc_sinkhorn_iters", "iterations", 20),
        Setting("hc_eps", "sinkhorn_eps, pre_eps", 1e-6),
        Setting("rms_norm_eps", "norm_eps", 1e-6),
    ),
    sizes={"n": "streams"},
    always={"form": "deepseek", "readout": "head"},
    namespace=r"(^|\.)(attn_hc|ffn_hc|hc_head)\.|(^|\.)hc_(attn|ffn|head)_",
    aside=MTP,
    beyond=("form", "start", "init_std"),
)
GLM5_NEXT = dataclasses.replace(
    DEEPSEEK_V4,
    name="glm5_next",
    rows=DEEPSEEK_V4.rows[:6],
    settings=(*DEEPSEEK_V4.settings[:-1], Setting("rms_norm_eps", "norm_eps", 1e-5)),
    always={"form": "deepseek", "readout": "mean"},
    recognised=False,  # it would take a DeepSeek-V4 checkpoint that has lost its head
)
HY_V4 = dataclasses.replace(
    DEEPSEEK_V4,
    name="hy_v4",
    rows=(
        *_mapped(("attn", "ffn"), ("hc_pre.hc_attn_layer.hc", "hc_pre.hc_mlp_layer.hc"), "2*n", "pre, post"),
        *_head("hc_pre.hc_head.hc_head_"),
    ),
    settings=(
        DEEPSEEK_V4.settings[0],
        Setting("hc_magnitude", "post_scale", 2.0),
        Setting("hc_eps", "pre_eps, post_eps", 1e-6),
        Setting("rms_norm_eps", "norm_eps", 1e-5),
    ),
    always={"form": "hy_v4"},
    namespace=DEEPSEEK_V4.namespace + r"|(^|\.)hc_pre\.",
    beyond=(*DEEPSEEK_V4.beyond, "iterations", "order", "sinkhorn_eps"),
)

# MUDDFormer and MUDDPythia, the PyTorch state dict. Module i stands after block i and mixes i + 2 slots: it is the read
# before block i + 1 here, the last one that of the head. Linear weights are stored output first there. Two sizes are in
# no configuration: `expand_last` and `round64`, which all released models have.

NORMS = {"weight": "the model's, not the stream's", "bias": "only where they are layer norms"}


def _muddformer_ways(reading: Reading) -> dict[str, Any]:
    """Of the first module; one block has only the head's, which always has one way."""
    return {"ways": "one" if reading.letters["L"] > 1 and reading.each[0]["C"] == 1 else "qkvr"}


MUDDFORMER = Family(
    "muddformer",
    "muddformer",
    rows=(
        Row("dynamic_dense.{i}.w1.weight", "generator_in.{i + 1}", "(K, D)", "transposed", view=TRANSPOSED),
        Row("dense_bs.{i}", "static.{i + 1}", "(C, i + 2)", "C = 4 ways, 1 after the last block"),
        Row("dynamic_dense.{i}.w2.weight", "generator_out.{i + 1}", "(C*(i + 2), K)", "transposed", view=TRANSPOSED),
        *(
            Row(
                f"layers.{{i}}.attention_norms.{number}.{leaf}",
                f"norms.{{i}}.{way}.{leaf}",
                "(D,)",
                note,
                form=leaf,
                where="i >= 1",
            )
            for leaf, note in NORMS.items()
            for number, way in enumerate("qkv")
        ),
    ),
    settings=(
        Setting("norm_eps", "eps", 1e-6, "MUDDPythia has 1e-5"),
        Setting("use_parallel_residual", "kinds", False, "True: one parallel site, as in MUDDPythia", copied=False),
        Setting("expand_last", "expand_last", True, "as in all released models"),
        Setting("round64", "round64", True, "as in all released models"),
    ),
    each="CK",
    namespace=r"(^|\.)(dynamic_dense|dense_bs|attention_norms)\.",
    kinds=(BLOCK, ("parallel",)),
    beyond=("generator_scale",),
    options=_muddformer_ways,
    layout=lambda found: (found.letters["L"], ("parallel",) if found.setting("use_parallel_residual") else BLOCK),
    translate=lambda made: {"use_parallel_residual": made.sites[0].kind == "parallel"},
)

# DenseFormer, as its package names it (DWAModules, anywhere in a model) and as the model of its experiments does. The
# two give period and dilation different meanings: in the experiments only every period-th block output is kept, and the
# dilation counts those. experiments(dilation k, period p) is package(dilation k·p, period p), which is ours.


def _package_letters(reading: Reading) -> dict[str, int]:
    """What the configuration says; an average after every block tells how many there are."""
    period = reading.setting("period")
    blocks = reading.setting("n_blocks") or (reading.keys.count if period == 1 else None)
    if blocks is None:
        raise ValueError(
            f"{reading.family.name}: how many blocks follow the last average is not in the tensors with a period of "
            f"{period}: give config={{'n_blocks': ...}}"
        )
    return {"L": blocks, "period": period, "dilation": reading.setting("dilation")}


def _experiments_letters(reading: Reading) -> dict[str, int]:
    """What the configuration says; the names of the blocks, where they are there, tell the number of groups."""
    groups = [re.search(r"(?:^|\.)h\.(\d+)\.\d+\.", key) for key in reading.keys.all]
    count = max((int(found[1]) + 1 for found in groups if found), default=reading.keys.count)
    return {"L": count, **{name: reading.setting(name) for name in ("increase_T_every", "dilation_factor")}}


def _in_groups(made: Stream) -> dict[str, int]:
    """Counted in groups, where they come out even."""
    period, dilation, blocks = made.config.period, made.config.dilation, made.layout.blocks
    if blocks % period or dilation % period:
        raise ValueError(
            f"{DENSEFORMER_EXPERIMENTS.name} needs a period that divides the blocks and the dilation, got "
            f"period={period}, blocks={blocks}, dilation={dilation}"
        )
    return {"L": blocks // period, "increase_T_every": period, "dilation_factor": dilation // period}


DENSEFORMER = Family(
    "denseformer",
    "denseformer",
    rows=(Row("alphas.{i}.weight", "alpha.{i + 1}", "(1, (i + 1)//dilation + 1)", where="(i + 1) % period == 0"),),
    settings=(
        Setting("n_blocks", "blocks", None, "needed if the period is above 1", copied=False),
        Setting("dilation", "dilation", 1),
        Setting("period", "period", 1),
    ),
    sizes={"dilation": "dilation", "period": "period"},
    namespace=r"(^|\.)alphas\.\d+\.",
    layers="",
    kinds=(),
    find=_package_letters,
    translate=lambda made: {"n_blocks": made.layout.blocks},
)
DENSEFORMER_EXPERIMENTS = Family(
    "denseformer_experiments",
    "denseformer",
    rows=(
        Row("weights.{i}.weight", "alpha.{(i + 1)*increase_T_every}", "(1, (i + 1)//dilation_factor + 1)", "by group"),
    ),
    settings=(
        Setting("increase_T_every", "period", REQUIRED, "blocks of a group", copied=False),
        Setting("dilation_factor", "dilation", 1, "times increase_T_every", copied=False),
    ),
    namespace=r"(^|\.)weights\.\d+\.weight$",
    layers="",
    kinds=(),
    find=_experiments_letters,
    sizes={"increase_T_every": "period"},
    options=lambda found: {"dilation": found.letters["dilation_factor"] * found.letters["increase_T_every"]},
    layout=lambda reading: (reading.letters["L"] * reading.letters["increase_T_every"], BLOCK),
    letters=_in_groups,
    translate=lambda made: {name: n for name, n in _in_groups(made).items() if name != "L"},
)

# Deep Delta Learning. Which variant it is, is in the names and shapes. Two settings are in neither and differ between
# files of one checkpoint: the fused file's k_eps is ddl_k_eps times sqrt(d), and it alone honours
# ddl_state_dv_shortconv_causal. k_eps= and channel_padding= are given where that file trained the model.


def _compressor(base: str, ours: str, entry: str) -> tuple[Row, ...]:
    weight = f"{ours}_weight{entry}"
    return (
        Row(f"{base}.shortconv.weight", weight, "(D*v, taps)", "row d*v + channel", form="compress=token"),
        Row(f"{base}.weight", weight, "(D, v)", form="compress=channel"),
        Row(f"{base}.weight", weight, "(D, v, taps)", "in later files", form="compress=token"),
        Row(f"{base}.read", f"{ours}_read{entry}", "(v,)", where="v > 1"),
    )


def _delta_options(reading: Reading) -> dict[str, Any]:
    """The kind of value, from the configuration."""
    name, channels, setting = reading.family.name, reading.letters["v"], reading.setting
    if setting("residual_branch_mult") != 1.0:
        raise ValueError(f"{name}: residual_branch_mult={setting('residual_branch_mult')} has no counterpart here")
    if channels > 1:
        reading.agree("ddl_value_channels", channels)
        if setting("ddl_state_dv_shortconv_causal") and "channel_padding" not in reading.overrides:
            raise ValueError(
                f"{name}: ddl_state_dv_shortconv_causal=True is heeded by some of the original's files only: "
                "give channel_padding='causal' or 'same', as the one that trained this model does"
            )
    constant = "ddl_v_constant" if channels > 1 else "ddl_v_dim1_constant"
    value = "constant" if setting(constant) else "sigmoid" if setting("ddl_v_sigmoid") else "linear"
    return {"value": value, "value_constant": setting(f"{constant}_value")}


DEEP_DELTA = Family(
    "deep_delta",
    "deep_delta",
    layers="transformer.h.",
    rows=(
        *each_site(
            ("ddl_attn", "ddl_mlp"),
            Row("transformer.h.{i}.{site}.v_proj.weight", "value_weight", "(v, D)", "unused if the value is constant"),
            Row("transformer.h.{i}.{site}.v_proj.bias", "value_bias", "(v,)"),
            Row("transformer.h.{i}.{site}.beta.weight", "gate_weight", "(1, D)", form="gate=linear"),
            Row("transformer.h.{i}.{site}.beta.bias", "gate_bias", "(1,)", form="gate=linear"),
            Row("transformer.h.{i}.{site}.beta_in.weight", "gate_in", "(H, D)", form="gate=two_layer"),
            Row("transformer.h.{i}.{site}.beta_out.weight", "gate_weight", "(1, H)", form="gate=two_layer"),
            Row("transformer.h.{i}.{site}.beta_out.bias", "gate_bias", "(1,)", form="gate=two_layer"),
        ),
        *_compressor("transformer.h.{i}.compress", "compress", "[i]"),
        *_compressor("readout", "readout", ""),
        Row("input_embed.conv.weight", "expand_weight", "(D*v, 1, E)", "row d*v + channel", form="expand=conv"),
    ),
    settings=(
        Setting("ddl_k_eps", "k_eps", 1e-5, "the fused file multiplies it by sqrt(d): give k_eps= instead"),
        Setting("ddl_v_sigmoid", "value", True, "False: linear", copied=False),
        Setting("ddl_v_sigmoid_scale", "value_scale", 4.0),
        Setting("ddl_v_constant", "value", False, "True: constant; d_v > 1", copied=False),
        Setting("ddl_v_constant_value", "value_constant", 2.0, "d_v > 1", copied=False),
        Setting("ddl_v_dim1_constant", "value", False, "True: constant; d_v = 1", copied=False),
        Setting("ddl_v_dim1_constant_value", "value_constant", 2.0, "d_v = 1", copied=False),
        Setting("ddl_value_channels", "value_channels", None, "from the shapes; checked if d_v > 1", copied=False),
        Setting("ddl_state_dv_shortconv_causal", "channel_padding", False, "True: give channel_padding=", copied=False),
        Setting("residual_branch_mult", "none", 1.0, "refused unless 1: there is no such factor here", copied=False),
    ),
    sizes={"v": "value_channels", "H": "gate_hidden", "taps": "token_taps", "E": "expand_taps"},
    always={"gate": "linear", "compress": "channel", "expand": "repeat"},
    namespace=r"(^|\.)(ddl_attn|ddl_mlp|compress|readout|input_embed)\.",
    beyond=("gate_start", "gate_hidden", "token_taps", "expand_taps", "value_constant"),
    options=_delta_options,
    unused=lambda options: ("value_weight", "value_bias") if options["value"] == "constant" else (),
    translate=lambda made: {"ddl_v_sigmoid": made.config.value == "sigmoid"},
)

# Hyper-connections: the names of the paper's algorithm, stacked by sub-layer, and the package
# lucidrains/hyper-connections, one module per sub-layer anywhere in a model.

OWN = r"(^|\.)(static|dynamic)_(alpha|beta)\w*(\.|$)"


def _package_options(reading: Reading) -> dict[str, Any]:
    """Refuses modules whose order is not in their names."""
    patterns = {re.sub(r"\d+", "#", path) for path in reading.keys.paths}
    if len(patterns) > 1:
        raise ValueError(
            f"{reading.family.name}: modules are called {', '.join(sorted(patterns))}; which of them comes first in a "
            "block is not in the names: read them one kind at a time, or rename them"
        )
    return {}


HYPER_CONNECTIONS = Family(
    "hyper_connections",
    "hyper_connections",
    rows=(
        Row("static_alpha", "static_alpha", "(S, n, n + 1)", "column 0 feeds the sub-layer"),
        Row("static_beta", "static_beta", "(S, n)"),
        Row("dynamic_alpha_fn", "dynamic_alpha_fn", "(S, D, n + 1)", form="dynamic=True"),
        Row("dynamic_alpha_scale", "dynamic_alpha_scale", "(S,)", form="dynamic=True"),
        Row("dynamic_beta_fn", "dynamic_beta_fn", "(S, D)", form="dynamic=True"),
        Row("dynamic_beta_scale", "dynamic_beta_scale", "(S,)", form="dynamic=True"),
        Row("ln_weight", "norm_weight", "(S, D)", form="affine=True"),
        Row("ln_bias", "norm_bias", "(S, D)", "absent: zero", form="affine=True", absent=0.0),
    ),
    settings=(
        Setting("tanh", "tanh", True),
        Setting("ln_eps", "eps", 1e-5),
        Setting("readout", "readout", "sum"),
    ),
    sizes={"n": "streams"},
    always={"dynamic": False, "affine": False},
    namespace=OWN + r"|(^|\.)ln_(weight|bias)$",
    layers="",
    kinds=(),
    beyond=("scale_start",),
)
HYPER_CONNECTIONS_PACKAGE = Family(
    "hyper_connections_package",
    "hyper_connections",
    rows=(
        Row("static_alpha", "static_alpha[i]", "(n, n + 1)", "i numbers the modules by the numbers in their paths"),
        Row("static_beta", "static_beta[i]", "(n,)"),
        Row("dynamic_alpha_fn", "dynamic_alpha_fn[i]", "(D, n + 1)"),
        Row("dynamic_alpha_scale", "dynamic_alpha_scale[i]", "()"),
        Row("dynamic_beta_fn", "dynamic_beta_fn[i]", "(D,)"),
        Row("dynamic_beta_scale", "dynamic_beta_scale[i]", "()"),
        Row("norm.gamma", "norm_weight[i]", "(D,)", "one is added", view=PLUS_ONE),
    ),
    settings=(Setting("tanh", "tanh", True),),
    sizes={"n": "streams"},
    always={"norm": "rms", "eps": 0.0},
    namespace=OWN,
    layers="",
    numbered_modules=True,
    writes=False,  # a model keeps these modules where it likes
    options=_package_options,
)

# Residuals that ship in single models of transformers (Qwen4-Exp, Muse-Spark, ZAYA1), and karpathy/nanochat's.


def _gated(module: str) -> tuple[Row, ...]:
    return (
        Row(f"{module}.hc_norm.weight", "norm_weight", "(n*D,)"),
        Row(f"{module}.input_mix_weight_down.weight", "down", "(r, n*D)"),
        Row(f"{module}.input_mix_weight_up.weight", "up", "(n*D, r)"),
    )


QWEN4_EXP = Family(
    "qwen4_exp",
    "gated_streams",
    rows=(
        *each_site(
            ("attn", "mlp"),
            Row("layers.{i}.{site}_hyper_connection.block_inject_weight.weight", "inject", "(n, n*D)"),
            *_gated("layers.{i}.{site}_hyper_connection"),
        ),
        *(row._replace(ours=f"head_{row.ours}") for row in _gated("hyper_connection_mixer")),
    ),
    settings=(
        Setting("hc_count", "streams", None, SHAPES),
        Setting("hc_lowrank", "rank", None, SHAPES),
        Setting("rms_norm_eps", "eps", 1e-6),
    ),
    sizes={"n": "streams", "r": "rank"},
    namespace=r"(^|\.)((attn|mlp)_hyper_connection|hyper_connection_mixer)\.",
    aside=MTP,
)
NANOCHAT = Family(
    "nanochat",
    "scaled",
    rows=(
        Row("resid_lambdas", "carry", "(L,)"),
        Row("x0_lambdas", "skip", "(L,)"),
        Row("backout_lambda", "back_out", "(1,)"),
    ),
    always={"form": "x0", "post_norm": False},
    namespace=r"(^|\.)(resid|x0|backout)_lambdas?$",
    beyond=("start", "rank", "eps", "post_norm", "temperature", "floor"),
)
MUSE_SPARK = Family(
    "muse_spark",
    "scaled",
    rows=each_site(("attention", "feedforward"), Row("layers.{i}.post_{site}_residual_gate.gate", "gate", "(D,)")),
    settings=(Setting("residual_gate_temperature", "temperature", 0.3),),
    always={"form": "variance", "post_norm": False},
    namespace=r"(^|\.)post_\w+_residual_gate\.",
    beyond=("start", "rank", "eps"),
)
ZAYA = Family(
    "zaya",
    "scaled",
    rows=(
        *each_site(
            ("attention", "mlp"),
            Row("layers.{i}.post_{site}_residual_scale.hidden_states_scale", "gain", "(D,)"),
            Row("layers.{i}.post_{site}_residual_scale.hidden_states_bias", "gain_shift", "(D,)"),
            Row("layers.{i}.post_{site}_residual_scale.residual_scale", "keep", "(D,)"),
            Row("layers.{i}.post_{site}_residual_scale.residual_bias", "keep_shift", "(D,)"),
        ),
        Row("input_hidden_states_scale", "open_scale", "(D,)"),
        Row("input_hidden_states_bias", "open_shift", "(D,)"),
    ),
    always={"form": "affine", "post_norm": False},
    namespace=r"(^|\.)post_(attention|mlp)_residual_scale\.|(^|\.)input_hidden_states_(scale|bias)$",
    beyond=NANOCHAT.beyond,
)

FAMILIES = {family.name: family for family in tuple(globals().values()) if isinstance(family, Family)}
"""In the order above, by the name that `like` takes."""
