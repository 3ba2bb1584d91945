"""ddl_*.npz"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, fill, finish, rms_norm, stacked, tanh_of, trace
from twoaxis.depth.deep_delta import DeepDelta
from twoaxis.depth.stream import State

PARAMETERS = {
    "beta_in_weight": "gate_in",
    "beta_weight": "gate_weight",
    "beta_bias": "gate_bias",
    "v_weight": "value_weight",
    "v_bias": "value_bias",
    "compress_weight": "compress_weight",
    "compress_read": "compress_read",
    "readout_weight": "readout_weight",
    "readout_read": "readout_read",
    "ec_weight": "expand_weight",
}


def options(g: Golden, meta: Mapping[str, Any], width: int) -> dict[str, Any]:
    accelerated = bool(meta.get("accelerated"))
    found: dict[str, Any] = {
        "value_channels": meta["dv"],
        # the accelerated file measures the direction with width times the squared epsilon, always uses the sigmoid
        # value, and is the only one that honours the causal flag
        "k_eps": meta["k_eps"] * (width**0.5 if accelerated else 1.0),
        "value": "sigmoid" if accelerated else {"const": "constant"}.get(meta["v_mode"], meta["v_mode"]),
        "value_scale": meta["v_scale"],
        "value_constant": meta["v_const"],
        "channel_padding": "causal" if meta["causal"] and accelerated else "same",
    }
    variant = meta["variant"]
    if variant != "vdim1":
        found["compress"] = "token" if variant.startswith("TC") else "channel"
        found["expand"] = "conv" if variant.endswith("EC") else "repeat"
    if "beta_in_weight" in g:
        found |= {"gate": "two_layer", "gate_hidden": g.arrays["beta_in_weight"].shape[1]}
    if variant.startswith("TC"):
        found["token_taps"] = g.arrays["compress_weight"].shape[-1]
    if "ec_weight" in g:
        found["expand_taps"] = g.arrays["ec_weight"].shape[-1]
    return found


def original_state(state: State) -> Tensor:
    """X as the original keeps it: (..., D, d_v), or a vector."""
    h = state.value.h
    return h.squeeze(-2) if h.shape[-2] == 1 else h.mT


def check_deep_delta(g: Golden) -> None:
    meta = g.meta
    x0, w, norm_weight = (g.tensor(key, grad=True) for key in ("x0", "W", "norm_weight"))
    count, width = w.shape[0], x0.shape[-1]
    kinds = [("attention", "mlp")[: count - 2 * b] for b in range(-(-count // 2))]
    stream = twoaxis.stream("deep_delta", blocks=len(kinds), kinds=kinds, width=width, **options(g, meta, width))
    assert isinstance(stream, DeepDelta)
    held = fill(g, stream.double(), PARAMETERS)
    norms = [rms_norm(norm_weight[i], meta["norm_eps"]) for i in range(count)]
    out, steps, _ = trace(stream, x0, [tanh_of(w[i]) for i in range(count)], norms)
    g.equal("state_init", original_state(steps[0]["before"]))
    g.equal("x_in", stacked(steps, lambda s: s["seen"].x))
    g.equal("sub_in", stacked(steps, lambda s: s["c"].x))
    g.equal("sub_out", stacked(steps, lambda s: s["y"]))
    g.equal("state", stacked(steps, lambda s: original_state(s["state"])))
    if "out_f32_native" in g:  # what the original gives in float32
        g.equal("out_f32_native", out, bound=1e-5)
        g.equal("state_f32_native", stacked(steps, lambda s: original_state(s["state"])), bound=1e-5)
    shown = [stream.terms(i, s["y"], s["seen"].x, s["c"].x) for i, s in enumerate(steps)]
    k, beta, values = (torch.stack(each) for each in zip(*shown, strict=True))
    g.equal("beta", beta)
    before = torch.stack([original_state(s["before"]) for s in steps])
    g.equal("k", k)
    g.equal("proj", torch.einsum("...d,...dv->...v" if stream.wide else "...d,...d->...", k, before))
    g.equal("v", values.squeeze(-1) if g.arrays["v"].ndim == values.ndim - 1 else values)
    leaves = {"grad_x0": x0, "grad_W": w, "grad_norm_weight": norm_weight}
    for theirs in ("v_weight", "v_bias") if meta["v_mode"] == "const" else ():
        assert g.tensor(theirs) is not None
        g.equal(f"grad_{theirs}", None)  # a constant value leaves its projection alone
    finish(g, out, leaves | {f"grad_{theirs}": parameter for theirs, parameter in held.items()})
