"""Attention Residuals as Kimi-K3's checkpoints name them.

    layers.{i}.self_attention_res_proj, _norm     site 2i        the attention's read
    layers.{i}.mlp_res_proj, _norm                site 2i + 1    the MLP's read
    output_attn_res_proj, _norm                   out

There a finished sum rides along one site longer before it moves into the bank, which gives the same reads. Its block
size counts Transformer layers: twice as many sub-layers here.
"""

from __future__ import annotations

from twoaxis.model.originals.family import Family
from twoaxis.model.originals.table import REQUIRED, Row, Setting

LAYERS = "Transformer layers per block; block_size here counts sub-layers, twice as many"


class KimiK3(Family):
    """Kimi-K3, and the ports that keep its names."""

    name = "kimi_k3"
    stream = "attention_residuals"
    layers = "layers."
    rows = (
        Row("layers.{i}.self_attention_res_proj.weight", "query[2*i]", "(1, D)"),
        Row(
            "layers.{i}.self_attention_res_norm.weight", "norm_weight[2*i]", "(D,)", "the keys' norm, not the pre-norm"
        ),
        Row("layers.{i}.mlp_res_proj.weight", "query[2*i + 1]", "(1, D)"),
        Row("layers.{i}.mlp_res_norm.weight", "norm_weight[2*i + 1]", "(D,)"),
        Row("output_attn_res_proj.weight", "query[2*L]", "(1, D)", "the read of the head"),
        Row("output_attn_res_norm.weight", "norm_weight[2*L]", "(D,)"),
    )
    settings = (
        Setting("attn_res_block_size", "block_size", REQUIRED, LAYERS, times=2),
        Setting("rms_norm_eps", "eps", 1e-5),
    )
    namespace = r"(^|\.)(self_attention_res|mlp_res|output_attn_res)_"
    aside = r"(^|\.)mtp\."
    beyond = ("evaluation", "group")
