"""vertical_attention_*.npz: the arithmetic of a reading."""

from __future__ import annotations

import torch

import twoaxis
from tests.golden_formats.base import Golden, finish, put, stacked, trace


def check_vertical_attention(g: Golden) -> None:
    # the norm is the third word of the file's name; an unknown one is refused by the stream
    norm = g.name.removesuffix(".npz").split("_")[2]
    for inner_residual in (True, False):
        x0, w, scores = g.tensor("x0", grad=True), g.tensor("W", grad=True), g.tensor("layer_scores")
        blocks = len(w)
        stream = twoaxis.stream(
            "vertical_attention",
            blocks=blocks,
            width=x0.shape[-1],
            kinds=("mlp",),
            norm=norm,
            inner_residual=inner_residual,
            eps=g.number("eps") if "eps" in g else 0.0,
        ).double()
        ours = [stream.get_parameter(f"logits.{n}") for n in range(blocks)]
        assert len(ours) == len(list(stream.parameters())) == len(scores)
        for n, parameter in enumerate(ours):
            put(parameter, scores[n, : n + 1])
            assert not scores[n, n + 1 :].any()
        # a toy block is a whole block: with the inner residual its increment is its output less its input
        skip = 1.0 if inner_residual else 0.0
        out, steps, _ = trace(stream, x0, [lambda x, w=w[n], k=skip: torch.tanh(x @ w) - k * x for n in range(blocks)])
        g.equal("h", stacked(steps, lambda s: s["seen"].x))
        g.equal("layer_out", stacked(steps, lambda s: s["state"].value.x))
        weights = torch.zeros_like(scores)
        for n, step in enumerate(steps):
            found = stream.weights(step["before"], step["site"])
            assert found is not None
            assert found.shape[-1] == n + 1 == len(stream.sources(step["site"]))
            weights[n, : n + 1] = found[0, 0, 0].detach()
        g.equal("layer_weights", weights)
        loss = (out * g.tensor("G")).sum()
        rows = torch.zeros_like(scores)
        for n, grad in enumerate(torch.autograd.grad(loss, ours, retain_graph=True)):
            rows[n, : n + 1] = grad
        g.gradients({"grad_layer_scores": rows})
        leaves = {"grad_x0": x0, "grad_W": w}
        finish(g, out, leaves, key="output")
