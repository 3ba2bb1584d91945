"""mhc_*.npz"""

from __future__ import annotations

import json
from typing import Any

import torch

import twoaxis
from tests.golden_formats.base import Golden, finish, put, stacked, tanh_of, trace
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections

PARAMETERS = (
    *("fn", "base", "scale", "norm_weight"),
    *("head_fn", "head_base", "head_scale", "head_norm_weight"),
)
SHAPE = {"source", "commit", "seed", "L", "d", "B", "T"}
SETTINGS = {"n", "sinkhorn_iters", "sinkhorn_eps", "pre_eps", "norm_eps", "post_mult", "readout"}
ARRAYS = {"meta", "x0", "G", "W", "sub_in", "sub_out", "state", "H_pre", "H_post", "comb", "head_mix", "out", "loss"}


def check_manifold_hyper_connections(g: Golden) -> None:
    meta = json.loads(str(g.arrays["meta"]))
    assert set(meta) <= SHAPE | SETTINGS, f"{g.name}: unknown settings {set(meta) - SHAPE - SETTINGS}"
    x0, w = g.tensor("x0", grad=True), g.tensor("W", grad=True)
    count = w.shape[0]
    stream = twoaxis.stream(
        "manifold_hyper_connections",
        blocks=count,
        kinds=("mlp",),
        width=x0.shape[-1],
        streams=meta["n"],
        iterations=meta["sinkhorn_iters"],
        sinkhorn_eps=meta["sinkhorn_eps"],
        pre_eps=meta["pre_eps"],
        norm_eps=meta["norm_eps"],
        post_scale=meta["post_mult"],
        readout=meta["readout"],
        norm_weight="norm_weight" in g or "head_norm_weight" in g,
    ).double()
    assert isinstance(stream, ManifoldHyperConnections)
    ours = dict(stream.named_parameters())
    held = [name for name in PARAMETERS if name in g]
    assert set(held) <= set(ours), f"{g.name}: parameters differ: {set(ours) ^ set(held)}"
    # a norm without a scale is one whose scale stays one
    assert set(ours) - set(held) <= {"norm_weight", "head_norm_weight"}, (
        f"{g.name}: parameters differ: {set(ours) ^ set(held)}"
    )
    known = ARRAYS | set(held) | {"grad_x0", "grad_W"} | {f"grad_{name}" for name in held}
    assert set(g.arrays) <= known, f"{g.name}: unknown arrays {set(g.arrays) - known}"
    for name in held:
        put(ours[name], g.tensor(name))
    out, steps, state = trace(stream, x0, [tanh_of(w[i]) for i in range(count)])
    g.equal("sub_in", stacked(steps, lambda s: s["seen"].x))
    g.equal("sub_out", stacked(steps, lambda s: s["y"]))
    g.equal("state", stacked(steps, lambda s: s["state"].value.h))
    routes: list[Any] = [stream.routed(s["before"].value.h, i) for i, s in enumerate(steps)]
    weights = [(route.read, route.gain, route.mix.mT) for route in routes]
    for key, arrays in zip(("H_pre", "H_post", "comb"), zip(*weights, strict=True), strict=True):
        g.equal(key, torch.stack(arrays))
    assert ("head_mix" in g) == (meta["readout"] == "head")
    if "head_mix" in g:
        g.equal("head_mix", stream.head(state.value.h))
    leaves = {"grad_x0": x0, "grad_W": w}
    finish(g, out, leaves | {f"grad_{name}": ours[name] for name in held})
