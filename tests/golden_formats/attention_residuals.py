"""attnres_*.npz"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import FORWARD, Golden, finish, put, rms_norm, stacked, tanh_of, trace
from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.depth.stream import State, Stream
from twoaxis.kernels.history import rms_logits, weighted_sum


def check_attention_residuals(g: Golden) -> None:
    count, size = g.number("L"), max(g.number("block_size"), 1)
    window = g.number("window") if "window" in g else None
    evaluations = ["direct"] if window is not None else ["direct", "two_phase"]
    for evaluation in evaluations:
        x0, w = g.tensor("x0", grad=True), g.tensor("W", grad=True)
        stream = twoaxis.stream(
            "attention_residuals",
            blocks=count,
            width=x0.shape[-1],
            kinds=("mlp",),
            block_size=size,
            window=window,
            eps=g.number("eps"),
            evaluation=evaluation,
            # the first phase in a file runs block by block, those of one sub-layer included
            group=size if evaluation == "two_phase" and "block_rep" in g else None,
        ).double()
        assert isinstance(stream, AttentionResiduals)
        query, norm_weight = stream.get_parameter("query"), stream.get_parameter("norm_weight")
        put(query, g.tensor("query"))
        put(norm_weight, g.tensor("norm_weight"))
        out, steps, state = trace(stream, x0, [tanh_of(w[i]) for i in range(count)])
        g.equal("h", stacked(steps, lambda s: s["seen"].x))
        g.equal("f_out", stacked(steps, lambda s: s["y"]))
        check_depth_weights(g, stream, [s["before"] for s in steps] + [state])
        if "block_rep" in g:
            check_block_sums(g, steps, state)
            check_phases(g, stream, steps, evaluation)
        leaves = {"grad_x0": x0, "grad_W": w, "grad_query": query, "grad_norm_weight": norm_weight}
        finish(g, out, leaves, key="output")


def check_depth_weights(g: Golden, stream: Stream, states: list[State]) -> None:
    alpha = g.tensor("alpha")
    ours, numbers = torch.zeros_like(alpha), torch.full(g.arrays["source_id"].shape, -1)
    for i, (site, state) in enumerate(zip(stream.layout.sites, states, strict=True)):
        weights = stream.weights(state, site)
        assert weights is not None
        n = weights.shape[-1]
        names = stream.sources(site)
        assert n == g.arrays["n_sources"][i] == len(names)
        ours[i, :n] = weights.squeeze(-2).movedim(-1, 0).detach()
        numbers[i, :n] = torch.tensor([number_of(name, site.index, max(g.number("block_size"), 1)) for name in names])
    g.equal("alpha", ours)
    g.equal("source_id", numbers, bound=0.0)


def number_of(name: str, index: int, size: int) -> int:
    """A source's number in the files: 0 is the embedding; the partial carries the number of the block it becomes."""
    if name == "partial":
        return index // size + 1
    return 0 if name == "embedding" else int(name.rsplit(" ", 1)[1]) + 1


def check_block_sums(g: Golden, steps: list[dict[str, Any]], state: State) -> None:
    """Block sums and running partials."""
    final = state.value
    sums = [source.x for source in final.kept] + ([final.part] if final.part is not None else [])
    g.equal("block_rep", torch.stack(sums))
    after = [step["state"].value for step in steps]
    g.equal("partial", torch.stack([v.kept[-1].x if v.part is None else v.part for v in after]))


def check_phases(g: Golden, stream: AttentionResiduals, steps: list[dict[str, Any]], evaluation: str) -> None:
    """The partial's logits and, in two phases, the batched reads with their log-sum-exps."""
    logits = torch.zeros_like(g.tensor("phase2_logit"))  # zero where there is no partial
    for i, step in enumerate(steps):
        if (part := step["before"].value.part) is not None:
            logits[i] = logit(stream, part, i).detach()
    g.equal("phase2_logit", logits)
    if evaluation == "direct":
        return
    o, m, mass = g.tensor("phase1_o"), g.tensor("phase1_m"), g.tensor("phase1_l")
    for i, step in enumerate(steps):
        group = step["before"].value.own.group
        if group is None:  # the first group reads the embedding alone
            read = step["before"].value.kept[0].x
            lse = logit(stream, read, i)
        else:
            assert stream.group is not None
            place = i - min((i // stream.group + 1) * stream.group, len(stream.layout.sites))
            read, lse = group.reads[place], group.lse[..., 0, place]
        assert (read - o[i] / mass[i].unsqueeze(-1)).abs().max() <= FORWARD * o.abs().max()
        assert (lse - (m[i] + mass[i].log())).abs().max() <= FORWARD * lse.abs().max().clamp_min(1)
        g.compared += 1


def logit(stream: AttentionResiduals, x: Tensor, row: int) -> Tensor:
    """Of one source for one site."""
    queries = stream.queries()
    assert queries is not None
    return rms_logits(x, queries[row : row + 1], eps=stream.eps)[..., 0, 0]


def check_attention_residuals_op(g: Golden) -> None:
    d = g.tensor("query").shape[0]
    for tag, scale in (("plain", 1.0), ("scaled", d**-0.5), ("outnorm", 1.0)):
        v, query = g.tensor("V", grad=True), g.tensor("query", grad=True)
        weight, out_weight = g.tensor("norm_weight", grad=True), g.tensor("output_norm_weight", grad=True)
        u = (query * weight * scale).view(1, 1, d)
        sources = list(v.unbind(0))
        logits = torch.stack([rms_logits(s, u, eps=g.number("eps"))[..., 0, 0] for s in sources], dim=-1)
        alpha = logits.softmax(-1)
        out = weighted_sum(sources, token=alpha.unsqueeze(-2))[0]
        g.equal(f"{tag}_alpha", alpha.movedim(-1, 0))
        leaves = {f"{tag}_grad_V": v, f"{tag}_grad_query": query, f"{tag}_grad_norm_weight": weight}
        if tag == "outnorm":
            out = rms_norm(out_weight, g.number("eps"))(out)
            leaves[f"{tag}_grad_output_norm_weight"] = out_weight
        g.equal(f"{tag}_out", out)
        grads = torch.autograd.grad((out * g.tensor("G")).sum(), list(leaves.values()))
        g.gradients(dict(zip(leaves, grads, strict=True)))
