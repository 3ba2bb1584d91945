"""elc_bert-*.npz"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, finish, put, tanh_of, trace
from twoaxis.depth.stream import State, Stream


def check_elc_bert(g: Golden) -> None:
    x0, mode = g.tensor("x0", grad=True), g.number("mode")
    assert mode in ("plain", "sub"), f"{g.name}: unknown mode {mode!r}"
    w = {key: g.tensor(key, grad=True) for key in (("W",) if mode == "plain" else ("W_attn", "W_mlp"))}
    blocks = g.number("L")
    stream = twoaxis.stream(
        "elc_bert", blocks=blocks, width=x0.shape[-1], variant=g.number("variant"), eps=g.number("layer_norm_eps")
    ).double()
    sublayers: list[Callable[[Tensor], Tensor]] = []
    for n in range(blocks):
        attention, mlp = (w["W"], None) if mode == "plain" else (w["W_attn"], w["W_mlp"])
        sublayers += [tanh_of(attention[n]), torch.zeros_like if mlp is None else tanh_of(mlp[n])]
    logits = official_order(g, stream)
    for parameter, key, row in logits:
        start = g.tensor(f"{key}_init")
        assert torch.equal(parameter.detach(), (start if row is None else start[row])[: len(parameter)])
    g.equal("out_at_init", trace(stream, x0, sublayers)[0])
    for parameter, key, row in logits:
        put(parameter, (g.tensor(key) if row is None else g.tensor(key)[row])[: len(parameter)])
    out, steps, state = trace(stream, x0, sublayers)
    g.equal("block_in", torch.stack([s["seen"].x for s in steps[::2]]))
    if mode == "sub":
        g.equal("mlp_in", torch.stack([s["seen"].x for s in steps[1::2]]))
    stored = [s["state"].value.x for s in steps[1::2]]
    g.equal("block_out", torch.stack(stored))
    g.equal("hidden", torch.stack([x0, *stored]))
    check_mixing_weights(g, stream, [s["before"] for s in steps] + [state])
    leaves = {"grad_x0": x0} | {f"grad_{key}": t for key, t in w.items()}
    loss = (out * g.tensor("G")).sum()
    grads = torch.autograd.grad(loss, [p for p, _, _ in logits], retain_graph=True)
    rows = torch.zeros_like(g.tensor("layer_logits"))
    for (_, _, row), grad in zip(logits, grads, strict=True):
        if row is None:
            g.gradients({"grad_out_logits": grad})
        else:
            rows[row, : len(grad)] = grad
    g.gradients({"grad_layer_logits": rows})
    finish(g, out, leaves)


def official_order(g: Golden, stream: Stream) -> list[tuple[Tensor, str, int | None]]:
    """Every parameter of ours with the array, and the row of it, that holds the original's."""
    ours = dict(stream.named_parameters())
    blocks = stream.layout.blocks
    held: list[tuple[Tensor, str, int | None]] = [(ours[f"logits.{n}"], "layer_logits", n) for n in range(blocks)]
    if "out_logits" in g:
        held.append((ours[f"logits.{blocks}"], "out_logits", None))
    assert len(held) == len(ours), f"{g.name}: parameters without a golden"
    counts = [len(p) for p, _, row in held if row is not None]
    assert counts == g.arrays["layer_logits_mask"].sum(1).tolist()
    return held


def check_mixing_weights(g: Golden, stream: Stream, states: list[State]) -> None:
    ours = torch.zeros_like(g.tensor("layer_weights"))
    for site, state in zip(stream.layout.sites, states, strict=True):
        weights = stream.weights(state, site)
        if weights is None:
            assert not site.first or (site == stream.layout.out and "out_weights" not in g)
            continue
        assert weights.shape[-2:] == (1, len(stream.sources(site)))
        assert torch.equal(weights, weights[:1, :1].expand_as(weights)), "static weights are the same for all tokens"
        row = weights[0, 0, 0].detach()
        if site == stream.layout.out:
            g.equal("out_weights", row)
        else:
            ours[site.block, : len(row)] = row
    g.equal("layer_weights", ours)
