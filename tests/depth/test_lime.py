"""LIMe and Depth-Attention: x-transformers' decoder, the mixed cache of a decoder by hand, and what is refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twoaxis
from tests.support.numbers import close, randn
from twoaxis.depth.lime import Lime
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.sequence.rope import rotate

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


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Their decoder with random weights, and ours with the same sub-layers and routers."""
    if importlib.util.find_spec("x_transformers") is None:
        pytest.skip("x-transformers is not installed")
    from x_transformers.x_transformers import Decoder as Original

    torch.manual_seed(0)
    theirs = Original(dim=WIDTH, depth=BLOCKS, heads=2, attn_dim_head=8, integrate_layers=True).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) * 0.3)
    options: dict[str, Any] = {"weights": "token", "normaliser": "softmax", "ways": "qkv", "every": "sublayer"}
    ours = twoaxis.stream("lime", blocks=BLOCKS, width=WIDTH, **options).double()
    assert isinstance(ours, Lime)
    layers: Any = theirs.layers
    routers: Any = theirs.layer_integrators
    with torch.no_grad():
        for site in ours.sites[1:]:
            norm, linear = routers[site.index].to_weights[0], routers[site.index].to_weights[1]
            i = str(site.index)
            ours.norm_weight[i].copy_(norm.g)
            ours.router[i].copy_(linear.weight.view_as(ours.router[i]))
            ours.bias[i].copy_(linear.bias.view_as(ours.bias[i]))
    sublayers = [
        (site.kind, None, Theirs(layers[site.index][0][0], layers[site.index][1], site.kind == "attention"))
        for site in ours.sites
    ]
    return theirs, twoaxis.compose(ours, sublayers)


def test_equals_x_transformers(pair: tuple[Any, Any]) -> None:
    """Outputs, the gradient of the input and those of every router."""
    theirs, ours = pair
    x = randn(2, 5, WIDTH).requires_grad_()
    a, b = theirs.final_norm(ours(x)), theirs(x)
    close(a, b, 1e-10)
    probe = randn(*b.shape, seed=3)
    routers = theirs.layer_integrators
    linears = [routers[site.index].to_weights[1] for site in ours.stream.sites[1:]]
    their_grads = torch.autograd.grad((b * probe).sum(), [x, *(p for m in linears for p in (m.weight, m.bias))])
    mine = [
        p
        for site in ours.stream.sites[1:]
        for p in (ours.stream.router[str(site.index)], ours.stream.bias[str(site.index)])
    ]
    our_grads = torch.autograd.grad((a * probe).sum(), [x, *mine])
    for one, other in zip(our_grads, their_grads, strict=True):
        close(one, other.view_as(one), 1e-9)


def decoder(stream: str, **options: Any) -> Decoder:
    shape: dict[str, Any] = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "intermediate_size": 8}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = ModelConfig(**shape, **heads, stream=stream, stream_options=options)
    return Decoder(config, 1).double()


def projected(model: Decoder, block: int, x: Tensor) -> list[Tensor]:
    """Queries, keys and values of one attention, from the residual that arrives there."""
    site = model.stream.sites_of(block)[0]
    attention: Any = model.sublayer(site)
    norm: Any = model.site_norm(site)
    c = norm(twoaxis.Seen(x)).x
    q, k, v = (f(c).unflatten(-1, (-1, 2)) for f in (attention.q_proj, attention.k_proj, attention.v_proj))
    rope = model.info(x[..., 0]).rope
    return [rotate(q, rope), rotate(k, rope), v]


@pytest.mark.parametrize("name", ["depth_kv", "lime"])
def test_the_cache_holds_what_was_mixed(name: str) -> None:
    """Values of the second block by hand, from projections of the residual before each attention."""
    model = decoder(name, **({} if name == "depth_kv" else {"over": "heads", "kv_heads": 2}))
    tokens, arrived = torch.tensor([[1, 2, 3]]), []
    with torch.no_grad():
        info = model.info(tokens, model.start())
        watch: Any = lambda site, state, seen: arrived.append(seen.x)  # noqa: E731
        model.run(model.embed(tokens), info, watch=watch)
        assert info.memory is not None
        (_, k0, v0), (q, k, v) = (projected(model, block, arrived[2 * block]) for block in (0, 1))
        cached_k, cached_v = info.memory.rings["1.self_attn"].tensors()
        if name == "depth_kv":
            asking = q.unflatten(-2, (2, 2)).mean(-2)
            weights = torch.stack([(asking * k0).sum(-1), (asking * k).sum(-1)], -1).div(2**0.5).softmax(-1)
            close(cached_k, k)
            close(cached_v, weights[..., :1] * v0 + weights[..., 1:] * v)
        else:
            router = model.stream.router["2"]
            close(cached_k, torch.einsum("hj,btjd->bthd", router, torch.cat([k0, k], -2)))
            close(cached_v, torch.einsum("hj,btjd->bthd", router, torch.cat([v0, v], -2)))


def test_the_published_start_of_a_router() -> None:
    """The identity on the layer's own heads, U(-sqrt(3/n), sqrt(3/n)) on the n columns."""
    stream = twoaxis.stream("lime", blocks=40, width=8, over="heads", kv_heads=8)
    assert isinstance(stream, Lime)
    last = stream.router["78"]
    assert last.shape == (8, 320)
    assert torch.equal(last[:, -8:], torch.eye(8))
    bound = (3 / 320) ** 0.5
    assert 0.97 * bound < last[:, :-8].abs().max() <= bound
    stream.neutral_()
    assert last[:, :-8].abs().max() == 0


def test_another_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="built for kv_heads=4, the attention has 2 key heads"):
        decoder("lime", over="heads", kv_heads=4)(torch.tensor([[1, 2]]))
