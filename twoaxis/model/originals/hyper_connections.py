"""Hyper-connections: manifold ones as in DeepSeek-V4 and GLM-5, plain ones by the paper's names and the package's.

DeepSeek-V4 has two spellings of every name: that of the modules (`attn_hc.fn`), and that of the files, the released
ones and those transformers saves (`hc_attn_fn`). Either is read, also mixed.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.base import BLOCK, Adapted, Family, Found, Kinds, Original, Row, Setting, Written

MHC_SITES = ("{i}.attn_hc", "{i}.ffn_hc")
MHC_LEAVES = ("fn", "base", "scale")


def _site_rows(site: str, file: str, number: str) -> tuple[Row, ...]:
    shapes = {"fn": "(n*n + 2*n, n*D)", "base": "(n*n + 2*n,)", "scale": "(3,)"}
    notes = {"fn": "rows pre, post, comb", "base": "as fn", "scale": "pre, post, comb"}
    return tuple(
        Row("layers.", f"{site}.{leaf}", shapes[leaf], f"{leaf}[{number}]", notes[leaf], (f"{file}_{leaf}",))
        for leaf in MHC_LEAVES
    )


SITE_ROWS = (*_site_rows("{i}.attn_hc", "{i}.hc_attn", "2i"), *_site_rows("{i}.ffn_hc", "{i}.hc_ffn", "2i+1"))


class DeepSeekV4(Family):
    """DeepSeek-V4, in transformers and as released."""

    name = "deepseek_v4"
    title = "DeepSeek-V4"
    stream = "manifold_hyper_connections"
    rows = (
        *SITE_ROWS,
        Row("", "hc_head.hc_fn", "(n, n*D)", "head_fn", "", ("hc_head_fn",)),
        Row("", "hc_head.hc_base", "(n,)", "head_base", "", ("hc_head_base",)),
        Row("", "hc_head.hc_scale", "(1,)", "head_scale", "", ("hc_head_scale",)),
    )
    settings = (
        Setting("hc_mult", "streams", None, "told by the shapes; checked"),
        Setting("hc_sinkhorn_iters", "iterations", 20),
        Setting("hc_eps", "sinkhorn_eps, pre_eps", 1e-6),
        Setting("rms_norm_eps", "norm_eps", 1e-6),
    )
    namespace = r"(^|\.)(attn_hc|ffn_hc|hc_head)\.|(^|\.)hc_(attn|ffn|head)_"
    aside = r"(^|\.)mtp\."
    sign = namespace
    readout = "head"

    def read(self, found: Found, config: Original) -> Adapted:
        """Sites stacked, the read-out's head beside them."""
        blocks = found.count()
        found.require([f"{site}.{leaf}" for site in MHC_SITES for leaf in MHC_LEAVES], range(blocks))
        if self.readout == "head":
            found.require([f"hc_head.hc_{leaf}" for leaf in MHC_LEAVES])
        rows, wide = (found.size("{i}.attn_hc.fn", 0, dim=dim) for dim in (0, 1))
        n = math.isqrt(1 + rows) - 1
        if n < 1 or n * n + 2 * n != rows or wide % n:
            raise ValueError(
                f"{self.name}: {found.spell('{i}.attn_hc.fn', 0)} has shape {(rows, wide)}, "
                "which is (n*n + 2*n, n*D) for no number of streams n"
            )
        config.agree("hc_mult", n)
        shapes = {"fn": (rows, wide), "base": (rows,), "scale": (3,)}
        state = {
            leaf: torch.stack(
                [found.take(f"{site}.{leaf}", i, shape=shapes[leaf]) for i in range(blocks) for site in MHC_SITES]
            )
            for leaf in MHC_LEAVES
        }
        if self.readout == "head":
            heads = {"fn": (n, wide), "base": (n,), "scale": (1,)}
            state |= {f"head_{leaf}": found.take(f"hc_head.hc_{leaf}", shape=heads[leaf]) for leaf in MHC_LEAVES}
        eps = float(config["hc_eps"])
        options = {
            "form": "deepseek",
            "streams": n,
            "iterations": config["hc_sinkhorn_iters"],
            "sinkhorn_eps": eps,
            "pre_eps": eps,
            "norm_eps": float(config["rms_norm_eps"]),
            "readout": self.readout,
        }
        return Adapted(self.stream, options, state, self.name, blocks, wide // n)

    def write(self, made: Stream) -> Written:
        """The reverse, in the spelling of the modules."""
        assert isinstance(made, ManifoldHyperConnections)
        self.refuse_kinds(made, BLOCK)
        self.refuse(made, order="rows_last", post_scale=2.0, norm_weight=False, readout=self.readout)
        config = made.config
        if config.pre_eps != config.sinkhorn_eps:
            raise ValueError(
                f"{self.name} has one hc_eps for pre and Sinkhorn, got pre_eps={config.pre_eps} and "
                f"sinkhorn_eps={config.sinkhorn_eps}"
            )
        tensors: dict[str, Tensor] = {}
        for site in made.sites:
            base = "layers." + MHC_SITES[site.index % 2].format(i=site.block)
            tensors |= {f"{base}.{leaf}": getattr(made, leaf)[site.index] for leaf in MHC_LEAVES}
        if self.readout == "head":
            tensors |= {f"hc_head.hc_{leaf}": getattr(made, f"head_{leaf}") for leaf in MHC_LEAVES}
        settings = {
            "hc_mult": config.streams,
            "hc_sinkhorn_iters": config.iterations,
            "hc_eps": config.pre_eps,
            "rms_norm_eps": config.norm_eps,
        }
        return Written(tensors, settings)


class Glm5Next(DeepSeekV4):
    """GLM-5's text decoder: DeepSeek-V4's sites, but the mean of the streams is read out."""

    name = "glm5_next"
    title = "GLM-5 (glm5_next in transformers)"
    rows = SITE_ROWS
    settings = (*DeepSeekV4.settings[:-1], Setting("rms_norm_eps", "norm_eps", 1e-5))
    readout = "mean"

    def detect(self, found: Found) -> bool:
        """Never: it would take a DeepSeek-V4 checkpoint that has lost its head. Ask for it by name."""
        return False


STACKED = {
    "static_alpha": "static_alpha",
    "static_beta": "static_beta",
    "dynamic_alpha_fn": "dynamic_alpha_fn",
    "dynamic_alpha_scale": "dynamic_alpha_scale",
    "dynamic_beta_fn": "dynamic_beta_fn",
    "dynamic_beta_scale": "dynamic_beta_scale",
    "ln_weight": "norm_weight",
    "ln_bias": "norm_bias",
}
DYNAMIC = ("dynamic_alpha_fn", "dynamic_alpha_scale", "dynamic_beta_fn", "dynamic_beta_scale")
OWN = r"(^|\.)(static|dynamic)_(alpha|beta)\w*(\.|$)"


def _layout(count: int, width: int | None) -> tuple[int, int | None, Kinds]:
    """Blocks, width and kinds for `count` sub-layers, attention and MLP in turn; an odd one stands by itself."""
    if count % 2 == 0:
        return count // 2, width, BLOCK
    return count // 2 + 1, width, [*[BLOCK] * (count // 2), BLOCK[:1]]


class HyperConnectionsPaper(Family):
    """The names of the paper's algorithm, stacked by sub-layer."""

    name = "hyper_connections"
    title = "Hyper-Connections, the paper's Algorithm 2, stacked by sub-layer"
    stream = "hyper_connections"
    rows = (
        Row("", "static_alpha", "(L, n, n + 1)", "static_alpha", "column 0 feeds the sub-layer"),
        Row("", "static_beta", "(L, n)", "static_beta"),
        Row("", "dynamic_alpha_fn", "(L, D, n + 1)", "dynamic_alpha_fn", "absent in the static form"),
        Row("", "dynamic_alpha_scale", "(L,)", "dynamic_alpha_scale", "absent in the static form"),
        Row("", "dynamic_beta_fn", "(L, D)", "dynamic_beta_fn", "absent in the static form"),
        Row("", "dynamic_beta_scale", "(L,)", "dynamic_beta_scale", "absent in the static form"),
        Row("", "ln_weight", "(L, D)", "norm_weight", "absent for a norm without parameters"),
        Row("", "ln_bias", "(L, D)", "norm_bias", "absent: zero"),
    )
    settings = (
        Setting("tanh", "tanh", True),
        Setting("ln_eps", "eps", 1e-5),
        Setting("readout", "readout", "sum"),
    )
    namespace = OWN + r"|(^|\.)ln_(weight|bias)$"
    sign = r"(^|\.)static_alpha$"

    def detect(self, found: Found) -> bool:
        """By the name, where one tensor holds every sub-layer."""
        key = found.keys.get(("static_alpha", None))
        return key is not None and found.tensors[key].dim() == 3

    def read(self, found: Found, config: Original) -> Adapted:
        """As they are; a shift that is absent is zero."""
        found.require(["static_alpha", "static_beta"])
        count, n = (found.size("static_alpha", dim=dim) for dim in (0, 1))
        shapes = {"static_alpha": (count, n, n + 1), "static_beta": (count, n)}
        dynamic = any(found.has(name) for name in DYNAMIC)
        affine = any(found.has(name) for name in ("ln_weight", "ln_bias"))
        width = None
        if dynamic:
            found.require(DYNAMIC)
            width = found.size("dynamic_alpha_fn", dim=1)
            shapes |= {"dynamic_alpha_fn": (count, width, n + 1), "dynamic_beta_fn": (count, width)}
            shapes |= {"dynamic_alpha_scale": (count,), "dynamic_beta_scale": (count,)}
        if affine:
            found.require(["ln_weight", *DYNAMIC])
            shapes |= {name: (count, width or 0) for name in ("ln_weight", "ln_bias") if found.has(name)}
        state = {STACKED[name]: found.take(name, shape=shape) for name, shape in shapes.items()}
        if affine and "norm_bias" not in state:
            state["norm_bias"] = torch.zeros_like(state["norm_weight"])
        options = {
            "streams": n,
            "dynamic": dynamic,
            "tanh": bool(config["tanh"]),
            "affine": affine,
            "eps": float(config["ln_eps"]),
            "readout": config["readout"],
        }
        return Adapted(self.stream, options, state, self.name, *_layout(count, width))

    def write(self, made: Stream) -> Written:
        """The reverse."""
        assert isinstance(made, HyperConnections)
        self.refuse(made, norm="layer", frozen="none")
        ours = dict(made.named_parameters())
        tensors: dict[str, Tensor] = {theirs: ours[name] for theirs, name in STACKED.items() if name in ours}
        config = made.config
        return Written(tensors, {"tanh": config.tanh, "ln_eps": config.eps, "readout": config.readout})


class HyperConnectionsPackage(Family):
    """The package lucidrains/hyper-connections: one module per sub-layer, anywhere in a model."""

    name = "hyper_connections_package"
    title = "lucidrains/hyper-connections"
    stream = "hyper_connections"
    rows = (
        Row("", "static_alpha", "(n, n + 1)", "static_alpha[l]", "l numbers the modules by the numbers in their paths"),
        Row("", "static_beta", "(n,)", "static_beta[l]"),
        Row("", "dynamic_alpha_fn", "(D, n + 1)", "dynamic_alpha_fn[l]"),
        Row("", "dynamic_alpha_scale", "()", "dynamic_alpha_scale[l]"),
        Row("", "dynamic_beta_fn", "(D,)", "dynamic_beta_fn[l]"),
        Row("", "dynamic_beta_scale", "()", "dynamic_beta_scale[l]"),
        Row("", "norm.gamma", "(D,)", "norm_weight[l]", "one is added"),
    )
    settings = (Setting("tanh", "tanh", True),)
    namespace = OWN
    sign = r"(^|\.)static_alpha$"
    numbered_modules = True
    writes = False  # a model keeps these modules where it likes

    def detect(self, found: Found) -> bool:
        """By the name, where a tensor holds one sub-layer."""
        key = found.keys.get(("static_alpha", 0))
        return key is not None and found.tensors[key].dim() == 2

    def read(self, found: Found, config: Original) -> Adapted:
        """Modules stacked in the order of their numbers."""
        modules = range(len(found.paths))
        patterns = {re.sub(r"\d+", "#", path) for path in found.paths}
        if len(patterns) > 1:
            raise ValueError(
                f"{self.name}: modules are called {', '.join(sorted(patterns))}; which of them comes first in a block "
                "is not in the names: read them one kind at a time, or rename them"
            )
        found.require([row.name for row in self.rows], modules)
        n, width = found.size("static_alpha", 0), found.size("dynamic_beta_fn", 0)
        shapes = {
            "static_alpha": (n, n + 1),
            "static_beta": (n,),
            "dynamic_alpha_fn": (width, n + 1),
            "dynamic_alpha_scale": (),
            "dynamic_beta_fn": (width,),
            "dynamic_beta_scale": (),
            "norm.gamma": (width,),
        }
        stacks = {
            name: torch.stack([found.take(name, m, shape=shape) for m in modules]) for name, shape in shapes.items()
        }
        state = {STACKED[name]: stacked for name, stacked in stacks.items() if name in STACKED}
        state["norm_weight"] = stacks["norm.gamma"] + 1
        options = {"streams": n, "tanh": bool(config["tanh"]), "norm": "rms", "eps": 0.0}
        return Adapted(self.stream, options, state, self.name, *_layout(len(modules), width))
