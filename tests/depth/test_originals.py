"""Streams against other people's code: flash-linear-attention's Attention Residuals and x-transformers' LIMe.

What transformers and the package of hyper-connections ship is held in tests/model/test_shipped_residuals.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from tests.golden_formats.base import trace
from tests.support.numbers import close, randn
from tests.support.streams import built, embedding, toys
from twoaxis.depth.attention_residuals import AttentionResiduals
from twoaxis.depth.lime import Lime


@pytest.fixture(scope="module")
def naive_attnres() -> Callable[..., Tensor]:
    """flash-linear-attention's reference, loaded from its file: the package itself wants a GPU compiler."""
    pytest.importorskip("einops")
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("flash-linear-attention is not installed")
    path = Path(found.submodule_search_locations[0]) / "ops" / "attnres" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_attnres", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_attnres


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_equals_flash_linear_attention(naive_attnres: Callable[..., Tensor], size: int, scale: float) -> None:
    stream: AttentionResiduals = built("attention_residuals", blocks=3, by=0.5, block_size=size, scale=scale)
    assert stream.query is not None
    assert stream.norm_weight is not None
    x = embedding()
    out, steps, _ = trace(stream, x, toys(stream))
    outs = [step["y"] for step in steps]
    for index, read in enumerate([*(step["seen"].x for step in steps), out]):
        bank = [x] + [sum(outs[i : i + size]) for i in range(0, index - index % size, size)]  # type: ignore[list-item]
        if index % size:
            bank.append(sum(outs[index - index % size : index]))  # type: ignore[arg-type]
        theirs = naive_attnres(stream.query[index], bank, stream.norm_weight[index], scale=scale)
        assert (read - theirs).abs().max() <= 2e-6  # the oracle computes in float32
        if index:
            ours_grad, their_grad = (
                torch.autograd.grad(t.square().sum(), [x, stream.query], retain_graph=True) for t in (read, theirs)
            )
            for a, b in zip(ours_grad, their_grad, strict=True):
                assert (a - b).abs().max() <= 2e-5 * max(1.0, b.abs().max().item())


WIDTH, BLOCKS = 16, 3


class Theirs(nn.Module):
    """A sub-layer of x-transformers behind its pre-norm; attentions but the first take a stack of three views."""

    def __init__(self, norm: nn.Module, layer: nn.Module, attends: bool) -> None:
        super().__init__()
        self.norm, self.layer, self.attends = norm, layer, attends

    def forward(self, *ways: Tensor) -> Tensor:
        x = torch.stack(ways)
        x = self.norm(x if len(x) > 1 else x[0])
        return self.layer(x, causal=True) if self.attends else self.layer(x)


def test_equals_x_transformers() -> None:
    """Their decoder with random weights, and ours with the same sub-layers and routers: outputs, the gradient of the
    input and those of every router."""
    if importlib.util.find_spec("x_transformers") is None:
        pytest.skip("x-transformers is not installed")
    from x_transformers.x_transformers import Decoder as Original

    torch.manual_seed(0)
    theirs = Original(dim=WIDTH, depth=BLOCKS, heads=2, attn_dim_head=8, integrate_layers=True).double()
    options: dict[str, Any] = {"weights": "token", "normaliser": "softmax", "ways": "qkv", "every": "sublayer"}
    stream = twoaxis.stream("lime", blocks=BLOCKS, width=WIDTH, **options).double()
    assert isinstance(stream, Lime)
    layers: Any = theirs.layers
    routers: list[Any] = [theirs.layer_integrators[site.index].to_weights for site in stream.sites[1:]]
    names = [str(site.index) for site in stream.sites[1:]]
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
        for i, (norm, linear, *_) in zip(names, routers, strict=True):
            stream.norm_weight[i].copy_(norm.g)
            stream.router[i].copy_(linear.weight.view_as(stream.router[i]))
            stream.bias[i].copy_(linear.bias.view_as(stream.bias[i]))
    ours = twoaxis.compose(
        stream,
        [
            (site.kind, None, Theirs(layers[site.index][0][0], layers[site.index][1], site.kind == "attention"))
            for site in stream.sites
        ],
    )
    x = randn(2, 5, WIDTH, grad=True)
    a, b = theirs.final_norm(ours(x)), theirs(x)
    close(a, b, 1e-10)
    probe = randn(*b.shape, seed=3)
    mine = [p for i in names for p in (stream.router[i], stream.bias[i])]
    their_leaves = [p for router in routers for p in (router[1].weight, router[1].bias)]
    for one, other in zip(
        torch.autograd.grad((a * probe).sum(), [x, *mine]),
        torch.autograd.grad((b * probe).sum(), [x, *their_leaves]),
        strict=True,
    ):
        close(one, other.view_as(one), 1e-9)
