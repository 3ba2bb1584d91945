"""Where methods start, as far as no golden file says it: published values, and who learns from the first step on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import twoaxis
from tests.golden_formats.base import rms_norm, trace
from tests.support.numbers import randn
from tests.support.streams import built, embedding, maps, run
from twoaxis.depth.manifold_hyper_connections import ManifoldHyperConnectionsConfig

MIXED_BLOCK = ("mixer", "attention", "mlp")


def start(name: str, blocks: int, width: int, **options: Any) -> Any:
    """A stream at its initial values, of a width at which a standard deviation can be told."""
    return twoaxis.stream(name, blocks=blocks, width=width, **options)


def test_deep_delta() -> None:
    stream = start("deep_delta", 4, 256, value_channels=4, expand="conv")
    assert stream.gate_bias.abs().max() == 0
    assert stream.gate_weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert stream.value_bias.abs().max() <= 1 / 16
    assert stream.compress_weight.std().item() == pytest.approx(0.5 / 16, rel=0.05)
    assert (stream.compress_read - 0.25).abs().max() == 0
    x = torch.randn(1, 5, 256)
    assert torch.equal(stream.open(x).value.h, x.unsqueeze(-2).expand(-1, -1, 4, -1))
    gate = start("deep_delta", 1, 8, gate_start=0.5).gate_bias[0].item()
    assert gate == pytest.approx(torch.logit(torch.tensor(0.25)).item())


def test_elc_bert_as_published() -> None:
    stream = start("elc_bert", 12, 8, variant="base")
    for n, (newest, older) in {1: (0.731, 0.269), 5: (0.352, 0.130), 11: (0.198, 0.073)}.items():
        alpha = stream.get_parameter(f"logits.{n}").softmax(-1)
        assert [alpha[-1].item(), alpha[0].item()] == pytest.approx([newest, older], abs=5e-4)


def test_vertical_attention() -> None:
    for options, newest in (({}, 0.0), ({"init": "zeros"}, 0.0), ({"init": "newest"}, 1.0)):
        stream = start("vertical_attention", 4, 8, **options)
        for n in range(4):
            assert stream.get_parameter(f"logits.{n}").tolist() == [0.0] * n + [newest]


def test_a_router_of_lime_as_published() -> None:
    """The identity on the layer's own heads, U(-sqrt(3/n), sqrt(3/n)) on the n columns."""
    stream = start("lime", 40, 8, over="heads", kv_heads=8)
    last = stream.router["78"]
    assert last.shape == (8, 320)
    assert torch.equal(last[:, -8:], torch.eye(8))
    bound = (3 / 320) ** 0.5
    assert 0.97 * bound < last[:, :-8].abs().max() <= bound
    stream.neutral_()
    assert last[:, :-8].abs().max() == 0


@pytest.mark.parametrize("both", [False, True])
def test_muddformer(both: bool) -> None:
    stream = start("muddformer", 3, 256, prenorm=both, postnorm=both)
    for block in ("1", "2", "3"):
        newest = 0.0 if both else 1.0
        assert torch.equal(stream.static[block][:, -1], torch.full_like(stream.static[block][:, -1], newest))
        assert not stream.generator_out[block].any()
        assert stream.generator_in[block].std().item() == pytest.approx(256**-0.5, rel=0.1)
        assert not both or torch.equal(stream.post_scale[block], torch.full((256,), 0.001))


def test_the_generator_of_muddformer_wakes_in_the_second_step() -> None:
    stream = built("muddformer", by=0.0)
    assert stream.dead() == {}
    optimiser = torch.optim.SGD(stream.parameters(), lr=0.1)
    for step in range(2):
        optimiser.zero_grad()
        run(stream, embedding()).square().sum().backward()
        assert [bool(p.grad.any()) for p in stream.generator_in.values()] == [step == 1] * 4
        assert all(p.grad.any() for p in (*stream.generator_out.values(), *stream.static.values()))
        optimiser.step()


def test_hyper_connections() -> None:
    """The static start is in a golden file; sub-layers of all kinds count for the stream that is read first."""
    stream = start("hyper_connections", 2, 8, streams=4, kinds=MIXED_BLOCK, scale_start=0.5)
    assert stream.get_parameter("dynamic_beta_scale")[0] == 0.5
    assert [int(stream.static_alpha[site.index, :, 0].argmax()) for site in stream.sites] == [0, 1, 2, 3, 0, 1]
    partial = start("hyper_connections", 2, 8, streams=4, kinds=MIXED_BLOCK, placement="attention")
    assert [int(partial.static_alpha[row, :, 0].argmax()) for row in range(2)] == [1, 0]
    scales = ({"streams": 4}, 2.0), ({"streams": 3}, math.sqrt(3)), ({"readout": "mean"}, 1), ({"placement": "none"}, 1)
    for options, scale in scales:
        assert start("hyper_connections", 2, 8, **options).output_scale == scale


def manifold(blocks: int = 2, width: int = 6, **options: Any) -> Any:
    torch.manual_seed(0)
    return start("manifold_hyper_connections", blocks, width, kinds=MIXED_BLOCK, **options)


def test_manifold_hyper_connections() -> None:
    n, count = 3, 6
    paper, deepseek, lite = (manifold(streams=n, start=s, readout="head") for s in ("paper", "deepseek", "lite"))
    for stream, scale in ((paper, 0.01), (deepseek, 1.0)):
        assert torch.equal(stream.scale, torch.full((count, 3), scale))
        assert torch.equal(stream.head_scale, torch.full((1,), scale))
        assert stream.base.abs().max() == stream.head_base.abs().max() == 0
        assert 0.018 < stream.fn.std() < 0.022
        assert 0.01 < stream.head_fn.std() < 0.03
    assert manifold(init_std=0.5).fn.std() > 0.4
    for row in range(count):
        vectors = torch.full((n,), -1.0)
        vectors[row % n] = 1.0
        comb = torch.full((n, n), -8.0).fill_diagonal_(0.0)
        assert torch.equal(lite.base[row], torch.cat([vectors, vectors, comb.flatten()]))
    assert lite.fn.abs().max() == 0
    weighted = manifold(norm_weight=True, readout="head")
    assert torch.equal(weighted.norm_weight, torch.ones(6, 4 * 6))
    assert torch.equal(weighted.head_norm_weight, torch.ones(4 * 6))


def streams_of(stream: Any, x: Tensor, *norms: Any) -> Tensor:
    """The last state of a pass."""
    return trace(stream, x, maps(len(stream.sites), x.shape[-1], x.dtype), *norms)[2].value.h


def test_the_default_start_tells_streams_apart_and_the_published_scale_does_not() -> None:
    def apart(**options: Any) -> float:
        norms = [rms_norm(torch.ones(()), 1e-6)] * 6
        h = streams_of(manifold(width=128, **options), randn(2, 16, 128, dtype=torch.float32), norms)
        return ((h - h.mean(-2, keepdim=True)).norm() / h.norm()).item()

    assert apart() > 0.02
    assert apart(form="deepseek") > 0.02
    assert apart(start="paper") < 0.001


def test_neutral_start_lets_streams_come_apart() -> None:
    """Equal gates would get equal gradients for ever."""
    stream, x = manifold(streams=2, start="neutral", readout="mean").double(), randn(2, 3, 6)
    optimizer = torch.optim.SGD(stream.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        run(stream, x, maps(6, 6)).square().sum().backward()
        optimizer.step()
    h = streams_of(stream, x)
    assert (h[..., 0, :] - h[..., 1, :]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{"form": "deepseek"}, {"post_scale": 1.0}, {"pre_eps": 0.1}], ids=str)
def test_epsilons_leave_no_neutral_parameters(options: dict[str, Any]) -> None:
    stream = manifold(**options)
    assert stream.neutral == "none"
    with pytest.raises(ValueError, match="no neutral parameters"):
        stream.neutral_()


def test_forms_set_what_is_left_open() -> None:
    def chosen(**options: Any) -> tuple[Any, ...]:
        config = ManifoldHyperConnectionsConfig(**options)
        return config.sinkhorn_eps, config.pre_eps, config.norm_eps, config.readout, config.start

    assert chosen() == (0.0, 0.0, 1e-20, "sum", "deepseek")
    assert chosen(form="deepseek") == (1e-6, 1e-6, 1e-6, "head", "deepseek")
    assert chosen(form="deepseek", readout="mean", pre_eps=0.0) == (1e-6, 0.0, 1e-6, "mean", "deepseek")


@pytest.mark.parametrize("relu", ["trainable", "literal"])
def test_w_of_deep_cross_attention_learns_only_with_a_slope_at_zero(relu: str) -> None:
    """The published ReLU gives w a gradient of exactly zero at its start; the clamp does not."""
    stream = built("deep_cross_attention", by=0.0, relu=relu)
    assert set(stream.dead()) == ({f"token.{block}" for block in range(5)} if relu == "literal" else set())
    run(stream, embedding()).square().sum().backward()
    for w in stream.token.values():
        rows = w.grad.abs().amax(-1)
        assert bool((rows == 0).all() if relu == "literal" else (rows > 0).all())


def test_dead_names_rows_and_follows_the_values() -> None:
    stream = built("deep_cross_attention", relu="literal")
    assert stream.dead() == {}
    with torch.no_grad():
        stream.token["2"][1].zero_()
    assert set(stream.dead()) == {"token.2[1]"}
    run(stream, embedding()).sum().backward()
    assert (stream.token["2"].grad.abs().amax(-1) == 0).tolist() == [False, True, False]
