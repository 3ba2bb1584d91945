"""Deep Delta Learning as its repository names it.

    transformer.h.{i}.ddl_attn.*     site 2i        gate and value of the attention's rewrite
    transformer.h.{i}.ddl_mlp.*      site 2i + 1    of the MLP's
    transformer.h.{i}.compress.*     both           d_v > 1: one compressor per block
    readout.*, input_embed.conv.*                   d_v > 1: the head's compressor; EC

Which variant it is, is in the names and shapes. Two settings are in neither and differ between files of one checkpoint:
the fused file's k_eps is ddl_k_eps times sqrt(d), and it alone honours ddl_state_dv_shortconv_causal. Give k_eps= and
channel_padding= where that file trained the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.family import Family, Reading
from twoaxis.model.originals.table import Row, Setting

HEEDED = "True is refused unless channel_padding= says whether the file that trained it heeds the flag"


def _site_rows(site: str, entry: str) -> tuple[Row, ...]:
    base = f"transformer.h.{{i}}.{site}"
    two = "the gate of two layers, instead of beta"
    return (
        Row(f"{base}.v_proj.weight", f"value_weight[{entry}]", "(v, D)", "unused there if the value is constant"),
        Row(f"{base}.v_proj.bias", f"value_bias[{entry}]", "(v,)"),
        Row(f"{base}.beta.weight", f"gate_weight[{entry}]", "(1, D)", "the gate of one layer", form="linear"),
        Row(f"{base}.beta.bias", f"gate_bias[{entry}]", "(1,)", form="linear"),
        Row(f"{base}.beta_in.weight", f"gate_in[{entry}]", "(H, D)", two, form="two_layer"),
        Row(f"{base}.beta_out.weight", f"gate_weight[{entry}]", "(1, H)", form="two_layer"),
        Row(f"{base}.beta_out.bias", f"gate_bias[{entry}]", "(1,)", form="two_layer"),
    )


def _compressor(base: str, ours: str, entry: str) -> tuple[Row, ...]:
    weight = f"{ours}_weight{entry}"
    return (
        Row(f"{base}.shortconv.weight", weight, "(D*v, taps)", "TC; row d*v + channel", form="token"),
        Row(f"{base}.weight", weight, "(D, v)", "CC", form="channel"),
        Row(f"{base}.weight", weight, "(D, v, taps)", "TC in later files", form="token, later"),
        Row(f"{base}.read", f"{ours}_read{entry}", "(v,)", form="wide"),
    )


class DeepDeltaRepository(Family):
    """The models of yifanzhang-pro/deep-delta-learning."""

    name = "deep_delta"
    stream = "deep_delta"
    layers = "transformer.h."
    rows = (
        *_site_rows("ddl_attn", "2*i"),
        *_site_rows("ddl_mlp", "2*i + 1"),
        *_compressor("transformer.h.{i}.compress", "compress", "[i]"),
        *_compressor("readout", "readout", ""),
        Row("input_embed.conv.weight", "expand_weight", "(D*v, 1, E)", "EC; row d*v + channel", form="conv"),
    )
    settings = (
        Setting("ddl_k_eps", "k_eps", 1e-5, "the fused file multiplies it by sqrt(d): give k_eps= instead"),
        Setting("ddl_v_sigmoid", "value", True, "False: linear", copied=False),
        Setting("ddl_v_sigmoid_scale", "value_scale", 4.0),
        Setting("ddl_v_constant", "value", False, "True: constant; d_v > 1", copied=False),
        Setting("ddl_v_constant_value", "value_constant", 2.0, "d_v > 1", copied=False),
        Setting("ddl_v_dim1_constant", "value", False, "True: constant; d_v = 1", copied=False),
        Setting("ddl_v_dim1_constant_value", "value_constant", 2.0, "d_v = 1", copied=False),
        Setting("ddl_value_channels", "value_channels", None, "told by the shapes; checked if d_v > 1", copied=False),
        Setting("ddl_state_dv_shortconv_causal", "channel_padding", False, HEEDED, copied=False),
        Setting("residual_branch_mult", "none", 1.0, "refused unless 1: there is no such factor here", copied=False),
    )
    sizes = (("v", "value_channels"), ("H", "gate_hidden"), ("taps", "token_taps"), ("E", "expand_taps"))
    namespace = r"(^|\.)(ddl_attn|ddl_mlp|compress|readout|input_embed)\."
    beyond = ("gate_start", "gate_hidden", "token_taps", "expand_taps", "value_constant")

    def options(self, reading: Reading) -> dict[str, Any]:
        """The form, from what is there; the value's from the configuration."""
        channels, forms, setting = reading.letters["v"], reading.forms, reading.setting
        if setting("residual_branch_mult") != 1.0:
            raise ValueError(
                f"{self.name}: residual_branch_mult={setting('residual_branch_mult')} has no counterpart here"
            )
        if channels > 1:
            reading.agree("ddl_value_channels", channels)
            if setting("ddl_state_dv_shortconv_causal") and "channel_padding" not in reading.overrides:
                raise ValueError(
                    f"{self.name}: ddl_state_dv_shortconv_causal=True is heeded by some of the original's files only: "
                    "give channel_padding='causal' or 'same', as the one that trained this model does"
                )
        constant = "ddl_v_constant" if channels > 1 else "ddl_v_dim1_constant"
        value = "sigmoid" if setting("ddl_v_sigmoid") else "linear"
        return {
            "value": "constant" if setting(constant) else value,
            "value_constant": setting(f"{constant}_value"),
            "gate": "two_layer" if "two_layer" in forms else "linear",
            "compress": "token" if forms & {"token", "token, later"} else "channel",
            "expand": "conv" if "conv" in forms else "repeat",
        }

    def unused(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The value's projection, if the value is constant."""
        return ("value_weight", "value_bias") if options["value"] == "constant" else ()

    def forms(self, made: Stream) -> set[str]:
        """In the names of the reference files."""
        assert isinstance(made, DeepDelta)
        config = made.config
        return {config.gate, *((config.compress, config.expand, "wide") if made.wide else ())}

    def translate(self, made: Stream) -> dict[str, Any]:
        """The kind of value."""
        assert isinstance(made, DeepDelta)
        return {"ddl_v_sigmoid": made.config.value == "sigmoid"}
