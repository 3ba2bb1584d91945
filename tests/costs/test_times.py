"""Estimates of time: by hand for one kernel, and what they must do when a deployment changes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from twoaxis.base.meter import ATTENTION, Meter
from twoaxis.costs.calibrate import calibrate, errors, methods
from twoaxis.costs.costs import Costs, cost
from twoaxis.costs.fuse import Kernel, Part, Work, work_by
from twoaxis.costs.hardware import find_profile
from twoaxis.costs.measured import Table, interpolate, kernel_seconds, product_flops
from twoaxis.costs.roofline import work_seconds
from twoaxis.costs.trace import meta_model, trace_training
from twoaxis.kernels.dispatch import device_of, target
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment

SHAPE = ModelConfig(vocab_size=1000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8)


def test_one_kernel_by_hand() -> None:
    profile = find_profile("h100")
    rate, bandwidth = 0.65 * 989.4e12, 0.8 * 3.35e12
    product, addition = Kernel("mm", 2 * 10**6, 10**12, (1, 10, 10, 10)), Kernel("add", 3 * 10**9)
    work = Work(Counter({product: 2, addition: 3}), Counter({product: 2, Kernel("fused", 4 * 10**9): 1}))
    found = work_seconds(work, profile, "bfloat16")
    assert found.naive == pytest.approx(2 * 10**12 / rate + 3 * 3 * 10**9 / bandwidth + 5 * 2e-6)
    assert found.fused == pytest.approx(2 * 10**12 / rate + 4 * 10**9 / bandwidth + 3 * 2e-6)
    shared = work_seconds(work, profile, "bfloat16", 4)
    assert shared.naive == pytest.approx((found.naive - 5 * 2e-6) / 4 + 5 * 2e-6)


def test_a_stretch_by_hand() -> None:
    """x, y come in and z goes out; what is made and freed inside moves nothing; a product ends the stretch."""
    meter, x, y = Meter(), torch.ones(8, 4), torch.ones(8, 4)
    with meter:
        meter.part = Part("mlp")
        z = (x * y + x).exp()
        product = z @ x.mT
        meter.part = Part("stream", 0)
        _ = product @ x
        del product, _
    work = work_by(meter.take(), lambda part: part.work)
    size = 8 * 4 * 4
    assert work["mlp"].fused == {Kernel("fused", 3 * size): 1, Kernel("mm", 2 * size + 256, 512, (1, 8, 4, 8)): 1}
    assert work["mlp"].calls == 4
    assert work["mlp"].eager_bytes == 3 * size + 3 * size + 2 * size + 2 * size + 256
    assert work["stream"].fused == {Kernel("fused", 256 + size): 1}  # a narrow product fuses, its result is dropped


def on(method: str | None, **options: Any) -> Costs:
    return cost(SHAPE, method, Deployment(context=512, **options))


def test_the_plain_residual_takes_as_long_as_itself() -> None:
    found = on(None)
    assert found.train == found.prefill == found.decode == (1.0, 1.0)
    assert found.parameters_added == 0


def test_ratios_of_a_method() -> None:
    found, blocks = on("attention_residuals"), on("attention_residuals:block_size=4")
    assert 1 < blocks.train.fused < found.train.fused < found.train.naive
    assert 1 < found.prefill.fused < found.prefill.naive
    assert found.times.train.fused > 0


def test_tensor_parallelism_leaves_the_stream_whole() -> None:
    """Sub-layers shrink and the stream does not, so its share grows; sequence parallelism takes that back."""
    alone = on("hyper_connections").train.fused
    shared = on("hyper_connections", tensor_parallel=8).train.fused
    spread = on("hyper_connections", tensor_parallel=8, sequence_parallel=True).train.fused
    assert alone < shared
    assert spread < shared


def test_recomputing_takes_another_forward_pass() -> None:
    plain, again = on("deep_delta"), on("deep_delta", recompute="block")
    assert 1.2 < again.times.train.fused / plain.times.train.fused < 1.4
    assert again.training.total > plain.training.total


def test_a_faster_link_helps_a_pipeline() -> None:
    slow, fast = (
        on("attention_residuals", pipeline_stages=4, hardware=name).times.train.fused for name in ("a100", "b200")
    )
    assert fast < slow


TABLE = Table(
    {
        "call": 1e-6,
        "view": 0.5e-6,
        "points": {"copy_": [(1000, 1e-6), (100_000, 1e-5)], "add/flat": [(1000, 2e-6), (10_000, 4e-6)]},
        "products": [("mm", (1, 10, 10, 10), 2e-6), ("mm", (1, 100, 100, 100), 22e-6)],
    }
)


def test_measured_times_between_sizes() -> None:
    points = TABLE.points["copy_"]
    assert interpolate(points, 10) == 1e-6
    assert interpolate(points, 1000) == pytest.approx(1e-6)
    assert interpolate(points, 10_000) == pytest.approx(10**-5.5)
    assert interpolate(points, 1_000_000) == pytest.approx(1e-4)
    assert kernel_seconds(TABLE, Kernel("add", 1000)) == pytest.approx(1e-6 + 2e-6)
    assert kernel_seconds(TABLE, Kernel("unheard_of", 1000)) == pytest.approx(1e-6 + 1e-6)


def test_measured_products_are_found_again() -> None:
    for dims, seconds in ((1, 10, 10, 10), 2e-6), ((1, 100, 100, 100), 22e-6):
        product = Kernel("mm", 2, product_flops("mm", dims), dims)
        assert kernel_seconds(TABLE, product) == pytest.approx(1e-6 + seconds, rel=1e-3)
    assert product_flops(ATTENTION, (1, 2, 3, 4)) == 96
    assert product_flops(f"{ATTENTION}_backward", (1, 2, 3, 4)) == 192


@pytest.mark.slow
def test_this_machine_is_predicted() -> None:
    """Every stream and mixer on a shape that was not probed: ratios within 20%, the median within 10%."""
    found = calibrate()
    median, worst = errors(found["checks"])
    assert {row["method"] for row in found["checks"]} == set(methods())
    assert median < 0.10, found["checks"]
    assert worst < 0.20, found["checks"]


@pytest.mark.slow
def test_calibration_of_one_method(tmp_path: Any) -> None:
    """The whole way once: measured here, written, read again, used for another shape."""
    from twoaxis.base.files import write_json

    found = calibrate(only={"denseformer": {"stream": "denseformer"}}, rounds=3)
    assert [row["method"] for row in found["checks"]] == ["denseformer", "standard"]
    write_json(tmp_path / "here.json", found["profile"])
    profile = find_profile(str(tmp_path / "here.json"))
    assert profile.kind == "cpu"
    assert profile.bandwidth > 1e8
    small = dataclasses.replace(SHAPE, hidden_size=64, num_hidden_layers=2)
    deployment = Deployment(hardware=str(tmp_path / "here.json"), context=64, dtype="float32")
    taken = cost(small, "denseformer", deployment)
    assert 1.0 < taken.train.naive < 3.0


def test_meta_tensors_run_the_kernels_of_a_cpu() -> None:
    tensor = torch.empty(2, device="meta")
    with target("cpu"):
        assert device_of(tensor) == "cpu"
    assert device_of(tensor) == "meta"
    config = ModelConfig(
        vocab_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        mixer="short_swa",
        mixer_options={"window": 4},
    )
    on_cpu, elsewhere = (
        {kernel.op for kernel in trace_training(meta_model(config, "float32"), 4, 128, device).work("sublayers").eager}
        for device in ("cpu", None)
    )
    assert "baddbmm" in on_cpu - elsewhere  # the tiles of a band, their mask added with the product
