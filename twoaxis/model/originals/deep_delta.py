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

from typing import Any

import torch
from torch import Tensor

from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.stream import Stream
from twoaxis.model.originals.base import BLOCK, Adapted, Family, Found, Original, Row, Setting, Written

SITES = ("{i}.ddl_attn", "{i}.ddl_mlp")
BLOCKS = "transformer.h."


def _site_rows(site: str, number: str) -> tuple[Row, ...]:
    return (
        Row(BLOCKS, f"{site}.beta.weight", "(1, D)", f"gate_weight[{number}]", "the gate of one layer"),
        Row(BLOCKS, f"{site}.beta.bias", "(1,)", f"gate_bias[{number}]"),
        Row(
            BLOCKS, f"{site}.beta_in.weight", "(H, D)", f"gate_in[{number}]", "the gate of two layers, instead of beta"
        ),
        Row(BLOCKS, f"{site}.beta_out.weight", "(1, H)", f"gate_weight[{number}]"),
        Row(BLOCKS, f"{site}.beta_out.bias", "(1,)", f"gate_bias[{number}]"),
        Row(
            BLOCKS,
            f"{site}.v_proj.weight",
            "(v, D)",
            f"value_weight[{number}]",
            "unused there if the value is constant",
        ),
        Row(BLOCKS, f"{site}.v_proj.bias", "(v,)", f"value_bias[{number}]"),
    )


class DeepDeltaRepository(Family):
    """The models of yifanzhang-pro/deep-delta-learning."""

    name = "deep_delta"
    title = "Deep Delta Learning"
    stream = "deep_delta"
    rows = (
        *_site_rows(SITES[0], "2i"),
        *_site_rows(SITES[1], "2i+1"),
        Row(BLOCKS, "{i}.compress.shortconv.weight", "(D*v, taps)", "compress_weight[i]", "TC; row d*v + channel"),
        Row(BLOCKS, "{i}.compress.weight", "(D, v)", "compress_weight[i]", "CC; with a third dimension of taps: TC"),
        Row(BLOCKS, "{i}.compress.read", "(v,)", "compress_read[i]"),
        Row("", "readout.shortconv.weight", "(D*v, taps)", "readout_weight", "TC"),
        Row("", "readout.weight", "(D, v)", "readout_weight", "CC; with a third dimension of taps: TC"),
        Row("", "readout.read", "(v,)", "readout_read"),
        Row("", "input_embed.conv.weight", "(D*v, 1, taps)", "expand_weight", "EC; row d*v + channel"),
    )
    settings = (
        Setting("ddl_k_eps", "k_eps", 1e-5, "the fused file multiplies it by sqrt(d): give k_eps= instead"),
        Setting("ddl_v_sigmoid", "value", True, "False: linear"),
        Setting("ddl_v_sigmoid_scale", "value_scale", 4.0),
        Setting("ddl_v_constant", "value", False, "True: constant; d_v > 1"),
        Setting("ddl_v_constant_value", "value_constant", 2.0, "d_v > 1"),
        Setting("ddl_v_dim1_constant", "value", False, "True: constant; d_v = 1"),
        Setting("ddl_v_dim1_constant_value", "value_constant", 2.0, "d_v = 1"),
        Setting("ddl_value_channels", "value_channels", None, "told by the shapes; checked where d_v > 1"),
        Setting(
            "ddl_state_dv_shortconv_causal",
            "channel_padding",
            False,
            "True is refused unless channel_padding= says whether the file that trained it heeds the flag",
        ),
        Setting("residual_branch_mult", "none", 1.0, "anything but 1 is refused: there is no such factor here"),
    )
    namespace = r"(^|\.)(ddl_attn|ddl_mlp|compress|readout|input_embed)\."
    sign = r"(^|\.)ddl_(attn|mlp)\."

    def read(self, found: Found, config: Original) -> Adapted:
        """Gates and values stacked by site, compressors by block."""
        blocks = found.count()
        two_layer = any(found.has(f"{site}.beta_in.weight", i) for site in SITES for i in range(blocks))
        gates = ("beta_in.weight", "beta_out.weight", "beta_out.bias") if two_layer else ("beta.weight", "beta.bias")
        found.require(
            [f"{site}.{leaf}" for site in SITES for leaf in (*gates, "v_proj.weight", "v_proj.bias")], range(blocks)
        )
        dv, width = (found.size(f"{SITES[0]}.v_proj.weight", 0, dim=dim) for dim in (0, 1))
        hidden = found.size(f"{SITES[0]}.beta_in.weight", 0) if two_layer else width

        def stacked(leaf: str, *shape: int) -> Tensor:
            return torch.stack([found.take(f"{s}.{leaf}", i, shape=shape) for i in range(blocks) for s in SITES])

        state = {"gate_in": stacked("beta_in.weight", hidden, width)} if two_layer else {}
        state["gate_weight"] = stacked(gates[-2], 1, hidden)[:, 0]
        state["gate_bias"] = stacked(gates[-1], 1)[:, 0]
        values = {"value_weight": stacked("v_proj.weight", dv, width), "value_bias": stacked("v_proj.bias", dv)}
        options = self._values(config, dv) | ({"gate": "two_layer", "gate_hidden": hidden} if two_layer else {})
        if options["value"] != "constant":
            state |= values
        if dv > 1:
            config.agree("ddl_value_channels", dv)
            options |= self._expanded(found, state, blocks, width, dv)
        return Adapted(self.stream, options, state, self.name, blocks, width)

    def _values(self, config: Original, dv: int) -> dict[str, Any]:
        """Options that only the configuration tells."""
        if config["residual_branch_mult"] != 1.0:
            raise ValueError(
                f"{self.name}: residual_branch_mult={config['residual_branch_mult']} has no counterpart here"
            )
        if config["ddl_state_dv_shortconv_causal"] and dv > 1 and "channel_padding" not in config.overrides:
            raise ValueError(
                f"{self.name}: ddl_state_dv_shortconv_causal=True is heeded by some of the original's files only: give "
                "channel_padding='causal' or 'same', as the one that trained this model does"
            )
        constant = "ddl_v_constant" if dv > 1 else "ddl_v_dim1_constant"
        value = "sigmoid" if config["ddl_v_sigmoid"] else "linear"
        return {
            "value_channels": dv,
            "value": "constant" if config[constant] else value,
            "value_scale": float(config["ddl_v_sigmoid_scale"]),
            "value_constant": float(config[f"{constant}_value"]),
            "k_eps": float(config["ddl_k_eps"]),
        }

    def _expanded(self, found: Found, state: dict[str, Tensor], blocks: int, width: int, dv: int) -> dict[str, Any]:
        """Compressors and the expansion into `state`; the options they tell."""
        names = [("{i}.compress", i) for i in range(blocks)] + [("readout", None)]
        flat = any(found.has(f"{name}.shortconv.weight", i) for name, i in names)
        leaf = ".shortconv.weight" if flat else ".weight"
        for name, i in names:
            found.require([name + leaf, f"{name}.read"], [i])
        by_token = flat or found.tensors[found.keys["{i}.compress.weight", 0]].dim() == 3
        options: dict[str, Any] = {"compress": "token" if by_token else "channel"}
        shape: tuple[int, ...] = (width, dv)
        if by_token:
            options["token_taps"] = taps = found.size("{i}.compress" + leaf, 0, dim=1 if flat else 2)
            shape = (width * dv, taps) if flat else (width, dv, taps)
        weights = [found.take(name + leaf, i, shape=shape) for name, i in names]
        if flat:
            weights = [weight.unflatten(0, (width, dv)) for weight in weights]
        reads = [found.take(f"{name}.read", i, shape=(dv,)) for name, i in names]
        state |= {"compress_weight": torch.stack(weights[:-1]), "compress_read": torch.stack(reads[:-1])}
        state |= {"readout_weight": weights[-1], "readout_read": reads[-1]}
        if found.has("input_embed.conv.weight"):
            taps = found.size("input_embed.conv.weight", dim=2)
            conv = found.take("input_embed.conv.weight", shape=(width * dv, 1, taps))
            state["expand_weight"] = conv[:, 0].unflatten(0, (width, dv))
            options |= {"expand": "conv", "expand_taps": taps}
        return options

    def write(self, made: Stream) -> Written:
        """The reverse, in the names of the reference files."""
        assert isinstance(made, DeepDelta)
        self.refuse_kinds(made, BLOCK)
        self.refuse(made, update="delta", map="k", value=("sigmoid", "linear"), channel_padding="same")
        config, tensors = made.config, {}
        for row, site in enumerate(made.sites):
            base = BLOCKS + SITES[row % 2].format(i=site.block)
            gate = "beta" if made.gate_in is None else "beta_out"
            if made.gate_in is not None:
                tensors[f"{base}.beta_in.weight"] = made.gate_in[row]
            tensors[f"{base}.{gate}.weight"] = made.gate_weight[row : row + 1]
            tensors[f"{base}.{gate}.bias"] = made.gate_bias[row : row + 1]
            tensors[f"{base}.v_proj.weight"] = made.value_weight[row]
            tensors[f"{base}.v_proj.bias"] = made.value_bias[row]
        if made.wide:
            leaf = "shortconv.weight" if made.by_token else "weight"
            for b in range(made.layout.blocks):
                weight = made.compress_weight[b]
                tensors[f"{BLOCKS}{b}.compress.{leaf}"] = weight.flatten(0, 1) if made.by_token else weight
                tensors[f"{BLOCKS}{b}.compress.read"] = made.compress_read[b]
            weight = made.readout_weight
            tensors[f"readout.{leaf}"] = weight.flatten(0, 1) if made.by_token else weight
            tensors["readout.read"] = made.readout_read
        if made.expands:
            tensors["input_embed.conv.weight"] = made.expand_weight.flatten(0, 1).unsqueeze(1)
        settings = {
            "ddl_k_eps": config.k_eps,
            "ddl_v_sigmoid": config.value == "sigmoid",
            "ddl_v_sigmoid_scale": config.value_scale,
        }
        return Written(tensors, settings)
