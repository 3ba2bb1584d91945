"""denseformer-*.npz"""

from __future__ import annotations

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import FORWARD, GRADIENT, Golden, finish, put, stacked, trace


def check_denseformer(g: Golden) -> None:
    blocks, x0, w = g.number("L"), g.tensor("x0", grad=True), g.tensor("W", grad=True)
    stream = twoaxis.stream(
        "denseformer",
        blocks=blocks,
        width=x0.shape[-1],
        kinds=("mlp",),
        dilation=g.number("dilation"),
        period=g.number("period"),
    ).double()
    # a toy block is a whole block, so its increment is its output less its input
    sublayers = [lambda x, i=i: torch.tanh(x @ w[i]) - x for i in range(blocks)]
    g.equal("out_at_init", trace(stream, x0, sublayers)[0])
    alpha = dict(stream.named_parameters())
    for j in range(1, blocks + 1):
        assert (f"alpha.{j}" in alpha) == bool(g.arrays["has_dwa"][j - 1])
        if f"alpha.{j}" in alpha:
            assert alpha[f"alpha.{j}"].numel() == g.arrays["n_alpha"][j - 1]
            start = g.tensor("alpha_init")[j - 1][torch.from_numpy(g.arrays["alpha_mask"][j - 1])]
            assert torch.equal(alpha[f"alpha.{j}"].detach(), start)
            put(alpha[f"alpha.{j}"], g.tensor(f"alpha_{j - 1}"))
    firsts = [site for site in stream.layout.sites if site.first]
    check_table(g, "alpha", {int(name.removeprefix("alpha.")): p.detach() for name, p in alpha.items()})
    for j in range(1, blocks + 1):
        names = stream.sources(firsts[j])
        slots = [0 if name == "embedding" else int(name.rsplit(" ", 1)[1]) + 1 for name in names]
        assert slots == (g.arrays[f"slots_{j - 1}"].tolist() if f"slots_{j - 1}" in g else []), f"{g.name}: {names}"
    out, steps, _ = trace(stream, x0, sublayers)
    g.equal("block_in", stacked(steps, lambda s: s["seen"].x))
    g.equal("block_out", stacked(steps, lambda s: s["seen"].x + s["y"]))
    later = [step["seen"].x for step in steps[1:]] + [out]
    g.equal("dwa_out", torch.stack(later))
    averages = {j: p for j in range(1, blocks + 1) if (p := alpha.get(f"alpha.{j}")) is not None}
    loss = (out * g.tensor("G")).sum()
    rows = torch.autograd.grad(loss, list(averages.values()), retain_graph=True) if averages else ()
    check_table(g, "grad_alpha", dict(zip(averages, rows, strict=True)), GRADIENT)
    finish(g, out, {"grad_x0": x0, "grad_W": w, **{f"grad_alpha_{j - 1}": p for j, p in averages.items()}})


def check_table(g: Golden, key: str, rows: dict[int, Tensor], bound: float = FORWARD) -> None:
    """One row per block: what belongs to each slot, zero where there is no parameter."""
    table = torch.zeros_like(g.tensor(key))
    for j, row in rows.items():
        table[j - 1, torch.from_numpy(g.arrays["alpha_mask"][j - 1])] = row
    g.equal(key, table, bound)
