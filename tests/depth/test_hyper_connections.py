"""What is particular to hyper-connections: its weights, options, start and counts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import trace
from tests.support.streams import maps, moved
from twoaxis.depth.hyper_connections import HyperConnections

WIDTH = 6
KINDS = ("mixer", "attention", "mlp")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(blocks: int = 2, width: int = WIDTH, kinds: tuple[str, ...] = KINDS, **options: Any) -> HyperConnections:
    stream = twoaxis.stream("hyper_connections", blocks=blocks, width=width, kinds=kinds, **options)
    assert isinstance(stream, HyperConnections)
    return stream


def embedding(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def run(stream: twoaxis.Stream, x: Tensor) -> Tensor:
    return trace(stream, x, maps(len(stream.sites), WIDTH, x.dtype))[0]


def plain(x: Tensor, blocks: int = 2, kinds: tuple[str, ...] = KINDS) -> Tensor:
    return run(twoaxis.stream("standard", blocks=blocks, width=WIDTH, kinds=kinds), x)


# The start.


def test_initial_values() -> None:
    stream = build(streams=3)
    count = len(stream.sites)
    parameters = dict(stream.named_parameters())
    assert set(parameters) == {
        *("static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_alpha_scale"),
        *("dynamic_beta_fn", "dynamic_beta_scale", "norm_weight", "norm_bias"),
    }
    for k in range(count):
        read = torch.zeros(3)
        read[k % 3] = 1.0
        assert torch.equal(stream.static_alpha[k], torch.cat([read[:, None], torch.eye(3)], dim=1))
    assert torch.equal(stream.static_beta, torch.ones(count, 3))
    for name in ("dynamic_alpha_fn", "dynamic_beta_fn", "norm_bias"):
        assert parameters[name].abs().max() == 0
    for name in ("dynamic_alpha_scale", "dynamic_beta_scale"):
        assert torch.equal(parameters[name], torch.full((count,), 0.01))
    assert torch.equal(parameters["norm_weight"], torch.ones(count, WIDTH))
    assert build(scale_start=0.5).get_parameter("dynamic_beta_scale")[0] == 0.5


def test_output_scale() -> None:
    assert build(streams=4).output_scale == 2.0
    assert build(streams=3).output_scale == math.sqrt(3)
    assert build(streams=4, readout="mean").output_scale == 1.0
    assert build(streams=4, placement="none").output_scale == 1.0


# The weights.


@pytest.mark.parametrize("frozen", ["width", "depth", "both"])
def test_frozen_connections_have_no_parameters_and_stay(frozen: str) -> None:
    stream, x = build(streams=3, frozen=frozen).double(), embedding()
    names = {name for name, _ in stream.named_parameters()}
    assert ("static_alpha" in names) == ("dynamic_alpha_fn" in names) == (frozen == "depth")
    assert ("static_beta" in names) == ("dynamic_beta_fn" in names) == (frozen == "width")
    assert ("norm_weight" in names) == (frozen != "both")
    start = {name: value.clone() for name, value in stream.named_buffers()}
    assert set(start) == {"static_alpha", "static_beta"} - names
    if names:
        optimizer = torch.optim.SGD(stream.parameters(), lr=0.1)
        run(stream, x).square().sum().backward()
        optimizer.step()
        assert not torch.equal(run(stream, x), 3 * plain(x))
    else:
        torch.testing.assert_close(run(stream, x), 3 * plain(x), rtol=1e-14, atol=1e-14)
    for name, value in stream.named_buffers():
        assert torch.equal(value, start[name])
    copied = build(streams=3, frozen=frozen).double()
    copied.load_state_dict(stream.state_dict())
    assert torch.equal(run(copied, x), run(stream, x))


def test_sites_of_all_kinds_count_for_the_first_read() -> None:
    stream = build(streams=4, kinds=KINDS)
    assert [int(stream.static_alpha[site.index, :, 0].argmax()) for site in stream.sites] == [0, 1, 2, 3, 0, 1]
    partial = build(streams=4, kinds=KINDS, placement="attention")
    assert [int(partial.static_alpha[row, :, 0].argmax()) for row in range(2)] == [1, 0]


def test_parameter_groups() -> None:
    static, dynamic = build().parameter_groups()
    assert static.names == ("static_alpha", "static_beta", "norm_weight", "norm_bias")
    assert not static.decay
    assert all(name.startswith("dynamic") for name in dynamic.names)
    assert len(dynamic.names) == 4
    assert dynamic.decay
    assert build(placement="none").parameter_groups() == ()


# The package.


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("streams", [2, 4])
def test_agrees_with_the_package(streams: int, tanh: bool) -> None:
    """Its norm is an RMS norm without epsilon; everything else is the same, gradients included."""
    package = pytest.importorskip("hyper_connections")
    stream = moved(build(streams=streams, tanh=tanh, norm="rms", eps=0.0).double())
    functions, x = maps(len(stream.sites), WIDTH, torch.float64), embedding()
    layers = []
    for row in range(len(functions)):
        layer = package.HyperConnections(streams, dim=WIDTH, layer_index=row, tanh=tanh).double()
        start = build(streams=streams).double().static_alpha[row]
        assert torch.equal(layer.static_alpha, start)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if name == "norm.gamma":
                    parameter.copy_(stream.get_parameter("norm_weight")[row] - 1)
                else:
                    parameter.copy_(stream.get_parameter(name)[row])
        layers.append(layer)
    expand, reduce = package.HyperConnections.get_expand_reduce_stream_functions(streams)
    h = expand(x)
    for layer, fn in zip(layers, functions, strict=True):
        branch, add = layer(h)
        h = add(fn(branch))
    theirs, ours = reduce(h), run(stream, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    theirs.square().sum().backward()
    ours.square().sum().backward()
    for name, parameter in stream.named_parameters():
        key = "norm.gamma" if name == "norm_weight" else name
        expected = torch.stack([layer.get_parameter(key).grad for layer in layers])
        assert parameter.grad is not None
        assert (parameter.grad - expected).abs().max() <= 1e-10 * expected.abs().max(), name
