"""muddformer_*.npz"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

import twoaxis
from tests.golden_formats.base import Golden, equal_ways, fill, finish, rms_norm, trace, ways_toys

MODULE = {"a": "static", "w1": "generator_in", "w2": "generator_out", "gen_norm_scale": "generator_scale"}


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


def check_muddformer(g: Golden) -> None:
    check_form(g, dynamic=True)
    if not any(g.arrays[key].any() for key in g.arrays if re.fullmatch(r"da\d+\.w2", key)):
        check_form(g, dynamic=False)  # without dynamic weights the static form is the same function


def check_form(g: Golden, dynamic: bool) -> None:
    x0, (toys, attention, mlp) = g.tensor("x0", grad=True), ways_toys(g)
    blocks, parallel = len(toys["A"]), "parallelblock" in g.name
    stream = twoaxis.stream(
        "muddformer",
        blocks=blocks,
        width=x0.shape[-1],
        kinds=("parallel",) if parallel else ("attention", "mlp"),
        **options(g, dynamic),
    ).double()
    ours, names = dict(stream.named_parameters()), {f"prenorm{j}.scale": f"pre_scale.{j}" for j in range(blocks + 1)}
    for i in range(blocks):  # module i of the file stands before our block i + 1
        names |= {f"da{i}.{theirs}": f"{own}.{i + 1}" for theirs, own in MODULE.items()}
        names[f"postnorm{i}.scale"] = f"post_scale.{i + 1}"
    for theirs, name in names.items():
        if "plain_out" in g and theirs in g and name in ours and not theirs.endswith("w1"):
            start = (ours[name].detach() - g.tensor(theirs)).abs().max()
            assert start <= 1e-9, f"{name} does not start where {theirs} does: {start}"  # ours start in float32
    held = fill(g, stream, names)
    norms = {key: g.tensor(key, grad=True) for key in g.arrays if key.startswith("blocknorm")}
    assert norms or "blocknorm" not in g.name, f"{g.name} is said to have block norms and holds none"
    eps = g.number("cfg.norm_eps")

    def normed(block: int, way: str, x: Tensor) -> Tensor:
        """Norms act inside the toys: a file may share one between the ways of a block."""
        scale = norms.get(f"blocknorm{block}.{way}", norms.get(f"blocknorm{block}.attn"))
        return x if scale is None else rms_norm(scale, eps)(x)

    def first(block: int, *ways: Tensor) -> Tensor:
        read = ways * 3 if len(ways) == 1 else ways
        return attention(block, *(normed(block, way, x) for way, x in zip("qkv", read, strict=True)))

    def second(block: int, x: Tensor) -> Tensor:
        return mlp(block, normed(block, "ffn", x))

    def both(block: int, *ways: Tensor) -> Tensor:
        return first(block, *ways[:3]) + second(block, ways[-1])

    parts: tuple[Callable[..., Tensor], ...] = (both,) if parallel else (first, second)
    out, steps, _ = trace(stream, x0, [partial(part, block) for block in range(blocks) for part in parts])
    for block in range(blocks):
        equal_ways(g, block, steps[len(parts) * block]["seen"])
        after = steps[len(parts) * (block + 1) - 1]["state"]
        g.equal(f"block_out{block}", after.value.x)
        weights = stream.weights(after, stream.layout.sites[after.index])
        assert weights is not None
        g.equal(f"da{block}.dw", weights.movedim(-2, 0))
    if "plain_out" in g:
        g.equal("plain_out", out)
    leaves = {"x0": x0, **{f"toy.{name}": toy for name, toy in toys.items()}, **norms, **held}
    finish(g, out, {f"grad.{name}": leaf for name, leaf in leaves.items()})
