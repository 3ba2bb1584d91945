"""hc_*.npz and mhc_*.npz"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, fill, finish, stacked, tanh_of, trace
from twoaxis.depth.hyper_connections import HyperConnections
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections

PARAMETERS = {
    **{f"static_{name}": f"static_{name}" for name in ("alpha", "beta")},
    **{name: name for what in ("alpha", "beta") for name in (f"dynamic_{what}_fn", f"dynamic_{what}_scale")},
    "ln_weight": "norm_weight",
    "ln_bias": "norm_bias",
}
MANIFOLD = {
    f"{part}{name}": f"{part}{name}" for part in ("", "head_") for name in ("fn", "base", "scale", "norm_weight")
}


def replay(g: Golden, stream: Any, held: dict[str, Tensor]) -> tuple[list[dict[str, Any]], Any]:
    """Everything but the weights: reads, increments, states, output and gradients; the steps and the last state."""
    x0, w = g.tensor("x0", grad=True), g.tensor("W", grad=True)
    out, steps, state = trace(stream, x0, [tanh_of(matrix) for matrix in w])
    g.equal("sub_in", stacked(steps, lambda s: s["seen"].x))
    g.equal("sub_out", stacked(steps, lambda s: s["y"]))
    g.equal("state", stacked(steps, lambda s: s["state"].value.h))
    leaves = {"x0": x0, "W": w, **held}
    finish(g, out, {f"grad_{name}": leaf for name, leaf in leaves.items()})
    return steps, state


def check_hyper_connections(g: Golden) -> None:
    meta, (count, width) = g.meta, g.arrays["W"].shape[:2]
    stream = twoaxis.stream(
        "hyper_connections",
        blocks=count,
        kinds=("mlp",),
        width=width,
        streams=meta["n"],
        dynamic=meta["dynamic"],
        tanh=meta["tanh"],
        affine="ln_weight" in g,
        eps=meta["ln_eps"],
        readout=meta.get("readout", "sum"),
    ).double()
    assert isinstance(stream, HyperConnections)
    if "plain_residual_state" in g:
        stream.reset_parameters()  # in float64
        ours = dict(stream.named_parameters())
        for theirs, name in PARAMETERS.items():
            g.equal(theirs, ours[name]) if theirs in g else None
        _, steps, _ = trace(stream, g.tensor("x0"), [tanh_of(matrix) for matrix in g.tensor("W")])
        for i in range(meta["n"]):
            g.equal("plain_residual_state", stacked(steps, lambda s, i=i: s["state"].value.h[..., i, :]))
    # a norm without a shift is one whose shift stays zero
    steps, _ = replay(g, stream, fill(g, stream, PARAMETERS, spare=("norm_bias",)))
    shape = g.arrays["x0"].shape[:-1]
    routes: list[Any] = [stream.routed(s["before"].value.h, i) for i, s in enumerate(steps)]
    alphas = [torch.cat([route.read.unsqueeze(-1), route.mix.mT], dim=-1) for route in routes]
    g.equal("alpha", torch.stack([alpha.expand(*shape, *alpha.shape[-2:]) for alpha in alphas]))
    g.equal("beta", torch.stack([route.gain.expand(*shape, route.gain.shape[-1]) for route in routes]))


def check_manifold_hyper_connections(g: Golden) -> None:
    meta, (count, width) = g.meta, g.arrays["W"].shape[:2]
    stream = twoaxis.stream(
        "manifold_hyper_connections",
        blocks=count,
        kinds=("mlp",),
        width=width,
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
    # a norm without a scale is one whose scale stays one
    steps, state = replay(g, stream, fill(g, stream, MANIFOLD, spare=("norm_weight", "head_norm_weight")))
    routes: list[Any] = [stream.routed(s["before"].value.h, i) for i, s in enumerate(steps)]
    for key, part in (("H_pre", "read"), ("H_post", "gain"), ("comb", "mix")):
        found = torch.stack([getattr(route, part) for route in routes])
        g.equal(key, found.mT if part == "mix" else found)
    if meta["readout"] == "head":
        g.equal("head_mix", stream.head(state.value.h))
