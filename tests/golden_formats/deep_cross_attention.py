"""dca_*.npz"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, finish, put, trace
from twoaxis.depth.history import HistoryStream

TOYS = ("A", "B", "C", "M")
KNOWN = re.compile(
    r"(grad\.)?(x0|toy\.[ABCM]|grn(\d+|_out)\.[bw])|G|out|loss|plain_out|stack(\d+|_out)|stream\.[qkvr]\d+|block_out\d+"
    # the norm in front of w, whose epsilon this is, is what the patched code leaves out
    r"|cfg\.(version|grn_per_block|k|norm_eps)"
)


def check_deep_cross_attention(g: Golden) -> None:
    unknown = [key for key in g.arrays if not KNOWN.fullmatch(key)]
    assert not unknown, f"{g.name}: nobody reads {unknown}"
    # the two forms of the ReLU differ in the gradient at exactly zero, where the files hold torch.relu's
    zero = [not g.arrays[key].any() for key in g.arrays if re.fullmatch(r"grn.*\.w", key)]
    for form in ["literal", "trainable"] if zero and not any(zero) else ["literal"]:
        check_form(g, form)


def check_form(g: Golden, form: str) -> None:
    x0 = g.tensor("x0", grad=True)
    toys = {name: g.tensor(f"toy.{name}", grad=True) for name in TOYS}
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
    ours = dict(stream.named_parameters())
    held: dict[str, str] = {}
    for block in range(blocks + 1):
        theirs = f"grn{block}" if block < blocks else "grn_out"
        held |= {f"{theirs}.b": f"static.{block}"} | ({f"{theirs}.w": f"token.{block}"} if f"{theirs}.w" in g else {})
    assert set(ours) == set(held.values())
    if "plain_out" in g:
        for theirs, name in held.items():
            assert torch.equal(ours[name].detach(), g.tensor(theirs)), f"{name} does not start where {theirs} does"
    for theirs, name in held.items():
        assert ours[name].shape == g.arrays[theirs].shape
        put(ours[name], g.tensor(theirs))

    def attention(block: int, *ways: Tensor) -> Tensor:
        q, key, v = ways * 3 if len(ways) == 1 else ways
        return torch.tanh(q @ toys["A"][block] + key @ toys["B"][block] + v @ toys["C"][block])

    sublayers: list[Any] = []
    for block in range(blocks):
        sublayers.append(lambda *ways, block=block: attention(block, *ways))
        sublayers.append(lambda h, block=block: torch.tanh(h @ toys["M"][block]))
    out, steps, state = trace(stream, x0, sublayers)
    for block in range(blocks):
        first, last = steps[2 * block], steps[2 * block + 1]
        seen = first["seen"]
        g.equal(f"stack{block}", torch.stack(stream.view(first["before"].value, first["site"]).sources))
        for way in "qkv":
            separate = getattr(seen, way)
            g.equal(f"stream.{way}{block}", seen.x if separate is None else separate)
        g.equal(f"stream.r{block}", seen.x)
        g.equal(f"block_out{block}", first["y"] + last["y"])
    g.equal("stack_out", torch.stack(stream.view(state.value, stream.layout.out).sources))
    if "plain_out" in g:
        g.equal("plain_out", out)
    leaves = {"grad.x0": x0} | {f"grad.toy.{name}": toy for name, toy in toys.items()}
    finish(g, out, leaves | {f"grad.{theirs}": ours[name] for theirs, name in held.items()})
