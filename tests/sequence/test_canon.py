from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.sequence.helpers import small_decoder, tokens
from tests.support.numbers import close, randn
from twoaxis import Decoder, mixer
from twoaxis.sequence.canon import LAYERS
from twoaxis.sequence.short_conv import ShortConv

SETS = ["".join(letters) for n in range(1, 5) for letters in itertools.combinations("ABCD", n)]


def canon(x: Tensor, weight: Tensor | None, activation: bool, residual: bool) -> Tensor:
    """One Canon layer out of torch's convolution; no weight is no layer."""
    if weight is None:
        return x
    padded = F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded, weight, groups=len(weight)).transpose(1, 2)
    y = F.silu(y) if activation else y
    return x + y if residual else y


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rope(x: Tensor) -> Tensor:
    """(B, T, H, 4) turned as complex pairs."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10_000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def oracle(model: Decoder, ids: Tensor, **options: Any) -> Tensor:
    """The published block by hand: two query heads of width 4 on one key head, every Canon layer in its place."""
    p = dict(model.named_parameters())
    h = p["embed_tokens.weight"][ids]
    for b in range(2):
        attention, mlp = f"layers.{b}.self_attn", f"layers.{b}.mlp"
        a, bb, c, d = (p.get(f"{where}.{place}.weight") for where in (attention, mlp) for place in ("before", "inside"))
        n = canon(rms(h, p[f"layers.{b}.input_layernorm.weight"]), a, **options)
        joined = torch.cat([n @ p[f"{attention}.{way}_proj.weight"].T for way in "qkv"], dim=-1)
        q, k, v = (t.unflatten(-1, (-1, 4)) for t in canon(joined, bb, **options).split([8, 4, 4], dim=-1))
        q, k, v = rope(q), rope(k).expand_as(q), v.expand_as(q)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).flatten(-2) @ p[f"{attention}.o_proj.weight"].T
        m = canon(rms(h, p[f"layers.{b}.post_attention_layernorm.weight"]), c, **options)
        joined = torch.cat([m @ p[f"{mlp}.{way}_proj.weight"].T for way in ("gate", "up")], dim=-1)
        gate, up = canon(joined, d, **options).chunk(2, dim=-1)
        h = h + (F.silu(gate) * up) @ p[f"{mlp}.down_proj.weight"].T
    return rms(h, p["norm.weight"]) @ p["embed_tokens.weight"].T


# The layers in their places.


@pytest.mark.parametrize(
    ("letters", "activation", "residual"), [*((s, False, True) for s in SETS), ("ABCD", True, False)]
)
def test_every_subset_equals_the_block_by_hand(letters: str, activation: bool, residual: bool) -> None:
    options = {"set": letters, "activation": activation, "residual": residual, "kernel": 4 if residual else 2}
    model, ids = small_decoder(mixer="canon", mixer_options=options), tokens(2, 7)
    got, want = model(ids), oracle(model, ids, activation=activation, residual=residual)
    close(got, want)
    g, names = randn(2, 7, 17, seed=4), [name for name, _ in model.named_parameters()]
    assert sum(name.split(".")[-2] in ("before", "inside") for name in names) == 2 * len(letters)
    ours, theirs = (torch.autograd.grad((y * g).sum(), list(model.parameters())) for y in (got, want))
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, 1e-9)


def test_a_set_is_the_same_in_any_order() -> None:
    assert mixer("canon", set="DBA").points == mixer("canon", set="ABD").points == ("attention", "qkv", "hidden")
    assert mixer("canon").points == tuple(LAYERS.values())
    model = small_decoder(mixer="canon", parallel_block=True)
    assert [site.kind for site in model.stream.sites] == ["parallel", "parallel"]


# Initial values, parameters, cost.


def test_published_start_and_parameters() -> None:
    local = mixer("canon").build("attention", 4096)
    assert isinstance(local, ShortConv)
    assert local.weight.shape == (4096, 1, 4)
    assert local.bias is None
    assert 0.499 < local.weight.max() <= 0.5
    assert -0.5 <= local.weight.min() < -0.499
    # the 1B recipe: width 2048, 24 blocks of 32 heads, hidden 5632
    made, channels = mixer("canon"), {"attention": 2048, "qkv": 3 * 2048, "mlp": 2048, "hidden": 2 * 5632}
    with torch.device("meta"):
        costs = [made.build(point, 2048, channels[point]).cost() for point in made.points]
    assert sum(cost.parameters for cost in costs) == 86_016
    assert 24 * sum(cost.parameters for cost in costs) == 2_064_384
    assert [tuple(cost) for cost in costs] == [(4 * c, 9 * c, 3 * c) for c in channels.values()]
