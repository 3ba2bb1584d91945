"""muddformer_*.npz"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, finish, put, rms_norm, trace

TOYS = ("A", "B", "C", "M")
KNOWN = re.compile(
    r"(grad\.)?(x0|toy\.[ABCM]|da\d+\.(w1|w2|a|gen_norm_scale)|(pre|post)norm\d+\.scale|blocknorm\d+\.(attn|q|k|v|ffn))"
    r"|G|out|loss|plain_out|da\d+\.dw|stream\.[qkvr]\d+|block_out\d+|cfg\.(norm_eps|ways|expand_last|round64|gelu_tanh)"
)


def options(g: Golden, dynamic: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ways": {1: "one", 4: "qkvr"}[g.number("cfg.ways")],
        "prenorm": "prenorm0.scale" in g,
        "postnorm": "postnorm0.scale" in g,
        "gelu": "tanh" if "cfg.gelu_tanh" in g and g.number("cfg.gelu_tanh") else "erf",
        "eps": g.number("cfg.norm_eps"),
        # the JAX code learns a scale for this one norm and drops the epsilon it is given
        "generator_scale": dynamic and "da0.gen_norm_scale" in g,
        "generator_eps": 1e-6 if "jax" in g.name or "da0.gen_norm_scale" in g else None,
        "first_norms": "separate",
        "dynamic": dynamic,
    }
    if dynamic:
        found |= {name: bool(g.number(f"cfg.{name}")) for name in ("expand_last", "round64")}
    return found


def names_of(g: Golden, blocks: int, dynamic: bool) -> dict[str, str]:
    """Our name of each parameter in the file; module i of the file stands before our block i + 1."""
    held = {}
    for i in range(blocks):
        theirs = {f"da{i}.a": f"static.{i + 1}", f"postnorm{i}.scale": f"post_scale.{i + 1}"}
        if dynamic:
            theirs |= {
                f"da{i}.w1": f"generator_in.{i + 1}",
                f"da{i}.w2": f"generator_out.{i + 1}",
                f"da{i}.gen_norm_scale": f"generator_scale.{i + 1}",
            }
        held |= theirs
    held |= {f"prenorm{j}.scale": f"pre_scale.{j}" for j in range(blocks + 1)}
    return {theirs: ours for theirs, ours in held.items() if theirs in g}


def check_muddformer(g: Golden) -> None:
    unknown = [key for key in g.arrays if not KNOWN.fullmatch(key)]
    assert not unknown, f"{g.name}: nobody reads {unknown}"
    check_form(g, dynamic=True)
    if not any(g.arrays[key].any() for key in g.arrays if re.fullmatch(r"da\d+\.w2", key)):
        check_form(g, dynamic=False)  # without dynamic weights the static form is the same function


def check_form(g: Golden, dynamic: bool) -> None:
    x0 = g.tensor("x0", grad=True)
    toys = {name: g.tensor(f"toy.{name}", grad=True) for name in TOYS}
    blocks, parallel = len(toys["A"]), "parallelblock" in g.name
    stream = twoaxis.stream(
        "muddformer",
        blocks=blocks,
        width=x0.shape[-1],
        kinds=("parallel",) if parallel else ("attention", "mlp"),
        **options(g, dynamic),
    ).double()
    ours, held = dict(stream.named_parameters()), names_of(g, blocks, dynamic)
    assert set(ours) == set(held.values()), f"{g.name}: {set(ours) ^ set(held.values())}"
    for theirs, name in held.items():
        assert ours[name].shape == g.arrays[theirs].shape, f"{g.name}: {theirs}"
        if "plain_out" in g and not theirs.endswith("w1"):
            start = (ours[name].detach() - g.tensor(theirs)).abs().max()
            assert start <= 1e-9, f"{name} does not start where {theirs} does: {start}"  # ours start in float32
        put(ours[name], g.tensor(theirs))
    norms = {key: g.tensor(key, grad=True) for key in g.arrays if key.startswith("blocknorm")}
    assert norms or "blocknorm" not in g.name, f"{g.name} is said to have block norms and holds none"
    eps = g.number("cfg.norm_eps")

    def norm(block: int, way: str) -> Callable[[Tensor], Tensor]:
        """Norms act inside the toys: a file may share one between the ways of a block."""
        if not norms:
            return lambda x: x
        key = f"blocknorm{block}.{way}"
        return rms_norm(norms[key] if key in norms else norms[f"blocknorm{block}.attn"], eps)

    def attention(block: int, *ways: Tensor) -> Tensor:
        read = ways * 3 if len(ways) == 1 else ways
        terms = [norm(block, way)(x) @ toys[toy][block] for way, toy, x in zip("qkv", "ABC", read, strict=True)]
        return torch.tanh(terms[0] + terms[1] + terms[2])

    def mlp(block: int, x: Tensor) -> Tensor:
        return torch.tanh(norm(block, "ffn")(x) @ toys["M"][block])

    def both(block: int, *ways: Tensor) -> Tensor:
        return attention(block, *ways[:3]) + mlp(block, ways[-1])

    fns = (both,) if parallel else (attention, mlp)
    sublayers = [lambda *ways, fn=fn, block=block: fn(block, *ways) for block in range(blocks) for fn in fns]
    out, steps, _ = trace(stream, x0, sublayers)
    for block in range(blocks):
        first, last = steps[len(fns) * block], steps[len(fns) * (block + 1) - 1]
        for way in "qkv":
            separate = getattr(first["seen"], way)
            g.equal(f"stream.{way}{block}", first["seen"].x if separate is None else separate)
        g.equal(f"stream.r{block}", first["seen"].x)
        g.equal(f"block_out{block}", last["state"].value.x)
        after = last["state"]
        weights = stream.weights(after, stream.layout.sites[after.index])
        assert weights is not None
        g.equal(f"da{block}.dw", weights.movedim(-2, 0))
    if "plain_out" in g:
        g.equal("plain_out", out)
    leaves = {"grad.x0": x0} | {f"grad.toy.{name}": toy for name, toy in toys.items()}
    leaves |= {f"grad.{key}": scale for key, scale in norms.items()}
    finish(g, out, leaves | {f"grad.{theirs}": ours[name] for theirs, name in held.items()})
