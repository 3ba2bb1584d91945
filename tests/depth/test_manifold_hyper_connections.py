"""What is particular to manifold hyper-connections: its two forms, starts, read-outs, counts and bounded mixing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import rms_norm, trace
from tests.support.streams import maps, moved
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections, ManifoldHyperConnectionsConfig

WIDTH = 6
KINDS = ("mixer", "attention", "mlp")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(
    blocks: int = 2, width: int = WIDTH, kinds: tuple[str, ...] = KINDS, **options: Any
) -> ManifoldHyperConnections:
    stream = twoaxis.stream("manifold_hyper_connections", blocks=blocks, width=width, kinds=kinds, **options)
    assert isinstance(stream, ManifoldHyperConnections)
    return stream


def embedding(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def run(stream: twoaxis.Stream, x: Tensor) -> Tensor:
    return trace(stream, x, maps(len(stream.sites), WIDTH, x.dtype))[0]


# Starts and neutral classes.


def test_starts() -> None:
    n, count = 3, 6
    paper, deepseek, lite = (build(streams=n, start=s, readout="head") for s in ("paper", "deepseek", "lite"))
    for stream, scale in ((paper, 0.01), (deepseek, 1.0)):
        assert torch.equal(stream.scale, torch.full((count, 3), scale))
        assert torch.equal(stream.head_scale, torch.full((1,), scale))
        assert stream.base.abs().max() == stream.head_base.abs().max() == 0
        assert 0.018 < stream.fn.std() < 0.022
        assert 0.01 < stream.head_fn.std() < 0.03
    assert build(init_std=0.5).fn.std() > 0.4
    for row in range(count):
        vectors = torch.full((n,), -1.0)
        vectors[row % n] = 1.0
        comb = torch.full((n, n), -8.0).fill_diagonal_(0.0)
        assert torch.equal(lite.base[row], torch.cat([vectors, vectors, comb.flatten()]))
    assert lite.fn.abs().max() == 0
    weighted = build(norm_weight=True, readout="head")
    assert weighted.norm_weight is not None
    assert weighted.head_norm_weight is not None
    assert torch.equal(weighted.norm_weight, torch.ones(6, 4 * WIDTH))
    assert torch.equal(weighted.head_norm_weight, torch.ones(4 * WIDTH))


def test_the_default_start_tells_streams_apart_and_the_published_scale_does_not() -> None:
    def apart(**options: Any) -> float:
        stream, x = build(width=128, **options), torch.randn(2, 16, 128)
        *_, state = trace(stream, x, [torch.tanh] * len(stream.sites), [rms_norm(torch.ones(()), 1e-6)] * 6)
        h = state.value.h
        return ((h - h.mean(-2, keepdim=True)).norm() / h.norm()).item()

    assert apart() > 0.02
    assert apart(form="deepseek") > 0.02
    assert apart(start="paper") < 0.001


@pytest.mark.parametrize("options", [{"form": "deepseek"}, {"post_scale": 1.0}, {"pre_eps": 0.1}], ids=str)
def test_epsilons_leave_no_neutral_parameters(options: dict[str, Any]) -> None:
    stream = build(**options)
    assert stream.neutral == "none"
    with pytest.raises(ValueError, match="no neutral parameters"):
        stream.neutral_()


def test_neutral_start_lets_streams_come_apart() -> None:
    """Equal gates would get equal gradients for ever."""
    stream, x = build(streams=2, start="neutral", readout="mean").double(), embedding()
    optimizer = torch.optim.SGD(stream.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        run(stream, x).square().sum().backward()
        optimizer.step()
    _, _, state = trace(stream, x, maps(len(stream.sites), WIDTH, x.dtype))
    h = state.value.h
    assert (h[..., 0, :] - h[..., 1, :]).abs().max() > 1e-3


# Forms.


def test_forms_set_what_is_left_open() -> None:
    paper, deepseek = ManifoldHyperConnectionsConfig(), ManifoldHyperConnectionsConfig(form="deepseek")
    assert (paper.sinkhorn_eps, paper.pre_eps, paper.norm_eps) == (0.0, 0.0, 1e-20)
    assert paper.readout == "sum"
    assert (deepseek.sinkhorn_eps, deepseek.pre_eps, deepseek.norm_eps) == (1e-6, 1e-6, 1e-6)
    assert deepseek.readout == "head"
    assert paper.start == deepseek.start == "deepseek"
    mixed = ManifoldHyperConnectionsConfig(form="deepseek", readout="mean", pre_eps=0.0)
    assert (mixed.readout, mixed.pre_eps, mixed.sinkhorn_eps) == ("mean", 0.0, 1e-6)
    assert ManifoldHyperConnectionsConfig(**dataclasses.asdict(mixed)) == mixed


# What is saved.


def test_no_iterate_is_saved_for_backward() -> None:
    """Neither Sinkhorn's iterates nor a float32 copy of bfloat16 streams."""
    sizes = {}
    for iterations in (2, 50):
        stream = moved(build(width=64, iterations=iterations)).bfloat16()
        x = torch.randn(2, 8, 64).bfloat16().requires_grad_()
        saved: list[Tensor] = []

        def pack(t: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            trace(stream, x, [torch.tanh] * len(stream.sites))
        sizes[iterations] = sum(t.numel() for t in saved)
        assert not [t for t in saved if t.dtype == torch.float32 and t.shape[:2] == (2, 8) and t.shape[-1] >= 64]
    assert sizes[2] == sizes[50] > 0
