"""Attention Residuals as Kimi-K3's checkpoints name them.

    layers.{i}.self_attention_res_proj, _norm     site 2i        the attention's read
    layers.{i}.mlp_res_proj, _norm                site 2i + 1    the MLP's read
    output_attn_res_proj, _norm                   out

There a finished sum rides along one site longer before it moves into the bank, which gives the same reads. Its block
size counts Transformer layers: twice as many sub-layers here.
"""

from __future__ import annotations

import torch

from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.base import BLOCK, REQUIRED, Adapted, Family, Found, Original, Row, Setting, Written

SITES = ("{i}.self_attention_res", "{i}.mlp_res")
OUT = "output_attn_res"


class KimiK3(Family):
    """Kimi-K3, and the ports that keep its names."""

    name = "kimi_k3"
    title = "Kimi-K3"
    stream = "attention_residuals"
    rows = (
        Row("layers.", "{i}.self_attention_res_proj.weight", "(1, D)", "query[2i]"),
        Row(
            "layers.",
            "{i}.self_attention_res_norm.weight",
            "(D,)",
            "norm_weight[2i]",
            "the keys' norm, not the pre-norm",
        ),
        Row("layers.", "{i}.mlp_res_proj.weight", "(1, D)", "query[2i+1]"),
        Row("layers.", "{i}.mlp_res_norm.weight", "(D,)", "norm_weight[2i+1]"),
        Row("", "output_attn_res_proj.weight", "(1, D)", "query[2L]", "the read of the head"),
        Row("", "output_attn_res_norm.weight", "(D,)", "norm_weight[2L]"),
    )
    settings = (
        Setting(
            "attn_res_block_size",
            "block_size",
            REQUIRED,
            "Transformer layers per block; block_size here counts sub-layers, twice as many",
        ),
        Setting("rms_norm_eps", "eps", 1e-5),
    )
    namespace = r"(^|\.)(self_attention_res|mlp_res|output_attn_res)_"
    aside = r"(^|\.)mtp\."
    sign = namespace

    def read(self, found: Found, config: Original) -> Adapted:
        """Queries and key norms stacked by site, the head's last."""
        blocks = found.count()
        leaves = ("_proj.weight", "_norm.weight")
        found.require([site + leaf for site in SITES for leaf in leaves], range(blocks))
        found.require([OUT + leaf for leaf in leaves])
        names = [(site, i) for i in range(blocks) for site in SITES] + [(OUT, None)]
        width = found.size(OUT + leaves[0], dim=1)
        queries = [found.take(site + leaves[0], i, shape=(1, width))[0] for site, i in names]
        scales = [found.take(site + leaves[1], i, shape=(width,)) for site, i in names]
        size = config["attn_res_block_size"]
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{self.name}: attn_res_block_size must be a positive integer, got {size!r}")
        options = {"block_size": 2 * size, "eps": float(config["rms_norm_eps"])}
        state = {"query": torch.stack(queries), "norm_weight": torch.stack(scales)}
        return Adapted(self.stream, options, state, self.name, blocks, width)

    def write(self, made: Stream) -> Written:
        """The reverse, for the published form with whole Transformer layers per block."""
        assert isinstance(made, AttentionResiduals)
        self.refuse_kinds(made, BLOCK)
        self.refuse(
            made, window=None, read="average", query="static", weighting="softmax", key_norm=True, heads=1, scale=1.0
        )
        size = made.config.block_size
        if size % 2:
            raise ValueError(f"{self.name} counts block sizes in Transformer layers: block_size={size} is not even")
        tensors = {}
        query, scale = made.get_parameter("query"), made.get_parameter("norm_weight")
        for row, site in enumerate(made.layout.sites):
            base = OUT if site.kind == "out" else "layers." + SITES[row % 2].format(i=site.block)
            tensors[f"{base}_proj.weight"] = query[row : row + 1]
            tensors[f"{base}_norm.weight"] = scale[row]
        return Written(tensors, {"attn_res_block_size": size // 2, "rms_norm_eps": made.config.eps})
