"""LIMe and Depth-Attention in a decoder: the mixed cache by hand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.support.numbers import close
from twoaxis.model.config import ModelConfig
from twoaxis.model.decoder import Decoder
from twoaxis.sequence.rope import rotate


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


def test_another_number_of_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="built for kv_heads=4, the attention has 2 key heads"):
        decoder("lime", over="heads", kv_heads=4)(torch.tensor([[1, 2]]))
