"""mHC against the hyper-connection of transformers' DeepSeek-V4: reads, states, head and gradients, in float32."""

from __future__ import annotations

import pytest
import torch

import twoaxis
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections

pytest.importorskip("transformers")


@pytest.mark.parametrize(("streams", "iterations", "eps"), [(4, 20, 1e-6), (2, 3, 1e-3), (3, 1, 1e-2)])
def test_equals_deepseek_v4(streams: int, iterations: int, eps: float) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    width, count = 8, 4
    config = DeepseekV4Config(
        hidden_size=width, hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=eps, rms_norm_eps=1e-5
    )
    theirs = [deepseek.DeepseekV4HyperConnection(config) for _ in range(count)]
    head = deepseek.DeepseekV4HyperHead(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [p for module in (*theirs, head) for p in module.parameters()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    stream = twoaxis.stream(
        "manifold_hyper_connections",
        blocks=count // 2,
        width=width,
        form="deepseek",
        streams=streams,
        iterations=iterations,
        sinkhorn_eps=eps,
        pre_eps=eps,
        norm_eps=1e-5,
    )
    assert isinstance(stream, ManifoldHyperConnections)
    with torch.no_grad():
        for name in ("fn", "base", "scale"):
            getattr(stream, name).copy_(torch.stack([getattr(module, name) for module in theirs]))
            getattr(stream, f"head_{name}").copy_(getattr(head, f"hc_{name}"))
    x = torch.randn(2, 3, width, generator=generator)
    maps = torch.randn(count, width, width, generator=generator) / 3

    state = stream.open(x.requires_grad_())
    hidden = x.unsqueeze(2).expand(-1, -1, streams, -1).contiguous()
    for site, module, m in zip(stream.sites, theirs, maps, strict=True):
        seen = stream.read(state, site)
        post, comb, collapsed = module(hidden)
        assert (seen.x - collapsed).abs().max() <= 1e-5
        state = stream.write(state, site, torch.tanh(seen.x @ m), seen, seen)
        y = torch.tanh(collapsed @ m)
        hidden = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), hidden)
        assert (state.value[0] - hidden).abs().max() <= 2e-5
    out, want = stream.close(state), head(hidden)
    assert (out - want).abs().max() <= 2e-5
    grads = torch.autograd.grad(out.square().sum(), [x, stream.fn, stream.base, stream.scale])
    stacked = [torch.autograd.grad(want.square().sum(), [x], retain_graph=True)[0]]
    for name in ("fn", "base", "scale"):
        parts = torch.autograd.grad(want.square().sum(), [getattr(m, name) for m in theirs], retain_graph=True)
        stacked.append(torch.stack(parts))
    for a, b in zip(grads, stacked, strict=True):
        assert (a - b).abs().max() <= 1e-4 * max(1.0, b.abs().max().item())
