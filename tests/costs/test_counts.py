"""Parameters against built models, products against torch's counter, traces on no numbers against real runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.costs.helpers import FIRST, MIXER_VARIANTS, STREAM_VARIANTS, Fields, label
from twoaxis.base.meter import ATTENTION, extent
from twoaxis.costs.calibrate import counted, passes
from twoaxis.costs.costs import cost
from twoaxis.costs.deployment import Deployment
from twoaxis.costs.recorder import Recorder
from twoaxis.costs.states import closing
from twoaxis.costs.trace import Model, _run_stream, site_traffic
from twoaxis.model.config import DecoderConfig
from twoaxis.model.decoder import Decoder
from twoaxis.model.flops import forward_flops, training_flops
from twoaxis.model.variant import Contender

SHAPE = DecoderConfig(vocabulary=40, width=16, blocks=3, heads=4, kv_heads=2, hidden=24)


@pytest.mark.parametrize("fields", STREAM_VARIANTS + MIXER_VARIANTS, ids=label)
def test_parameters_of_built_models(fields: Fields) -> None:
    from twoaxis.model.flops import count_parameters

    config = dataclasses.replace(SHAPE, **fields)
    built = sum(p.numel() for p in Decoder(config).parameters())
    assert count_parameters(config).total == built
    method = Contender(label="it", **fields)
    if fields in FIRST or "mixer" in fields:
        found = cost(SHAPE, method, Deployment(context=8, dtype="float32"))
        assert found.parameters.total == built
        assert found.parameters_added == built - sum(p.numel() for p in Decoder(SHAPE).parameters())
        assert found.forward == forward_flops(config, 8)
        assert found.training == training_flops(config, 8)


@pytest.mark.parametrize("fields", [*FIRST, *MIXER_VARIANTS], ids=label)
def test_matrix_products_as_torch_counts_them(fields: Fields) -> None:
    """Everything but fused attention, which torch's counter does not know on the CPU; forward and backward."""
    config = dataclasses.replace(SHAPE, **fields)
    counter = FlopCounterMode(display=False)
    passes(config, 2, 24)(counter)
    ops = counted(config, 2, 24).ops
    ours = sum(op.flops * n for op, n in ops.items() if not op.name.startswith(ATTENTION))
    assert ours == counter.get_total_flops()
    attention = sum(op.flops * n for op, n in ops.items() if op.name.startswith(ATTENTION))
    plain = 3 * 2 * 24 * forward_flops(SHAPE, 24).scores
    assert attention >= plain
    if fields.get("mixer") != "short_swa" and fields.get("stream") != "depth_attention":
        assert attention == plain


@pytest.mark.parametrize("fields", [*FIRST, {"mixer": "canon"}, {"mixer": "short_swa"}], ids=label)
def test_no_numbers_count_like_numbers(fields: Fields) -> None:
    """The bytes that a real pass moves on the CPU, operation by operation."""
    config = dataclasses.replace(SHAPE, **fields)
    recorder = Recorder()
    passes(config, 2, 24)(recorder)
    real, ours = recorder.take(), counted(config, 2, 24)
    assert ours.naive_bytes == pytest.approx(real.naive_bytes, rel=0.03)
    assert ours.calls == pytest.approx(real.calls, rel=0.06)


@pytest.mark.parametrize("name", ["standard", "deep_delta", "hyper_connections", "manifold_hyper_connections"])
def test_uniform_streams_continue_exactly(name: str) -> None:
    """Two and three blocks carried on to six are the six counted one by one."""
    model = Model(dataclasses.replace(SHAPE, blocks=6, stream=name), "bfloat16")
    assert model.uniform
    trace = model.train(1, 12)
    ours, whole = trace.stream, _run_stream(model.trunk, trace.pieces, 1, 12, 6, closing(model.trunk))
    assert ours._replace(backward=whole.backward, extra=0) == whole._replace(extra=0)
    # gradients of stacked parameters are filled up with zeros for the blocks that were left out
    assert ours.backward.flops == whole.backward.flops
    assert ours.backward.calls == pytest.approx(whole.backward.calls, rel=0.02)
    assert ours.backward.naive_bytes == pytest.approx(whole.backward.naive_bytes, rel=0.02)
    assert ours.backward.fused_bytes == pytest.approx(whole.backward.fused_bytes, rel=0.02)
    with torch.no_grad():
        assert model.traffic(1, 12) == site_traffic(model.trunk, 1, 12, torch.bfloat16, 6)
    norms = 2 * 6 * 2 * 16  # gradients of the norms of blocks that were left out
    assert abs(ours.extra - whole.extra) <= norms


@pytest.mark.parametrize("options", [{}, {"block_size": 4}, {"window": 2}])
def test_growing_streams_are_counted_whole(options: Fields) -> None:
    config = dataclasses.replace(SHAPE, blocks=6, stream="attention_residuals", stream_options=options)
    assert not Model(config, "bfloat16").uniform


def test_copies_that_a_tensor_only_shows_are_no_bytes() -> None:
    one = torch.empty(2, 1, 8)
    assert extent(one) == extent(one.expand(2, 5, 8)) == 4 * 16
    assert extent(one.expand(2, 0, 8)) == 0


def test_traffic_of_the_plain_residual_is_three_vectors() -> None:
    """A site reads the residual and an increment and writes their sum; the first has nothing to do."""
    sites = Model(SHAPE, "bfloat16").traffic(1, 64)
    assert [site.fused for site in sites] == [0.0] + [3 * 16 * 2.0] * 6
    assert [site.naive for site in sites] == [site.fused for site in sites]
    assert [site.kind for site in sites] == ["attention", "mlp"] * 3 + ["out"]


@pytest.mark.parametrize("sources", [2, 5])
def test_traffic_of_a_read_is_its_sources_once(sources: int) -> None:
    """Full Attention Residuals: n sources, the newest just written, one result; small logits aside."""
    config = DecoderConfig(width=512, blocks=3, heads=4, stream="attention_residuals")
    site = Model(config, "float32").traffic(1, 64)[sources - 1]
    assert site.fused / (4 * 512) == pytest.approx(sources + 1, abs=0.25)
    assert site.naive > 1.5 * site.fused


def test_traffic_of_attention_over_depth_is_its_window() -> None:
    """A read takes a query, the keys and values of 4 sources and gives one vector; the ring is written on the way."""
    config = DecoderConfig(
        width=512, blocks=6, heads=4, stream="depth_attention", stream_options={"window": 4, "heads": 4}
    )
    site = Model(config, "float32").traffic()[8]
    assert 9 < site.fused / (4 * 512) < 9 + 16


def test_traffic_of_hyper_connections_by_hand() -> None:
    """Four streams and an increment come in, four streams and a read go out; weights per token aside."""
    config = DecoderConfig(width=512, blocks=6, heads=4, stream="hyper_connections")
    sites = Model(config, "float32").traffic()
    assert [site.fused / (4 * 512) for site in sites[2:]] == pytest.approx([10.0] * 11, abs=0.15)
