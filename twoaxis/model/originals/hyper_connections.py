"""Hyper-connections: as in DeepSeek-V4, GLM-5 and HY-V4, and plain ones by the paper's names and the package's.

DeepSeek-V4 has two spellings of every name: that of the modules (`attn_hc.fn`), and that of the files, the released
ones and those transformers saves (`hc_attn_fn`). Either is read, also mixed.
"""

from __future__ import annotations

import re
from typing import Any

from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.family import BLOCK, Family, Kinds, Reading
from twoaxis.model.originals.keys import Keys
from twoaxis.model.originals.table import PLUS_ONE, Row, Setting, evaluate


def _site_rows(
    site: str, entry: str, file: str, rows: str = "n*n + 2*n", parts: str = "pre, post, comb"
) -> tuple[Row, ...]:
    def row(leaf: str, shape: str, note: str) -> Row:
        return Row(f"layers.{{i}}.{site}_hc.{leaf}", f"{leaf}[{entry}]", shape, note, (f"layers.{{i}}.{file}_{leaf}",))

    return (
        row("fn", f"({rows}, n*D)", f"rows {parts}"),
        row("base", f"({rows},)", "as fn"),
        row("scale", f"({parts.count(',') + 1},)", parts),
    )


class DeepSeekV4(Family):
    """DeepSeek-V4, in transformers and as released."""

    name = "deepseek_v4"
    stream = "manifold_hyper_connections"
    layers = "layers."
    rows = (
        *_site_rows("attn", "2*i", "hc_attn"),
        *_site_rows("ffn", "2*i + 1", "hc_ffn"),
        Row("hc_head.hc_fn", "head_fn", "(n, n*D)", also=("hc_head_fn",)),
        Row("hc_head.hc_base", "head_base", "(n,)", also=("hc_head_base",)),
        Row("hc_head.hc_scale", "head_scale", "(1,)", also=("hc_head_scale",)),
    )
    settings = (
        Setting("hc_mult", "streams", None, "told by the shapes; checked"),
        Setting("hc_sinkhorn_iters", "iterations", 20),
        Setting("hc_eps", "sinkhorn_eps, pre_eps", 1e-6),
        Setting("rms_norm_eps", "norm_eps", 1e-6),
    )
    sizes = (("n", "streams"),)
    namespace = r"(^|\.)(attn_hc|ffn_hc|hc_head)\.|(^|\.)hc_(attn|ffn|head)_"
    aside = r"(^|\.)mtp\."
    beyond = ("form", "start", "init_std")
    readout = "head"

    def detect(self, keys: Keys) -> bool:
        """By the names, which others have too, and the number of scales."""
        scale = self.rows[2]
        sizes = {t.numel() for t in keys.of(scale).values()}
        return super().detect(keys) and sizes <= {evaluate(scale.dims[0], {})}

    def options(self, reading: Reading) -> dict[str, Any]:
        """What is always so there."""
        return {"form": "deepseek", "readout": self.readout}


class Glm5Next(DeepSeekV4):
    """GLM-5's text decoder: DeepSeek-V4's sites, but the mean of the streams is read out."""

    name = "glm5_next"
    rows = DeepSeekV4.rows[:6]
    settings = (*DeepSeekV4.settings[:-1], Setting("rms_norm_eps", "norm_eps", 1e-5))
    readout = "mean"
    recognised = False  # it would take a DeepSeek-V4 checkpoint that has lost its head


class HyV4(DeepSeekV4):
    """HY-V4: DeepSeek-V4's names without the rows of comb, because streams are not mixed."""

    name = "hy_v4"
    rows = (
        *_site_rows("attn", "2*i", "hc_pre.hc_attn_layer.hc", "2*n", "pre, post"),
        *_site_rows("ffn", "2*i + 1", "hc_pre.hc_mlp_layer.hc", "2*n", "pre, post"),
        *(r._replace(also=(r.theirs.replace("hc_head.hc_", "hc_pre.hc_head.hc_head_"),)) for r in DeepSeekV4.rows[6:]),
    )
    settings = (
        DeepSeekV4.settings[0],
        Setting("hc_magnitude", "post_scale", 2.0),
        Setting("hc_eps", "pre_eps, post_eps", 1e-6),
        Setting("rms_norm_eps", "norm_eps", 1e-5),
    )
    namespace = DeepSeekV4.namespace + r"|(^|\.)hc_pre\."
    beyond = (*DeepSeekV4.beyond, "iterations", "order", "sinkhorn_eps")

    def options(self, reading: Reading) -> dict[str, Any]:
        """What is always so there."""
        return {"form": "hy_v4"}


OWN = r"(^|\.)(static|dynamic)_(alpha|beta)\w*(\.|$)"
DYNAMIC = "absent in the static form"


class HyperConnectionsPaper(Family):
    """The names of the paper's algorithm, stacked by sub-layer."""

    name = "hyper_connections"
    stream = "hyper_connections"
    rows = (
        Row("static_alpha", "static_alpha", "(L, n, n + 1)", "column 0 feeds the sub-layer"),
        Row("static_beta", "static_beta", "(L, n)"),
        Row("dynamic_alpha_fn", "dynamic_alpha_fn", "(L, D, n + 1)", DYNAMIC, form="dynamic"),
        Row("dynamic_alpha_scale", "dynamic_alpha_scale", "(L,)", DYNAMIC, form="dynamic"),
        Row("dynamic_beta_fn", "dynamic_beta_fn", "(L, D)", DYNAMIC, form="dynamic"),
        Row("dynamic_beta_scale", "dynamic_beta_scale", "(L,)", DYNAMIC, form="dynamic"),
        Row("ln_weight", "norm_weight", "(L, D)", "absent for a norm without parameters", form="affine"),
        Row("ln_bias", "norm_bias", "(L, D)", "absent: zero", form="affine", absent=0.0),
    )
    settings = (
        Setting("tanh", "tanh", True),
        Setting("ln_eps", "eps", 1e-5),
        Setting("readout", "readout", "sum"),
    )
    sizes = (("n", "streams"),)
    namespace = OWN + r"|(^|\.)ln_(weight|bias)$"
    kinds = ()
    beyond = ("scale_start",)

    def options(self, reading: Reading) -> dict[str, Any]:
        """The form, from what is there."""
        return {form: form in reading.forms for form in ("dynamic", "affine")}

    def layout(self, reading: Reading) -> tuple[int, Kinds]:
        """Attention and MLP in turn; an odd sub-layer stands by itself."""
        pairs, odd = divmod(reading.letters["L"], 2)
        return pairs + odd, [*[BLOCK] * pairs, BLOCK[:1]] if odd else BLOCK

    def forms(self, made: Stream) -> set[str]:
        """By the options."""
        assert isinstance(made, HyperConnections)
        affine = made.config.dynamic and made.config.affine
        return {form for form, has in (("dynamic", made.config.dynamic), ("affine", affine)) if has}

    def letters(self, made: Stream) -> dict[str, int]:
        """`L` counts sub-layers."""
        return super().letters(made) | {"L": len(made.sites)}


class HyperConnectionsPackage(HyperConnectionsPaper):
    """The package lucidrains/hyper-connections: one module per sub-layer, anywhere in a model."""

    name = "hyper_connections_package"
    rows = (
        Row("static_alpha", "static_alpha[i]", "(n, n + 1)", "i numbers the modules by the numbers in their paths"),
        Row("static_beta", "static_beta[i]", "(n,)"),
        Row("dynamic_alpha_fn", "dynamic_alpha_fn[i]", "(D, n + 1)"),
        Row("dynamic_alpha_scale", "dynamic_alpha_scale[i]", "()"),
        Row("dynamic_beta_fn", "dynamic_beta_fn[i]", "(D,)"),
        Row("dynamic_beta_scale", "dynamic_beta_scale[i]", "()"),
        Row("norm.gamma", "norm_weight[i]", "(D,)", "one is added", view=PLUS_ONE),
    )
    settings = (Setting("tanh", "tanh", True),)
    namespace = OWN
    numbered_modules = True
    writes = False  # a model keeps these modules where it likes

    def options(self, reading: Reading) -> dict[str, Any]:
        """What is always so there."""
        patterns = {re.sub(r"\d+", "#", path) for path in reading.keys.paths}
        if len(patterns) > 1:
            raise ValueError(
                f"{self.name}: modules are called {', '.join(sorted(patterns))}; which of them comes first in a block "
                "is not in the names: read them one kind at a time, or rename them"
            )
        return {"norm": "rms", "eps": 0.0}
