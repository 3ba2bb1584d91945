"""Estimates of time: by hand for one kernel, and what they must do when a deployment changes."""

from __future__ import annotations

import json
import statistics
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from benchmarks import cost_model
from tests.support.commands import run
from twoaxis.base.meter import ATTENTION, Call, Meter
from twoaxis.costs.costs import Costs, cost
from twoaxis.costs.fuse import VIEW, Kernel, Part, Work, work_by
from twoaxis.costs.hardware import find_profile
from twoaxis.costs.roofline import work_seconds
from twoaxis.costs.this_machine import TINY, LiveClock, attention
from twoaxis.costs.trace import meta_model, trace_training
from twoaxis.guide.suggest import candidates
from twoaxis.kernels import attention_fused
from twoaxis.kernels.attention import attention as windowed
from twoaxis.kernels.dispatch import device_of, target
from twoaxis.model.config import ModelConfig
from twoaxis.model.deployment import Deployment

SHAPE = ModelConfig(vocab_size=1000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8)


def test_one_kernel_by_hand() -> None:
    profile = find_profile("h100")
    rate, bandwidth = 0.65 * 989.4e12, 0.8 * 3.35e12
    product, addition = Kernel("mm", 2 * 10**6, 10**12, 7), Kernel("add", 3 * 10**9)
    eager = Counter({product: 2, addition: 3, VIEW: 9})
    work = Work(eager, Counter({product: 2, Kernel("fused", 4 * 10**9): 1}))
    found = work_seconds(work, profile, "bfloat16")
    assert found.eager == pytest.approx(2 * 10**12 / rate + 3 * 3 * 10**9 / bandwidth + 5 * 2e-6)
    assert found.fused == pytest.approx(2 * 10**12 / rate + 4 * 10**9 / bandwidth + 3 * 2e-6)
    shared = work_seconds(work, profile, "bfloat16", 4)
    assert shared.eager == pytest.approx((found.eager - 5 * 2e-6) / 4 + 5 * 2e-6)


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
    fused = {kernel._replace(number=-1): n for kernel, n in work["mlp"].fused.items()}
    assert fused == {Kernel("fused", 3 * size): 1, Kernel("mm", 2 * size + 256, 512): 1}
    assert work["mlp"].eager.total() == 4
    assert work["mlp"].eager_bytes == 3 * size + 3 * size + 2 * size + 2 * size + 256
    assert work["stream"].fused == {Kernel("fused", 256 + size): 1}  # a narrow product fuses, its result is dropped


def on(method: str | None, **options: Any) -> Costs:
    return cost(SHAPE, method, Deployment(context=512, **options))


def test_ratios_follow_the_deployment() -> None:
    plain = on(None)
    assert plain.train == plain.prefill == plain.decode == (1.0, 1.0)
    found, blocks = on("attention_residuals"), on("attention_residuals:block_size=4")
    assert 1 < blocks.train.fused < found.train.fused < found.train.eager
    assert 1 < found.prefill.fused < found.prefill.eager
    # tensor parallelism spreads sub-layers and leaves the stream whole, unless it spreads the sequence too
    ways: Any = ({}, {"tensor_parallel": 8}, {"tensor_parallel": 8, "sequence_parallel": True})
    alone, shared, spread = (on("hyper_connections", **way).train.fused for way in ways)
    assert alone < shared
    assert spread < shared
    links = [on("attention_residuals", pipeline_stages=4, hardware=name).train_time.fused for name in ("a100", "b200")]
    assert links == sorted(links, reverse=True)


def test_recomputing_takes_another_forward_pass() -> None:
    plain, again = on("deep_delta"), on("deep_delta", recompute="block")
    assert 1.2 < again.train_time.fused / plain.train_time.fused < 1.4
    assert again.training.total > plain.training.total


# On this machine.


def test_a_clock_times_each_distinct_call_once() -> None:
    clock = LiveClock("cpu", 1e9)
    work = trace_training(meta_model(TINY, "float32"), 1, 8, "cpu").work("all").eager
    timed = len(clock.calls)
    assert timed == len({kernel for kernel in work if kernel != VIEW})  # those of the overhead, which is of this model
    assert not clock.unknown
    total = sum((clock.seconds(kernel) or 0) * n for kernel, n in work.items())
    assert len(clock.calls) == timed
    assert clock.overhead * work.total() < total < 1
    assert clock.seconds(Kernel("fused", 8)) is None, "a kernel that only could be has no time"
    assert clock.seconds(Kernel("mystery", 8)) is None
    assert clock.unknown == {"mystery"}
    small = LiveClock.__new__(LiveClock)
    small.device, small.memory, small._numbers = "cpu", 10.0, {}
    with pytest.raises(ValueError, match=r"too much for the 10 B of this machine; give a smaller shape"):
        small.call(next(kernel for kernel in work if kernel.op == "mm"))


def test_attention_of_other_devices_is_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would run in place of the operator that traces have: the same numbers, forward and backward."""
    q, k, v = (torch.randn(1, heads, 6, 4, requires_grad=True) for heads in (4, 2, 2))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    plain = [t.detach() for t in (q, k, v)]
    assert torch.equal(attention(ATTENTION)(*plain, 0.0, True), out)
    found = attention(f"{ATTENTION}_backward")(torch.ones_like(out), *plain, None, None, 0.0, True)
    for a, b in zip(found, grads, strict=True):
        torch.testing.assert_close(a, b)
    monkeypatch.setattr(attention_fused, "_kernel", lambda: flex_attention)  # which has a backward on GPUs alone
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without its kernel
        over = attention("twoaxis::window_attention")(*plain, 3, 0.5)
    torch.testing.assert_close(over, windowed.reference(plain[0], plain[1], plain[2], window=3, scale=0.5))


@pytest.mark.parametrize(("n", "m", "window"), [(300, 300, 5), (140, 290, 130), (512, 512, 512)])
def test_a_window_on_a_gpu_is_one_kernel(n: int, m: int, window: int) -> None:
    """With the products of the tiles that its mask names, forward and backward, and nothing saved but its results."""
    q, k, v = (torch.empty(2, h, t, 16, device="meta", requires_grad=True) for h, t in ((4, n), (2, m), (2, m)))
    with target("cuda"), Meter() as meter:
        windowed(q, k, v, window=window, scale=0.5).sum().backward()
    calls = [event for event in meter.take() if isinstance(event, Call) and event.products]
    tiles = int(attention_fused.window_mask(n, m, window, None, torch.device("cpu")).kv_num_blocks.sum())
    assert [call.products for call in calls] == [each * 2 * 4 * tiles * 128**2 * 16 for each in (4, 8)]
    out, narrow = 4 * 2 * 4 * n * 16, 4 * 2 * 2 * m * 16
    assert calls[0].bytes == out + 2 * narrow + out + 4 * 2 * 4 * n  # the last is a logarithm for each softmax


def test_a_saved_machine_is_found_again(tmp_path: Path) -> None:
    """Saved here and read as another machine would: times of the calls that were saved, rates for the others."""
    path = tmp_path / "here.json"
    words = ("cost", "--shape", "nano", "--context", "16", "--dtype", "float32")
    done = run(*words, "--hardware", "here", "--save", str(path), "--json")
    assert done.code == 0, done.err
    live = json.loads(done.out)
    again = json.loads(run(*words, "--hardware", str(path), "--json").out)
    before, after = (found["methods"][0]["seconds"] for found in (live, again))
    assert all(after[name] == pytest.approx(before[name]) for name in ("train", "prefill", "decode"))
    assert "distinct calls as measured: " in again["assumptions"]
    other = json.loads(run(*words, "--hardware", str(path), "--stream", "deep_delta", "--json").out)
    assert "not measured and estimated from rates: " in other["assumptions"]
    assert other["methods"][1]["ratio"]["train"]["eager"] > 1


@pytest.mark.slow
def test_this_machine_is_predicted() -> None:
    """Every suggested form on one shape: ratios within 20% of measured ones, the median within 10%."""
    errors = {row.method: abs(row.error) for row in cost_model.check()}
    assert len(errors) == len(candidates())
    assert statistics.median(errors.values()) < 0.10, errors
    assert max(errors.values()) < 0.20, errors


def test_meta_tensors_run_the_kernels_of_a_cpu() -> None:
    tensor = torch.empty(2, device="meta")
    with target("cpu"):
        assert device_of(tensor) == "cpu"
    assert device_of(tensor) == "meta"
    sizes: Any = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = ModelConfig(**sizes, mixer="short_swa", mixer_options={"window": 4})
    on_cpu, elsewhere = (
        {kernel.op for kernel in trace_training(meta_model(config, "float32"), 4, 128, device).work("sublayers").eager}
        for device in ("cpu", None)
    )
    assert "baddbmm" in on_cpu - elsewhere  # the tiles of a band, their mask added with the product
