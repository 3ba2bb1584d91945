"""hc_*.npz"""

from __future__ import annotations

import json
from typing import Any

import torch

import twoaxis
from tests.golden_formats.base import Golden, finish, put, stacked, tanh_of, trace
from twoaxis.depth.hyper_connections import HyperConnections

PARAMETERS = {
    "static_alpha": "static_alpha",
    "static_beta": "static_beta",
    "dynamic_alpha_fn": "dynamic_alpha_fn",
    "dynamic_alpha_scale": "dynamic_alpha_scale",
    "dynamic_beta_fn": "dynamic_beta_fn",
    "dynamic_beta_scale": "dynamic_beta_scale",
    "ln_weight": "norm_weight",
    "ln_bias": "norm_bias",
}
SHAPE = {"source", "commit", "seed", "L", "d", "B", "T"}
SETTINGS = {"n", "dynamic", "tanh", "ln_eps", "readout"}
ARRAYS = {"meta", "x0", "G", "W", "sub_in", "sub_out", "state", "alpha", "beta", "out", "loss", "plain_residual_state"}


def check_hyper_connections(g: Golden) -> None:
    meta = json.loads(str(g.arrays["meta"]))
    assert set(meta) <= SHAPE | SETTINGS, f"{g.name}: unknown settings {set(meta) - SHAPE - SETTINGS}"
    x0, w = g.tensor("x0", grad=True), g.tensor("W", grad=True)
    count, affine = w.shape[0], "ln_weight" in g
    stream = twoaxis.stream(
        "hyper_connections",
        blocks=count,
        kinds=("mlp",),
        width=x0.shape[-1],
        streams=meta["n"],
        dynamic=meta["dynamic"],
        tanh=meta["tanh"],
        affine=affine,
        eps=meta["ln_eps"],
        readout=meta.get("readout", "sum"),
    ).double()
    assert isinstance(stream, HyperConnections)
    ours = dict(stream.named_parameters())
    held = {theirs: name for theirs, name in PARAMETERS.items() if theirs in g}
    assert set(held.values()) <= set(ours), f"{g.name}: parameters differ: {set(ours) ^ set(held.values())}"
    # a norm without a shift is one whose shift stays zero
    assert set(ours) - set(held.values()) <= {"norm_bias"}, (
        f"{g.name}: parameters differ: {set(ours) ^ set(held.values())}"
    )
    known = ARRAYS | set(held) | {"grad_x0", "grad_W"} | {f"grad_{theirs}" for theirs in held}
    assert set(g.arrays) <= known, f"{g.name}: unknown arrays {set(g.arrays) - known}"
    sublayers = [tanh_of(w[i]) for i in range(count)]
    if "plain_residual_state" in g:
        stream.reset_parameters()
        for theirs, name in held.items():
            g.equal(theirs, ours[name])
        _, steps, _ = trace(stream, x0, sublayers)
        for i in range(meta["n"]):
            g.equal("plain_residual_state", stacked(steps, lambda s, i=i: s["state"].value.h[..., i, :]))
    for theirs, name in held.items():
        put(ours[name], g.tensor(theirs))
    out, steps, _ = trace(stream, x0, sublayers)
    g.equal("sub_in", stacked(steps, lambda s: s["seen"].x))
    g.equal("sub_out", stacked(steps, lambda s: s["y"]))
    g.equal("state", stacked(steps, lambda s: s["state"].value.h))
    routes: list[Any] = [stream.routed(s["before"].value.h, i) for i, s in enumerate(steps)]
    weights = [(torch.cat([route.read.unsqueeze(-1), route.mix.mT], dim=-1), route.gain) for route in routes]
    shape = x0.shape[:-1]
    g.equal("alpha", torch.stack([alpha.expand(*shape, *alpha.shape[-2:]) for alpha, _ in weights]))
    g.equal("beta", torch.stack([beta.expand(*shape, beta.shape[-1]) for _, beta in weights]))
    leaves = {"grad_x0": x0, "grad_W": w}
    finish(g, out, leaves | {f"grad_{theirs}": ours[name] for theirs, name in held.items()})
