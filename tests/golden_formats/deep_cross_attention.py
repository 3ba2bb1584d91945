"""dca_*.npz"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

import twoaxis
from tests.golden_formats.base import Golden, equal_ways, fill, finish, trace, ways_toys
from twoaxis.depth.history import HistoryStream

LEAVES = {"b": "static", "w": "token"}


def check_deep_cross_attention(g: Golden) -> None:
    g.arrays.get("cfg.norm_eps")  # of the norm in front of w, which the patched code leaves out
    # the two forms of the ReLU differ in the gradient at exactly zero, where the files hold torch.relu's
    zero = [not g.arrays[key].any() for key in g.arrays if re.fullmatch(r"grn.*\.w", key)]
    for form in ["literal", "trainable"] if zero and not any(zero) else ["literal"]:
        check_form(g, form)


def check_form(g: Golden, form: str) -> None:
    x0, (toys, attention, mlp) = g.tensor("x0", grad=True), ways_toys(g)
    blocks, k = len(toys["A"]), g.number("cfg.k")
    stream = twoaxis.stream(
        "deep_cross_attention",
        blocks=blocks,
        width=x0.shape[-1],
        version=g.number("cfg.version"),
        ways={1: "single", 3: "qkv"}[g.number("cfg.grn_per_block")],
        window=None if k < 0 else k,
        relu=form,
    ).double()
    assert isinstance(stream, HistoryStream)
    grns = [f"grn{block}" for block in range(blocks)] + ["grn_out"]
    names = {f"{grn}.{theirs}": f"{ours}.{n}" for n, grn in enumerate(grns) for theirs, ours in LEAVES.items()}
    if "plain_out" in g:
        for theirs, name in names.items():
            if theirs in g:
                start = stream.get_parameter(name).detach()
                assert torch.equal(start, g.tensor(theirs)), f"{name} does not start where {theirs} does"
    held = fill(g, stream, names)
    sublayers: list[Any] = [partial(toy, block) for block in range(blocks) for toy in (attention, mlp)]
    out, steps, state = trace(stream, x0, sublayers)
    for block in range(blocks):
        first, last = steps[2 * block], steps[2 * block + 1]
        g.equal(f"stack{block}", torch.stack(stream.view(first["before"].value, first["site"]).sources))
        equal_ways(g, block, first["seen"])
        g.equal(f"block_out{block}", first["y"] + last["y"])
    g.equal("stack_out", torch.stack(stream.view(state.value, stream.layout.out).sources))
    if "plain_out" in g:
        g.equal("plain_out", out)
    leaves = {"x0": x0, **{f"toy.{name}": toy for name, toy in toys.items()}, **held}
    finish(g, out, {f"grad.{name}": leaf for name, leaf in leaves.items()})
