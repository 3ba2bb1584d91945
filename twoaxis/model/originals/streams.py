"""Residuals that ship in single models: gated streams of Qwen4-Exp, and the scales of Muse-Spark, ZAYA and nanochat."""

from __future__ import annotations

from typing import Any

from twoaxis.model.originals.family import Family, Reading
from twoaxis.model.originals.table import Row, Setting


def _gated_rows(module: str, prefix: str, entry: str, *, writes: bool = True) -> tuple[Row, ...]:
    inject = Row(f"{module}.block_inject_weight.weight", f"inject{entry}", "(n, n*D)")
    return (
        *((inject,) if writes else ()),
        Row(f"{module}.hc_norm.weight", f"{prefix}norm_weight{entry}", "(n*D,)"),
        Row(f"{module}.input_mix_weight_down.weight", f"{prefix}down{entry}", "(r, n*D)"),
        Row(f"{module}.input_mix_weight_up.weight", f"{prefix}up{entry}", "(n*D, r)"),
    )


class Qwen4Exp(Family):
    """Qwen4-Exp's text decoder in transformers."""

    name = "qwen4_exp"
    stream = "gated_streams"
    layers = "layers."
    rows = (
        *_gated_rows("layers.{i}.attn_hyper_connection", "", "[2*i]"),
        *_gated_rows("layers.{i}.mlp_hyper_connection", "", "[2*i + 1]"),
        *_gated_rows("hyper_connection_mixer", "head_", "", writes=False),
    )
    settings = (
        Setting("hc_count", "streams", None, "told by the shapes; checked"),
        Setting("hc_lowrank", "rank", None, "told by the shapes; checked"),
        Setting("rms_norm_eps", "eps", 1e-6),
    )
    sizes = (("n", "streams"), ("r", "rank"))
    namespace = r"(^|\.)((attn|mlp)_hyper_connection|hyper_connection_mixer)\."
    aside = r"(^|\.)mtp\."


class _Scales(Family):
    """A form of `scaled`."""

    stream = "scaled"
    layers = "layers."
    beyond = ("start", "rank", "eps", "post_norm", "temperature", "floor")
    form: str

    def options(self, reading: Reading) -> dict[str, Any]:
        """The form; what a sub-layer returns is normalised there in the sub-layer, if at all."""
        return {"form": self.form, "post_norm": False}


class MuseSpark(_Scales):
    """Muse-Spark's text decoder in transformers."""

    name = "muse_spark"
    form = "variance"
    rows = (
        Row("layers.{i}.post_attention_residual_gate.gate", "gate[2*i]", "(D,)"),
        Row("layers.{i}.post_feedforward_residual_gate.gate", "gate[2*i + 1]", "(D,)"),
    )
    settings = (Setting("residual_gate_temperature", "temperature", 0.3),)
    namespace = r"(^|\.)post_\w+_residual_gate\."
    beyond = ("start", "rank", "eps")


def _affine_rows(module: str, entry: str) -> tuple[Row, ...]:
    names = {"hidden_states_scale": "gain", "hidden_states_bias": "gain_shift"}
    names |= {"residual_scale": "keep", "residual_bias": "keep_shift"}
    return tuple(Row(f"layers.{{i}}.{module}.{name}", f"{ours}[{entry}]", "(D,)") for name, ours in names.items())


class Zaya(_Scales):
    """ZAYA1 in transformers."""

    name = "zaya"
    form = "affine"
    rows = (
        *_affine_rows("post_attention_residual_scale", "2*i"),
        *_affine_rows("post_mlp_residual_scale", "2*i + 1"),
        Row("input_hidden_states_scale", "open_scale", "(D,)"),
        Row("input_hidden_states_bias", "open_shift", "(D,)"),
    )
    namespace = r"(^|\.)post_(attention|mlp)_residual_scale\.|(^|\.)input_hidden_states_(scale|bias)$"


class Nanochat(_Scales):
    """karpathy/nanochat."""

    name = "nanochat"
    form = "x0"
    rows = (
        Row("resid_lambdas", "carry", "(L,)"),
        Row("x0_lambdas", "skip", "(L,)"),
        Row("backout_lambda", "back_out", "(1,)"),
    )
    namespace = r"(^|\.)(resid|x0|backout)_lambdas?$"
