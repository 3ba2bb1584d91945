"""What is particular to manifold hyper-connections: its two forms, starts, read-outs, counts and bounded mixing."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import rms_norm, trace
from tests.support.streams import maps, moved
from twoaxis.depth import counts
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnections, ManifoldHyperConnectionsConfig
from twoaxis.depth.stream import Layout

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


def run(stream: twoaxis.Stream, x: Tensor, eps: float | None = None) -> Tensor:
    """The stream with toy sub-layers, behind a pre-norm if `eps` is given."""
    norm = None if eps is None else [rms_norm(torch.ones(()), eps)] * len(stream.sites)
    return trace(stream, x, maps(len(stream.sites), WIDTH, x.dtype), norm)[0]


def plain(x: Tensor, eps: float | None = None) -> Tensor:
    return run(twoaxis.stream("standard", blocks=2, width=WIDTH, kinds=KINDS), x, eps)


# The manifold.


def test_first_comb_has_no_gradient() -> None:
    """Its streams are copies of one another: any forward gain of one mixes them into themselves."""
    stream, x = moved(build(streams=3).double()), embedding()
    (grad,) = torch.autograd.grad(run(stream, x).square().sum(), stream.base)
    largest = grad.abs().max()
    assert grad[0, 6:].abs().max() <= 1e-13 * largest
    assert grad[0, :6].abs().min() > 1e-8 * largest
    assert grad[2, 6:].abs().max() > 1e-4 * largest


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


def test_zero_logits_are_plain_up_to_a_scale() -> None:
    stream, x = build(streams=4).double(), embedding()
    with torch.no_grad():
        stream.fn.zero_()
    pre, post, mix, _ = stream.routed(x.unsqueeze(-2).expand(2, 3, 4, WIDTH), 0)
    assert pre is not None
    assert mix is not None
    comb = mix.mT
    assert torch.equal(pre, torch.full_like(pre, 0.5))
    assert torch.equal(post, torch.ones_like(post))
    torch.testing.assert_close(comb, torch.full_like(comb, 0.25), rtol=1e-15, atol=0)
    torch.testing.assert_close(run(stream, x, eps=1e-60), 4 * plain(x, eps=1e-60), rtol=1e-12, atol=1e-12)
    assert (run(stream, x) / 4 - plain(x)).abs().max() > 1e-2


def test_one_stream_is_neutral_up_to_a_scale() -> None:
    stream, x = moved(build(streams=1, readout="mean").double()), embedding()
    stream.neutral_()
    assert stream.neutral == "scale"
    torch.testing.assert_close(run(stream, x, eps=1e-60), plain(x, eps=1e-60), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"form": "deepseek"}, {"post_scale": 1.0}, {"pre_eps": 0.1}], ids=str)
def test_epsilons_leave_no_neutral_parameters(options: dict[str, Any]) -> None:
    stream = build(**options)
    assert stream.neutral == "none"
    with pytest.raises(ValueError, match="no neutral parameters"):
        stream.neutral_()


def test_neutral_start_of_the_deepseek_form_is_off_by_its_epsilon() -> None:
    stream, x = build(form="deepseek", start="neutral").double(), embedding()
    error = (run(stream, x) - plain(x)).abs().max() / plain(x).abs().max()
    assert 1e-8 < error < 1e-4


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


# Forms and counts.


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


def test_published_parameter_counts() -> None:
    with torch.device("meta"):
        layout = Layout.make(3, 256)
        paper = ManifoldHyperConnections(ManifoldHyperConnectionsConfig(), layout)
        deepseek = ManifoldHyperConnections(ManifoldHyperConnectionsConfig(form="deepseek"), layout)
        weighted = ManifoldHyperConnections(ManifoldHyperConnectionsConfig(norm_weight=True), layout)
    assert counts.count(paper).parameters == 6 * (96 * 256 + 27)
    assert counts.count(deepseek).parameters == 6 * (96 * 256 + 27) + 16 * 256 + 4 + 1
    assert counts.count(weighted).parameters == 6 * (100 * 256 + 27)
    assert sum(p.numel() for p in deepseek.parameters()) == counts.count(deepseek).parameters


def test_flops() -> None:
    with torch.device("meta"):
        cost = counts.count(ManifoldHyperConnections(ManifoldHyperConnectionsConfig(), Layout.make(3, 256)))
    mean_square, readout = 8 * 256, 3 * 256
    assert cost.flops == 6 * (192 * 256 + (2 * 16 + 16) * 256 + mean_square) + readout
    assert cost.live == 4 * 256
    assert cost.reads == 7 * 4


def test_parameters_are_packed_as_deepseek_v4_packs_them() -> None:
    stream = build(form="deepseek", streams=4)
    shapes = {name: tuple(p.shape) for name, p in stream.named_parameters()}
    assert shapes == {
        "fn": (6, 24, 4 * WIDTH),
        "base": (6, 24),
        "scale": (6, 3),
        "head_fn": (4, 4 * WIDTH),
        "head_base": (4,),
        "head_scale": (1,),
    }
    decayed, rest = stream.parameter_groups()
    assert decayed.names == ("fn", "head_fn")
    assert decayed.decay
    assert rest.names == ("base", "scale", "head_base", "head_scale")
    assert not rest.decay
    assert stream.output_scale == 1.0


# What is saved, errors.


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": None}, "unknown form None"),
        ({"sinkhorn_eps": -1e-6}, "sinkhorn_eps must not be negative, got -1e-06"),
        ({"norm_eps": math.nan}, "norm_eps must be a finite number or None, got nan"),
        ({"post_scale": 0.0}, "post_scale must be positive, got 0.0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
